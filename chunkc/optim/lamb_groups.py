"""LAMB's updates: of a chunk group's tiles in two stages, and of tensors where they are.

Rows of elements that are summed up as one end at multiples of 16,384 of the group's elements, in slots, at home and
for a tensor that stays, so that sums and results have the same bits wherever the update happens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType

import torch

from chunkc.ir.chunks import GRAD, PARAM
from chunkc.ir.plan import Tile
from chunkc.ir.states import EXP_AVG, EXP_AVG_SQ, MASTER
from chunkc.kernels import lamb_cpu, lamb_triton
from chunkc.kernels.formats import AdamFormat, AdamSlots, GradScale, Run
from chunkc.kernels.lamb_formats import ROW, LambHyper, LambWork, lamb_table, lamb_work, new_partials
from chunkc.optim.device_adam import TABLE_NBYTES, upload
from chunkc.optim.doubts import InDoubt, decided
from chunkc.recent import Recent

LambRuns = Sequence[tuple[int, int, LambHyper | InDoubt]]
"""Elements `[begin, end)` of a group, one entry per tensor, with its hyper-parameters, in order."""


class LambWorks:
    """How tensors are cut into rows on a device, kept from step to step: the work used last, `TABLE_NBYTES` of it."""

    def __init__(self, device: torch.device, *, by_triton: bool) -> None:
        self.device = device
        self.kernels: ModuleType = lamb_triton if by_triton else lamb_cpu
        self._works: Recent[tuple, tuple[LambWork, ...]] = Recent(TABLE_NBYTES, _nbytes)

    def get(self, tensors: Sequence[Run], tiles: Sequence[tuple[int, int]]) -> tuple[LambWork, ...]:
        """The work of each tile, made on the first call."""
        key = tuple(tensors), tuple(tiles)
        works = self._works.find(key)
        if works is None:
            made = [work.with_rows(upload(work.rows, self.device)) for work in lamb_work(*key)]
            works = self._works.keep(key, tuple(made))
        return works


def _nbytes(works: Sequence[LambWork]) -> int:
    return sum(work.rows.nbytes for work in works)


class GroupLamb:
    """One step of LAMB over some elements: tiles of a chunk group, or one tensor. Stage by stage, tile by tile.

    Args:
        works: of the device that updates.
        runs: of the group.
        tiles: ranges of the group's elements that are updated at one time.
        scale: of the gradients.
    """

    def __init__(self, works: LambWorks, runs: LambRuns, tiles: Sequence[tuple[int, int]], scale: GradScale) -> None:
        hypers = list(dict.fromkeys(hyper for _, _, hyper in runs))
        rows = {hyper: row for row, hyper in enumerate(hypers)}
        in_order = works.get([Run(begin, end, rows[hyper]) for begin, end, hyper in runs], tiles)
        self._works = dict(zip(tiles, in_order, strict=True))
        self._scalars = decided(hypers, lamb_table, lambda table: upload(table, works.device))
        self._partials = new_partials(in_order[0], works.device)
        self._kernels = works.kernels
        self._scale = scale

    def update(self, slots: Mapping[str, torch.Tensor], tile: Tile) -> None:
        """One stage of one tile; `slots` has the kinds that the stage needs."""
        work = self._works[tile.begin, tile.end]
        if not work.pieces:
            return
        # A gradient has its parameter's dtype: each stands in for the other where it is not touched.
        param, grad = slots.get(PARAM, slots.get(GRAD)), slots.get(GRAD, slots.get(PARAM))
        assert param is not None
        assert grad is not None
        fmt = AdamFormat(param.dtype, grad.dtype, master=MASTER in slots)
        of_tile = AdamSlots(param, grad, slots[EXP_AVG], slots[EXP_AVG_SQ], slots.get(MASTER))
        stage = self._kernels.lamb_apply if tile.stage else self._kernels.lamb_moments
        stage(fmt, of_tile, work, self._scalars, self._partials, scale=self._scale)

    def update_whole(self, flat: Mapping[str, torch.Tensor], begin: int, end: int) -> None:
        """Both stages of a tile in which all its tensors lie altogether."""
        for stage in range(2):
            self.update(flat, Tile(0, begin, end, stage, 2))


def rows_apart(offsets: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Ranges for tensors that are updated one by one, such that the rows of each end where they do in its group.

    Args:
        offsets: of each tensor's first element in its group; 0 where it has none.
        sizes: elements of each tensor.
    """
    ranges, end = [], 0
    for offset, numel in zip(offsets, sizes, strict=True):
        begin = -(-end // ROW) * ROW + offset % ROW
        end = begin + numel
        ranges.append((begin, end))
    return ranges
