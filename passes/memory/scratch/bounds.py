"""Bound the scratch bytes of rare operators on the CPU: multiples of what goes in, not what ATen or MKL decide inside.

LAPACK's workspaces come from torch's allocator, in sizes that LAPACK is asked for when it runs: so many numbers for
each row or column of one matrix. The most that MKL wanted, for matrices up to 400 x 400, stands in
`scratch.operators`. Sorted values come with their positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from chunkc.passes.memory.scratch.copies import nbytes_of
from chunkc.passes.memory.scratch.rules import Call

_SLACK_NBYTES = 1024


@dataclass(frozen=True)
class Bound:
    """An upper bound: the sum of all that follows, and 1 KiB; itself a rule.

    Attributes:
        copies: of the largest operand.
        positions: 64-bit integers for each of its elements.
        rows: bytes for each row of its matrices.
        work: numbers for each row or column of one matrix.
        numbers: numbers, whatever the size.
    """

    copies: int = 0
    positions: int = 0
    rows: int = 0
    work: int = 0
    numbers: int = 0

    def __call__(self, call: Call) -> int:
        largest = max(call.tensors, key=nbytes_of)
        most = max(tensor.numel() for tensor in call.tensors)
        edge = max((size for tensor in call.tensors for size in tensor.shape[-2:]), default=1)
        numbers = self.work * edge + self.numbers
        nbytes = self.copies * nbytes_of(largest) + self.positions * 8 * most + self.rows * prod(largest.shape[:-1])
        return nbytes + numbers * largest.itemsize + 8 * call.num_threads + _SLACK_NBYTES
