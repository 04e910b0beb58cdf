"""Describe the stages of a chunk group's optimizer update: the kinds of data each reads and writes, and their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from chunkc.ir.layout import GRAD, PARAM, ChunkGroup
from chunkc.ir.plan import Tile
from chunkc.ir.states import EXP_AVG, EXP_AVG_SQ, MASTER, StateFormat, num_entries


@dataclass(frozen=True)
class UpdateStage:
    """Kinds of data that one stage needs in slots: those it only reads, and those it (also) writes."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]

    @property
    def kinds(self) -> tuple[str, ...]:
        return (*self.reads, *self.writes)


@lru_cache
def update_stages(kinds: tuple[str, ...], num_stages: int) -> tuple[UpdateStage, ...]:
    """Return the stages of an update of a group that has these kinds of data.

    One stage: an elementwise rule, such as Adam's. Two: a rule that scales each tensor's update by its norm, such as
    LAMB's. The first computes the moments and sums up squares; once all of a tensor is done, the second computes the
    parameters from the moments, without the gradients.
    """
    if num_stages == 1:
        return (UpdateStage((GRAD,), tuple(kind for kind in kinds if kind != GRAD)),)
    assert num_stages == 2, num_stages
    moments = (EXP_AVG, EXP_AVG_SQ)
    target = tuple(kind for kind in kinds if kind in (PARAM, MASTER))
    return (UpdateStage((GRAD, MASTER if MASTER in kinds else PARAM), moments), UpdateStage(moments, target))


@dataclass(frozen=True)
class UpdateTraffic:
    """Bytes that the kernels of one stage read and write in the memory they update in."""

    read_nbytes: int
    written_nbytes: int

    @property
    def nbytes(self) -> int:
        return self.read_nbytes + self.written_nbytes


@lru_cache
def update_traffic(
    dtype: torch.dtype, states: StateFormat, num_elements: int, num_stages: int = 1
) -> tuple[UpdateTraffic, ...]:
    """Return the bytes that each stage of an update of so many parameters reads and writes.

    Gradients have the parameters' dtype. Of a parameter that has a whole master, the master is read and both are
    written. Not counted are bytes that stay in caches: scalars, and LAMB's sums of squares, a pair for each 16,384
    elements.
    """
    dtypes = {PARAM: dtype, GRAD: dtype, **states.dtypes(dtype)}

    def nbytes(kinds: Sequence[str]) -> int:
        return sum(num_entries(kind, num_elements) * dtypes[kind].itemsize for kind in kinds)

    traffic = []
    for stage in update_stages(tuple(dtypes), num_stages):
        read = [kind for kind in stage.kinds if kind != PARAM or MASTER not in stage.kinds]
        traffic.append(UpdateTraffic(nbytes(read), nbytes(stage.writes)))
    return tuple(traffic)


def tile_traffic(group: ChunkGroup, tile: Tile) -> UpdateTraffic:
    """Return the bytes that the update of one tile of a group reads and writes."""
    return update_traffic(group.dtype, group.states, tile.end - tile.begin, tile.num_stages)[tile.stage]
