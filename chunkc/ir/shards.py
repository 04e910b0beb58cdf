"""How a parameter is cut over ranks: by rows of its first dimension, as `torch.distributed.tensor.Shard(0)` does it.

On a mesh of two dimensions it is cut over the inner one, and ranks along the outer one have copies of each other's
parts. What cannot be cut, a scalar, is one part, of which every rank has a copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from chunkc.ir.errors import OptionsError

ZeroStage = Literal[1, 2, 3]

PACKED_NBYTES, PACKING_NBYTES = 1 << 16, 1 << 20
"""Parts of at most so many bytes go from rank to rank together with others of their chunk, in one message; of all ranks
together so many, the smallest first, since that takes room. For larger ones a message of their own takes less time than
the copies (gloo on one host: by a third less for parts of 256 KiB, and by a third more for those of 64 KiB)."""


def check_zero_stage(zero_stage: object) -> None:
    """Raises OptionsError: there is no such stage."""
    if zero_stage not in (None, 1, 2, 3) or isinstance(zero_stage, bool):
        raise OptionsError(
            f"zero_stage is {zero_stage!r}; allowed: 1, 2, 3, or None, with which the plan chooses per group"
        )


@dataclass(frozen=True)
class Shards:
    """The parts of a contiguous tensor, one for each rank of a row: of the ranks that have all parts between them.

    Every rank but the last ones has as many rows, `ceil(rows / num_ranks)`; the last ones have fewer, or none.

    Attributes:
        shape: of the whole tensor. Without dimensions it has one part.
        num_ranks: that have a part each.
        rank: whose part is meant where none is named, as its place in the row.
        zero_stage: what every rank has whole from one step to the next, beside its parts: in stage 3 nothing, in
            stage 2 parameters, in stage 1 gradients too. None: that is chosen for each group
            (`ChunkGroup.is_replicated`).
        num_copies: of every part: so many rows there are. `copy`: which of them this rank's is.
    """

    shape: tuple[int, ...]
    num_ranks: int
    rank: int
    zero_stage: ZeroStage | None = 3
    num_copies: int = 1
    copy: int = 0

    @property
    def row(self) -> range:
        """The ranks of this one's row, in the order of their parts."""
        return range(self.copy * self.num_ranks, (self.copy + 1) * self.num_ranks)

    @property
    def copies(self) -> range:
        """The ranks that have this one's part."""
        return range(self.rank, self.num_copies * self.num_ranks, self.num_ranks)

    @property
    def exchange_numel(self) -> int:
        """Elements that a rank receives at most while a gradient's parts are added up."""
        return (self.num_ranks - 1) * self.largest_numel + (self.num_copies - 1) * -(
            -self.largest_numel // self.num_copies
        )

    @cached_property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    @cached_property
    def stride(self) -> tuple[int, ...]:
        """Of the whole tensor, in elements."""
        return tuple(math.prod(max(n, 1) for n in self.shape[dim + 1 :]) for dim in range(len(self.shape)))

    @property
    def largest_numel(self) -> int:
        """Elements of the largest part, which is that of rank 0."""
        begin, end = self.span(0)
        return end - begin

    @property
    def numel_of_equals(self) -> int:
        """Elements of all parts, if each were the largest."""
        return self.num_ranks * self.largest_numel

    def span(self, rank: int) -> tuple[int, int]:
        """A rank's part: its first element in the whole tensor, and the one after its last."""
        row_numel = math.prod(self.shape[1:])
        begin, end = self.rows(rank)
        return begin * row_numel, end * row_numel

    def rows(self, rank: int) -> tuple[int, int]:
        """The same in rows of the first dimension."""
        rows = self.shape[0] if self.shape else 1
        each = -(-rows // self.num_ranks)
        return min(rank * each, rows), min((rank + 1) * each, rows)


def parcels(of_all: Sequence[Shards], itemsize: int) -> list[list[int]]:
    """Parameters of one chunk, as indexes, by the messages that ranks send their parts in: the same on all ranks."""
    together: dict[tuple[int, int], list[int]] = {}
    nbytes = 0
    for index in sorted(range(len(of_all)), key=lambda index: of_all[index].numel_of_equals):
        shards = of_all[index]
        nbytes += shards.numel_of_equals * itemsize
        is_small = shards.largest_numel * itemsize <= PACKED_NBYTES and nbytes <= PACKING_NBYTES
        if is_small and shards.num_ranks * shards.num_copies > 1:
            together.setdefault((shards.num_ranks, shards.num_copies), []).append(index)
    packed = {index for parcel in together.values() for index in parcel}
    return [*([index] for index in range(len(of_all)) if index not in packed), *together.values()]
