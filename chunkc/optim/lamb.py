"""Update chunk by chunk by LAMB: tiles of chunk groups in two stages, and tensors in place.

Rows of elements that are summed up together end at multiples of 16,384 of the group's elements, in slots, at home and
for a resident tensor, so that sums and results have the same bits wherever the update happens.
"""

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
from chunkc.optim.on_device import TABLE_NBYTES, Batch, LaunchOrder, SentPointerOffsets, batches, can_be_batched, upload
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
from chunkc.optim.update_mode import AUTO, DEVICE
from chunkc.utils.recent import Recent


@dataclass(frozen=True)
class LambRule(Rule):
    """LAMB's rule."""

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
        min_coeff, max_coeff: limits of the ratio, as in DeepSpeed, where the defaults are 0.01 and 10. The paper has
            none.
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
        overlap: str = AUTO,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "always_adapt": always_adapt}
        defaults |= {"min_coeff": min_coeff, "max_coeff": max_coeff}
        super().__init__(params, LambRule(), defaults, maximize=maximize, update_on=update_on, overlap=overlap)


class LambUpdater(Updater):
    """LAMB's updates on a device. Spans of a group are its tensors.

    Tables of work, which cut tensors into rows, are kept from step to step: the latest `TABLE_NBYTES` of them.

    Attributes:
        order: the order of all launches, which share those tables.
    """

    def __init__(self, device: torch.device, *, by_triton: bool) -> None:
        self.device = device
        self.by_triton = by_triton
        self.kernels: ModuleType = lamb_triton if by_triton else lamb_cpu
        self._works: Recent[tuple, tuple[LambWork, ...]] = Recent(TABLE_NBYTES, _nbytes)
        self._pointer_offsets = SentPointerOffsets(device)
        self.order = LaunchOrder(device)

    def get(self, tensors: Sequence[Span], tiles: Sequence[tuple[int, int]]) -> tuple[LambWork, ...]:
        """Return the work of each tile, made on the first call."""
        spans, ranges = tuple(tensors), tuple(tiles)
        return self._kept((spans, ranges), lambda: lamb_work(spans, ranges))

    def _kept(self, key: tuple, make: Callable[[], tuple[LambWork, ...]]) -> tuple[LambWork, ...]:
        works = self._works.find(key)
        if works is None:
            works = tuple(work.with_rows(upload(work.rows, self.device)) for work in make())
            works = self._works.keep(key, works)
        return works

    def of_group(self, work: GroupWork) -> TileUpdate:
        return GroupLamb(self, work).update

    def of_tensors(self, tensors: Iterable[ResidentTensor], scale: GradScale) -> None:
        """Update tensors in place: by Triton two launches for many tensors that can go in one batch."""
        batched: list[ResidentTensor] = []
        single: list[ResidentTensor] = []
        for tensor in tensors:
            (batched if self.by_triton and can_be_batched(tensor) else single).append(tensor)
        if batched:
            with self.order.turn():
                rows, scalars = self.scalars([tensor.hyper for tensor in batched])
                for batch in batches((tensor, _format(tensor)) for tensor in batched):
                    self._update_batch(batch, [rows[tensor.hyper] for tensor in batch.tensors], scalars, scale)
        if single:
            self._update_one_by_one(single, scale)

    def scalars(self, hypers: Iterable[Any]) -> tuple[dict[Any, int], torch.Tensor]:
        """Return the row of each set of hyperparameters in a table of scalars on the device, and the table."""
        rows = {hyper: row for row, hyper in enumerate(dict.fromkeys(hypers))}
        return rows, decided(list(rows), scalar_table, lambda table: upload(table, self.device))

    def _update_batch(self, batch: Batch, rows: Sequence[int], scalars: torch.Tensor, scale: GradScale) -> None:
        """Run both stages of a batch. `rows` are its tensors' rows in the table of scalars."""
        spans = tuple(Span(*where, row) for where, row in zip(_ranges(batch.tensors), rows, strict=True))
        (work,) = self._kept((spans,), lambda: (lamb_work_of_tensors(spans),))
        work = replace(work, pointer_offsets=self.order.reads(self._pointer_offsets.of(batch, spans)))
        self.order.reads(work.rows)
        slots, partials = AdamSlots.of(batch.tensors[0].flats()), new_partials(work, self.device)
        for stage in (self.kernels.lamb_moments, self.kernels.lamb_apply):
            stage(batch.fmt, slots, work, scalars, partials, scale=scale)
        torch.autograd.graph.increment_version(batch.written)

    def _update_one_by_one(self, tensors: Sequence[ResidentTensor], scale: GradScale) -> None:
        ranges = _ranges(tensors)
        spans = [(*where, tensor.hyper) for where, tensor in zip(ranges, tensors, strict=True)]
        sums = sums_of_tensors({begin: tensor.parameter for (begin, _), tensor in zip(ranges, tensors, strict=True)})
        lamb = GroupLamb(self, GroupWork(0, spans, ranges, scale, sums))
        for where, tensor in zip(ranges, tensors, strict=True):
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
    """A step of LAMB over tiles of a chunk group, or over tensors; stage by stage, tile by tile."""

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
        """Run one stage of one tile; `slots` has the kinds that the stage needs."""
        if tile.stage and self._sums is not None:
            self._sum_over_ranks(self._sums)
            self._sums = None
        work = self._works[tile.begin, tile.end]
        if not work.pieces:
            return
        # A gradient has its parameter's dtype: each stands in for the other in the stage that does not touch it.
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
        """Replace each tensor's partial sums, once this rank's are complete, by the sum over all ranks, as one number.

        Every rank adds up the same numbers in the same order, so all scale their shards alike.
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
    """Return the ranges of tensors that are updated in place, see `rows_apart`."""
    return rows_apart([of.extent.first_element for of in tensors], [of.parameter.numel() for of in tensors])


def rows_apart(offsets: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Choose ranges for tensors that are updated one by one, so that the rows of each end where they do in its group.

    Args:
        offsets: of each tensor's first element in its group; 0 where it has none.
        sizes: number of elements of each tensor.
    """
    ranges, end = [], 0
    for offset, numel in zip(offsets, sizes, strict=True):
        begin = -(-end // ROW) * ROW + offset % ROW
        end = begin + numel
        ranges.append((begin, end))
    return ranges
