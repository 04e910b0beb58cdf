"""How a parameter is cut over ranks: by rows of its first dimension, as `torch.distributed.tensor.Shard(0)` does it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from chunkc.ir.errors import OptionsError

ZeroStage = Literal[1, 2, 3]


def check_zero_stage(zero_stage: object) -> None:
    """Raises OptionsError: there is no such stage."""
    if zero_stage not in (None, 1, 2, 3) or isinstance(zero_stage, bool):
        raise OptionsError(
            f"zero_stage is {zero_stage!r}; allowed: 1, 2, 3, or None, with which the plan chooses per group"
        )


@dataclass(frozen=True)
class Shards:
    """The parts of a contiguous tensor, one for each rank.

    Every rank but the last ones has as many rows, `ceil(rows / num_ranks)`; the last ones have fewer, or none.

    Attributes:
        shape: of the whole tensor, with at least one dimension.
        rank: whose part is meant where none is named.
        zero_stage: what every rank has whole from one step to the next, beside its parts: in stage 3 nothing, in
            stage 2 parameters, in stage 1 gradients too. None: that is chosen for each group (`ChunkGroup.is_whole`).
    """

    shape: tuple[int, ...]
    num_ranks: int
    rank: int
    zero_stage: ZeroStage | None = 3

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def largest_numel(self) -> int:
        """Elements of the largest part, which is that of rank 0."""
        begin, end = self.span(0)
        return end - begin

    def span(self, rank: int) -> tuple[int, int]:
        """A rank's part: its first element in the whole tensor, and the one after its last."""
        row_numel = math.prod(self.shape[1:])
        begin, end = self.rows(rank)
        return begin * row_numel, end * row_numel

    def rows(self, rank: int) -> tuple[int, int]:
        """The same in rows of the first dimension."""
        rows = self.shape[0]
        each = -(-rows // self.num_ranks)
        return min(rank * each, rows), min((rank + 1) * each, rows)
