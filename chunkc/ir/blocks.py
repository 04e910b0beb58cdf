"""Describe a rank's block of a tensor: a range of each dimension.

`chunkc.distribute` shards a tensor by rows. If `parallelize_module` sharded it before, a rank has rows of its columns,
or rows of its rows. In row-major memory a block is a sequence of runs of equal length.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Block:
    """A rank's block of a tensor.

    Attributes:
        shape: of the whole tensor.
        ranges: of each dimension, the first index and the index after the last.
        is_first: whether this rank is the first of the ranks that hold the same block.
    """

    shape: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]
    is_first: bool = True

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(end - begin for begin, end in self.ranges)

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def is_whole(self) -> bool:
        return self.sizes == self.shape

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of the block in the whole tensor."""
        return tuple(slice(begin, end) for begin, end in self.ranges)

    @property
    def run_numel(self) -> int:
        """Number of consecutive elements of the whole tensor in each run."""
        return math.prod(self.sizes[max(self._last_cut, 0) :])

    def runs(self) -> Iterator[int]:
        """Yield the first element of each run of `run_numel` elements, in order."""
        if not self.numel:
            return
        strides = [math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        first = sum(begin * stride for (begin, _), stride in zip(self.ranges, strides, strict=True))
        outer = [range(0, size * stride, stride) for size, stride in zip(self.sizes, strides[: max(self._last_cut, 0)])]
        for offsets in itertools.product(*outer):
            yield first + sum(offsets)

    @property
    def _last_cut(self) -> int:
        """Last dimension that this rank holds only in part; -1: it holds all of every dimension."""
        return max((dim for dim, size in enumerate(self.sizes) if size != self.shape[dim]), default=-1)


def block_of(shape: tuple[int, ...], cuts: Sequence[tuple[int, int, int]], *, is_first: bool) -> Block:
    """Shard a tensor along each cut in turn and return this rank's block.

    Args:
        cuts: a dimension, the number of ranks it is cut over, and this rank's index among them. All ranks but the last
            ones hold `ceil(rows / ranks)` rows, as in `torch.chunk`.
    """
    ranges = [(0, size) for size in shape]
    for dim, num_ranks, rank in cuts:
        begin, end = ranges[dim]
        each = -(-(end - begin) // num_ranks)
        ranges[dim] = min(begin + rank * each, end), min(begin + (rank + 1) * each, end)
    return Block(shape, tuple(ranges), is_first)
