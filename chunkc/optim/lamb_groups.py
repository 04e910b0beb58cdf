"""LAMB's updates: of a chunk group's tiles in two stages, and of tensors where they are.

Rows of elements that are summed up as one end at multiples of 16,384 of the group's elements, in slots, at home and
for a tensor that stays, so that sums and results have the same bits wherever the update happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

from chunkc.ir.layout import GRAD, PARAM
from chunkc.ir.plan import Tile
from chunkc.ir.states import EXP_AVG, EXP_AVG_SQ, MASTER
from chunkc.kernels import lamb_cpu, lamb_triton
from chunkc.kernels.formats import AdamFormat, AdamSlots, GradScale, Span
from chunkc.kernels.fused_pass import host_empty
from chunkc.kernels.hyperparameters import scalar_table
from chunkc.kernels.lamb_formats import ROW, LambWork, lamb_work, lamb_work_of_tensors, new_partials
from chunkc.optim.multi_tensor import Batch, SentPointerOffsets, batches, goes_along
from chunkc.optim.on_device import TABLE_NBYTES, LaunchOrder, upload
from chunkc.optim.over_ranks import sums_of_tensors
from chunkc.optim.pending_steps import decided
from chunkc.optim.rule import GroupWork, OverRanks, ResidentTensor, Spans, TileUpdate, Updater
from chunkc.optim.states import put_back
from chunkc.utils.recent import Recent


class LambUpdater(Updater):
    """LAMB's updates on a device. Spans of a group are its tensors.

    How tensors are cut into rows is kept from step to step: the work used last, `TABLE_NBYTES` of it.

    Attributes:
        order: of all launches, which share that work.
    """

    def __init__(self, device: torch.device, *, by_triton: bool) -> None:
        self.device = device
        self.by_triton = by_triton
        self.kernels: ModuleType = lamb_triton if by_triton else lamb_cpu
        self._works: Recent[tuple, tuple[LambWork, ...]] = Recent(TABLE_NBYTES, _nbytes)
        self._pointer_offsets = SentPointerOffsets(device)
        self.order = LaunchOrder(device)

    def get(self, tensors: Sequence[Span], tiles: Sequence[tuple[int, int]]) -> tuple[LambWork, ...]:
        """The work of each tile, made on the first call."""
        spans, ranges = tuple(tensors), tuple(tiles)
        return self._kept((spans, ranges), lambda: lamb_work(spans, ranges))

    def _kept(self, key: tuple, make: Callable[[], tuple[LambWork, ...]]) -> tuple[LambWork, ...]:
        works = self._works.find(key)
        if works is None:
            made = [work.with_rows(upload(work.rows, self.device)) for work in make()]
            works = self._works.keep(key, tuple(made))
        return works

    def of_group(self, work: GroupWork) -> TileUpdate:
        return GroupLamb(self, work).update

    def of_tensors(self, tensors: Iterable[ResidentTensor], scale: GradScale) -> None:
        """By Triton two launches for many tensors, but for odd ones."""
        along: list[ResidentTensor] = []
        alone: list[ResidentTensor] = []
        for tensor in tensors:
            (along if self.by_triton and goes_along(tensor) else alone).append(tensor)
        if along:
            with self.order.turn():
                rows, scalars = self.scalars([tensor.hyper for tensor in along])
                for batch in batches((tensor, _format(tensor)) for tensor in along):
                    self._update_together(batch, [rows[of.hyper] for of in batch.tensors], scalars, scale)
        if alone:
            self._update_one_by_one(alone, scale)

    def scalars(self, hypers: Iterable[Any]) -> tuple[dict[Any, int], torch.Tensor]:
        """Rows of scalars on the device, and which of them is whose."""
        rows = {hyper: row for row, hyper in enumerate(dict.fromkeys(hypers))}
        return rows, decided(list(rows), scalar_table, lambda table: upload(table, self.device))

    def _update_together(self, batch: Batch, rows: Sequence[int], scalars: torch.Tensor, scale: GradScale) -> None:
        """Both stages of a batch, whose tensors are updated with these rows of scalars."""
        spans = tuple(Span(*where, row) for where, row in zip(_ranges(batch.tensors), rows, strict=True))
        (work,) = self._kept((spans,), lambda: (lamb_work_of_tensors(spans),))
        work = replace(work, pointer_offsets=self.order.reads(self._pointer_offsets.of(batch, spans)))
        self.order.reads(work.rows)
        slots, partials = AdamSlots.of(batch.tensors[0].flats()), new_partials(work, self.device)
        for stage in (self.kernels.lamb_moments, self.kernels.lamb_apply):
            stage(batch.fmt, slots, work, scalars, partials, scale=scale)
        torch.autograd.graph.increment_version(batch.written)

    def _update_one_by_one(self, staying: Sequence[ResidentTensor], scale: GradScale) -> None:
        ranges = _ranges(staying)
        spans = [(*where, tensor.hyper) for where, tensor in zip(ranges, staying, strict=True)]
        sums = sums_of_tensors({begin: tensor.parameter for (begin, _), tensor in zip(ranges, staying, strict=True)})
        lamb = GroupLamb(self, GroupWork(0, spans, ranges, scale, sums))
        for where, tensor in zip(ranges, staying, strict=True):
            flats = tensor.flats()
            for stage in range(2):
                lamb.update(flats, Tile(0, *where, stage, 2))
            put_back(flats[PARAM], tensor.parameter)

    def compile_ahead(self, flat: Mapping[str, torch.Tensor], spans: Spans, scale: GradScale) -> None:
        lamb_cpu.warm_up(AdamFormat(flat[PARAM].dtype, flat[GRAD].dtype, master=MASTER in flat))


def _format(tensor: ResidentTensor) -> AdamFormat:
    assert tensor.parameter.grad is not None
    return AdamFormat(tensor.parameter.dtype, tensor.parameter.grad.dtype, master=MASTER in tensor.states)


def _nbytes(works: Sequence[LambWork]) -> int:
    return sum(work.rows.nbytes for work in works)


class GroupLamb:
    """One step of LAMB over some elements: tiles of a chunk group, or tensors. Stage by stage, tile by tile.

    Args:
        updater: of the device that updates.
        work: tiles of the group, or tensors.
    """

    def __init__(self, updater: LambUpdater, work: GroupWork) -> None:
        self._order = updater.order
        with self._order.turn():
            rows, self._scalars = updater.scalars(hyper for _, _, hyper in work.spans)
            in_order = updater.get([Span(begin, end, rows[hyper]) for begin, end, hyper in work.spans], work.tiles)
            self._partials = new_partials(in_order[0], updater.device)
        self._works = dict(zip(work.tiles, in_order, strict=True))
        self._kernels = updater.kernels
        self._scale = work.scale
        self._sums = work.sums
        self._ranges = [(begin, end) for begin, end, _ in work.spans]

    def update(self, slots: Mapping[str, torch.Tensor], tile: Tile) -> None:
        """One stage of one tile; `slots` has the kinds that the stage needs."""
        if tile.stage and self._sums is not None:
            self._sum_over_ranks(self._sums)
            self._sums = None
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
        with self._order.turn():
            for shared in (work.rows, self._scalars, self._partials):
                self._order.reads(shared)
            stage(fmt, of_tile, work, self._scalars, self._partials, scale=self._scale)

    def _sum_over_ranks(self, sums: OverRanks) -> None:
        """Once this rank's partial sums are all there: each tensor's becomes the sum of all ranks', as one number.

        Every rank adds up the same numbers in the same order, so all scale their parts alike.
        """
        partials = sorted({(p.first_partial, p.last_partial) for work in self._works.values() for p in work.pieces})
        places = [number for number, (begin, end) in enumerate(self._ranges) if begin < end]
        totals = host_empty((2, len(self._ranges)), torch.float64).zero_()
        for number, (first, last) in zip(places, partials, strict=True):
            wide = host_empty((2, last - first), torch.float64).copy_(self._partials[:, first:last])
            torch.sum(wide, 1, out=totals[:, number])
        sums(totals, [begin for begin, _ in self._ranges])
        for number, (first, last) in zip(places, partials, strict=True):
            self._partials[:, first:last].zero_()
            self._partials[:, first].copy_(totals[:, number])


def _ranges(tensors: Sequence[ResidentTensor]) -> list[tuple[int, int]]:
    """Of tensors that are updated where they are, see `rows_apart`."""
    return rows_apart([of.extent.first_element for of in tensors], [of.parameter.numel() for of in tensors])


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
