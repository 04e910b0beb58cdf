"""LAMB, chunk by chunk."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch

from chunkc.ir.layout import GRAD, PARAM
from chunkc.ir.plan import Tile
from chunkc.ir.states import EXP_AVG, EXP_AVG_SQ, FLOAT32, MASTER, StateFormat
from chunkc.kernels import lamb_cpu, lamb_triton
from chunkc.kernels.formats import AdamFormat, AdamSlots, GradScale, Span
from chunkc.kernels.fused_pass import host_empty
from chunkc.kernels.hyperparameters import scalar_table
from chunkc.kernels.lamb_formats import ROW, LambHyper, LambWork, lamb_work, lamb_work_of_tensors, new_partials
from chunkc.optim.on_device import TABLE_NBYTES, Batch, LaunchOrder, SentPointerOffsets, batches, goes_along, upload
from chunkc.optim.optimizer import ChunkedOptimizer
from chunkc.optim.over_ranks import sums_of_tensors
from chunkc.optim.pending_steps import decided
from chunkc.optim.rule import (
    Groups,
    GroupWork,
    OverRanks,
    ResidentTensor,
    Rule,
    Spans,
    TileUpdate,
    Updater,
    adam_hyper,
    flag,
    number,
)
from chunkc.optim.states import put_back
from chunkc.optim.update_mode import DEVICE, NONE
from chunkc.utils.recent import Recent


@dataclass(frozen=True)
class LambRule(Rule):
    """LAMB's."""

    num_stages = 2
    optional = (*Rule.optional, "min_coeff", "max_coeff")

    def states(self, groups: Groups) -> StateFormat:
        return StateFormat(master=FLOAT32)

    def hyper(self, group: Mapping[str, Any], step: int) -> LambHyper:
        adapt = number(group, "weight_decay") != 0 or flag(group, "always_adapt")
        limits: dict[str, Any] = {name: number(group, name) for name in ("min_coeff", "max_coeff") if name in group}
        return LambHyper(**adam_hyper(group, step), **limits, adapt=adapt)

    def updater(self, device: torch.device, *, by_triton: bool) -> LambUpdater:
        return LambUpdater(device, by_triton=by_triton)


class LAMB(ChunkedOptimizer):
    """LAMB (You et al., arXiv:1904.00962): Adam's direction, scaled tensor by tensor by norm(parameter) / norm(update).

    Args:
        params: parameters, or groups of them with their own values of all that follows but the last two.
        weight_decay: decoupled: it joins the direction before its norm is taken.
        always_adapt: also scale where `weight_decay` is 0, as the paper does (NVIDIA's "nvlamb"). By default groups
            without weight decay (biases, norms) have a ratio of 1, as in apex and timm.
        min_coeff, max_coeff: limits of the ratio, as in DeepSpeed, whose defaults are 0.01 and 10. The paper has none.
        update_on, overlap: as for `AdamW`. Norms are summed up in fp32: on another device their last bits may differ.

    A parameter in bf16 or fp16 has an fp32 master. Gradients are not clipped: see `torch.nn.utils.clip_grad_norm_`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        always_adapt: bool = False,
        min_coeff: float = 0.0,
        max_coeff: float = math.inf,
        maximize: bool = False,
        update_on: str = DEVICE,
        overlap: str = NONE,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "always_adapt": always_adapt}
        defaults |= {"min_coeff": min_coeff, "max_coeff": max_coeff}
        super().__init__(params, LambRule(), defaults, maximize=maximize, update_on=update_on, overlap=overlap)


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
        places = [index for index, (begin, end) in enumerate(self._ranges) if begin < end]
        totals = host_empty((2, len(self._ranges)), torch.float64).zero_()
        for index, (first, last) in zip(places, partials, strict=True):
            wide = host_empty((2, last - first), torch.float64).copy_(self._partials[:, first:last])
            torch.sum(wide, 1, out=totals[:, index])
        sums(totals, [begin for begin, _ in self._ranges])
        for index, (first, last) in zip(places, partials, strict=True):
            self._partials[:, first:last].zero_()
            self._partials[:, first].copy_(totals[:, index])


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
