"""Bound the scratch bytes of rare operators on the CPU: multiples of what goes in, not what ATen or MKL decide inside.

LAPACK's workspaces come from torch's allocator, in sizes that LAPACK is asked for when it runs: so many numbers for
each row or column of one matrix. The most that MKL wanted, for matrices up to 400 x 400, stands in
`scratch.operators`. Sorted values come with their positions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from chunkc.passes.memory.scratch.copies import nbytes_of
from chunkc.passes.memory.scratch.rules import Call

_SLACK_NBYTES = 1024


@dataclass(frozen=True)
class Bound:
    """An upper bound: the sum of all that follows, a block by which a matrix is transposed, and 1 KiB; itself a rule.

    Attributes:
        copies: of the largest operand.
        strided: copies more, where a matrix is neither contiguous nor transposed.
        positions: 64-bit integers for each of its elements.
        rows: bytes for each row of its matrices.
        work: numbers for each row or column of one matrix.
        small_work: that many instead, where there are fewer than 32: LAPACK then works without blocks.
        numbers: numbers, whatever the size; none where `small_work` applies.
    """

    copies: int = 0
    strided: int = 0
    positions: int = 0
    rows: int = 0
    work: int = 0
    small_work: int | None = None
    numbers: int = 0

    def __call__(self, call: Call) -> int:
        largest = max(call.tensors, key=nbytes_of)
        most = max(tensor.numel() for tensor in call.tensors)
        edge = max((size for tensor in call.tensors for size in tensor.shape[-2:]), default=1)
        numbers = self.work * edge + self.numbers
        if self.small_work is not None and edge < 32:
            numbers = self.small_work * edge
        is_dense = all(t.is_contiguous() or t.mT.is_contiguous() for t in call.tensors if t.dim() > 1)
        copies = self.copies + (0 if is_dense else self.strided)
        nbytes = copies * nbytes_of(largest) + self.positions * 8 * most + self.rows * prod(largest.shape[:-1])
        return nbytes + (numbers + min(most, 60 * 60)) * largest.itemsize + 8 * call.num_threads + _SLACK_NBYTES


_QR = Bound(strided=1, work=97, small_work=3)


def qr_rule(call: Call) -> int:
    """Add, of matrices of more rows than columns, a copy in which R is made, and in mode "r" what it is cut from."""
    rows, columns = call.tensors[0].shape[-2:]
    copies = ("complete", "reduced", "r").index(call["mode"]) if rows > columns else 0
    return replace(_QR, copies=copies)(call)
