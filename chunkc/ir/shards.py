"""Shard a parameter over ranks by rows of its first dimension, as `torch.distributed.tensor.Shard(0)` does.

On a mesh of two dimensions it is sharded over the inner one, and ranks along the outer one hold copies of the same
shards. A scalar cannot be cut: it is one shard, of which every rank has a copy.
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
"""Largest shard, in bytes, that shares a message with others of its chunk; and largest sum of these over all ranks, the
smallest first, since packing takes room. For larger shards a message of their own takes less time than the copies (gloo
on one host: by a third less for shards of 256 KiB, and by a third more for those of 64 KiB)."""


def check_zero_stage(zero_stage: object) -> None:
    """Raise OptionsError if there is no such stage."""
    if zero_stage not in (None, 1, 2, 3) or isinstance(zero_stage, bool):
        raise OptionsError(
            f"zero_stage is {zero_stage!r}; allowed: 1, 2, 3, or None, with which the plan chooses per group"
        )


@dataclass(frozen=True)
class Shards:
    """Shards of a contiguous tensor, one for each rank of a row.

    A row is a set of ranks that hold one full set of shards. Every rank but the last ones holds `ceil(rows /
    num_ranks)` rows of the tensor; the last ones hold fewer, or none.

    Attributes:
        shape: of the whole tensor. Without dimensions it has one shard.
        num_ranks: ranks of a row, each with one shard.
        rank: the default rank, as its place in the row.
        zero_stage: data that is replicated from one step to the next, in addition to shards: in stage 3 none, in stage
            2 parameters, in stage 1 gradients too. None: that is chosen for each group (`ChunkGroup.is_replicated`).
        num_copies: of every shard, that is, the number of rows.
        copy: index of this rank's row.
    """

    shape: tuple[int, ...]
    num_ranks: int
    rank: int
    zero_stage: ZeroStage | None = 3
    num_copies: int = 1
    copy: int = 0

    @property
    def row(self) -> range:
        """Ranks of this rank's row, in the order of their shards."""
        return range(self.copy * self.num_ranks, (self.copy + 1) * self.num_ranks)

    @property
    def copies(self) -> range:
        """Ranks that hold this rank's shard."""
        return range(self.rank, self.num_copies * self.num_ranks, self.num_ranks)

    @property
    def exchange_numel(self) -> int:
        """Largest number of elements that a rank receives while a gradient's shards are added up."""
        return (self.num_ranks - 1) * self.largest_numel + (self.num_copies - 1) * -(
            -self.largest_numel // self.num_copies
        )

    @cached_property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    @cached_property
    def stride(self) -> tuple[int, ...]:
        """Strides of the whole tensor, in elements."""
        return tuple(math.prod(max(n, 1) for n in self.shape[dim + 1 :]) for dim in range(len(self.shape)))

    @property
    def largest_numel(self) -> int:
        """Elements of the largest shard, which is that of rank 0."""
        begin, end = self.span(0)
        return end - begin

    @property
    def numel_of_equals(self) -> int:
        """Elements of all shards, if each were the largest."""
        return self.num_ranks * self.largest_numel

    def span(self, rank: int) -> tuple[int, int]:
        """Return a rank's shard: its first element in the whole tensor, and the element after its last."""
        row_numel = math.prod(self.shape[1:])
        begin, end = self.rows(rank)
        return begin * row_numel, end * row_numel

    def rows(self, rank: int) -> tuple[int, int]:
        """Return a rank's shard in rows of the first dimension."""
        rows = self.shape[0] if self.shape else 1
        each = -(-rows // self.num_ranks)
        return min(rank * each, rows), min((rank + 1) * each, rows)


def parcels(shards_of: Sequence[Shards], itemsize: int) -> list[list[int]]:
    """Group a chunk's parameters, as indexes, by the messages in which ranks send their shards.

    All ranks group them alike.
    """
    shared: dict[tuple[int, int], list[int]] = {}  # (ranks, copies) -> parameters in one message
    nbytes = 0
    for index in sorted(range(len(shards_of)), key=lambda index: shards_of[index].numel_of_equals):
        shards = shards_of[index]
        nbytes += shards.numel_of_equals * itemsize
        is_small = shards.largest_numel * itemsize <= PACKED_NBYTES and nbytes <= PACKING_NBYTES
        if is_small and shards.num_ranks * shards.num_copies > 1:
            shared.setdefault((shards.num_ranks, shards.num_copies), []).append(index)
    packed = {index for parcel in shared.values() for index in parcel}
    return [*([index] for index in range(len(shards_of)) if index not in packed), *shared.values()]
