"""What a rank has of a tensor, as a range of each of its dimensions.

Ranks that `chunkc.distribute` cuts a tensor over have rows of it. Where `parallelize_module` has cut it before, a rank
has rows of its columns, or rows of its rows. In memory that is row-major these are runs of equal length.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Block:
    """A rank's part of a tensor.

    Attributes:
        shape: of the whole tensor.
        ranges: of each dimension, the first index and the one after the last.
        is_first: whether this rank is the first of those that have the same.
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
        """The block as an index of the whole tensor."""
        return tuple(slice(begin, end) for begin, end in self.ranges)

    @property
    def run_numel(self) -> int:
        """Elements that follow on each other in the whole tensor."""
        return math.prod(self.sizes[max(self._last_cut, 0) :])

    def runs(self) -> Iterator[int]:
        """The first element of each run of `run_numel` elements, in order."""
        if not self.numel:
            return
        strides = [math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        first = sum(begin * stride for (begin, _), stride in zip(self.ranges, strides, strict=True))
        outer = [range(0, size * stride, stride) for size, stride in zip(self.sizes, strides[: max(self._last_cut, 0)])]
        for offsets in itertools.product(*outer):
            yield first + sum(offsets)

    @property
    def _last_cut(self) -> int:
        """The last dimension of which this rank has not all; -1: it has all of each."""
        return max((dim for dim, size in enumerate(self.sizes) if size != self.shape[dim]), default=-1)


def block_of(shape: tuple[int, ...], cuts: Sequence[tuple[int, int, int]], *, is_first: bool) -> Block:
    """The block that is left of a tensor by some cuts, one after the other.

    Args:
        cuts: a dimension, over how many ranks it is cut, and which of these this one is. All but the last ones have as
            many rows, `ceil(rows / ranks)`, as `torch.chunk` has it.
    """
    ranges = [(0, size) for size in shape]
    for dim, num_ranks, rank in cuts:
        begin, end = ranges[dim]
        each = -(-(end - begin) // num_ranks)
        ranges[dim] = min(begin + rank * each, end), min(begin + (rank + 1) * each, end)
    return Block(shape, tuple(ranges), is_first)
