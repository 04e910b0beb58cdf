"""Bound the scratch bytes of rare operators on the CPU: multiples of what goes in, not what ATen or MKL decide inside.

LAPACK's workspaces come from torch's allocator, in sizes that LAPACK is asked for when it runs: so many numbers for
each row or column of one matrix. The most that MKL wanted stands in `scratch.operators` and `scratch.decompositions`.
LAPACK reads matrices by columns. Sorted values come with their positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from torch import Tensor

from chunkc.passes.memory.scratch.copies import contiguous_copy_nbytes, nbytes_of
from chunkc.passes.memory.scratch.rules import Call

_SLACK_NBYTES = 1024
_BLOCK = 60 * 60
"""Elements of the block through which ATen transposes a single matrix that has as many."""


@dataclass(frozen=True)
class Bound:
    """An upper bound: the sum of all that follows and 1 KiB; itself a rule.

    Attributes:
        copies: of the largest operand.
        matrices: copies of one matrix of it.
        strided: copies more, where a batch of matrices is neither contiguous nor transposed.
        by_columns: whether the first operand is copied where its matrices do not lie column by column.
        transposes: whether single matrices are transposed in blocks.
        positions: 64-bit integers for each element of the largest operand.
        rows: bytes for each row of its matrices.
        work: numbers for each row or column of one matrix.
        numbers: numbers, whatever the size.
    """

    copies: int = 0
    matrices: int = 0
    strided: int = 0
    by_columns: bool = False
    transposes: bool = False
    positions: int = 0
    rows: int = 0
    work: int = 0
    numbers: int = 0

    def __call__(self, call: Call) -> int:
        largest = max(call.tensors, key=nbytes_of)
        most = max(tensor.numel() for tensor in call.tensors)
        edge = max((size for tensor in call.tensors for size in tensor.shape[-2:]), default=1)
        numbers = self.work * edge + self.numbers
        if self.transposes and largest.dim() == 2 and most >= _BLOCK:
            numbers += _BLOCK
        nbytes = (self.copies + self.strided * any(map(_has_gaps, call.tensors))) * nbytes_of(largest)
        nbytes += self.matrices * edge**2 * largest.itemsize + self.positions * 8 * most
        if self.by_columns:
            nbytes += contiguous_copy_nbytes(call.tensors[0].mT)
        nbytes += self.rows * prod(largest.shape[:-1])
        return nbytes + numbers * largest.itemsize + 8 * call.num_threads + _SLACK_NBYTES


def _has_gaps(batch: Tensor) -> bool:
    """Whether it is a batch of matrices that is neither contiguous nor transposed."""
    return batch.dim() > 2 and not is_dense(batch)


def is_dense(matrices: Tensor) -> bool:
    """Whether matrices are contiguous or transposed."""
    return matrices.is_contiguous() or matrices.mT.is_contiguous()
