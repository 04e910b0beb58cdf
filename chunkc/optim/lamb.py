"""Update chunk by chunk by LAMB: tiles of chunk groups in two stages, and tensors in place.

Rows of elements that are summed up together end at multiples of 16,384 of the group's elements, in slots, at home and
for a resident tensor, so that sums and results have the same bits wherever the update happens.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from chunkc.ir.layout import GRAD, PARAM
from chunkc.ir.plan import Tile
from chunkc.ir.states import FLOAT32, MASTER, StateFormat
from chunkc.kernels import elementwise_cpu, elementwise_triton, row_sums_cpu, row_sums_triton
from chunkc.kernels.cpu_loop import library
from chunkc.kernels.elementwise_cpu import warm_up_format
from chunkc.kernels.formats import GradScale, Slots, UpdateFormat
from chunkc.kernels.host_memory import host_empty
from chunkc.kernels.hyperparameters import scalar_table
from chunkc.kernels.lamb import LambHyper, LambMomentsFormat, LambScalars
from chunkc.kernels.row_sums import ITSELF
from chunkc.kernels.summed_work import NUM_SUMS, ROW, SummedWork, summed_work, summed_work_of_tensors
from chunkc.optim.on_device import Batch, DeviceUpdater, divided, upload
from chunkc.optim.optimizer import ChunkedOptimizer
from chunkc.optim.over_ranks import sums_of_tensors
from chunkc.optim.pending_steps import decided
from chunkc.optim.rule import (
    Groups,
    GroupWork,
    ResidentTensor,
    Rule,
    Spans,
    TileUpdate,
    adam_hyper,
    flag,
    number,
)
from chunkc.optim.states import put_back
from chunkc.optim.update_mode import AUTO, DEVICE

_NUM_SCALARS = len(LambScalars._fields)


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
        update_on, overlap: as for `AdamW`. Norms are summed up in each device's own order: their last bits may differ.

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


class LambUpdater(DeviceUpdater[SummedWork]):
    """LAMB's updates on a device. Spans of a group are its tensors, and each has a row of scalars."""

    def __init__(self, device: torch.device, *, by_triton: bool) -> None:
        super().__init__(device)
        self.by_triton = by_triton

    def of_group(self, work: GroupWork) -> TileUpdate:
        ranges, tiles = tuple((begin, end) for begin, end, _ in work.spans), tuple(work.tiles)
        with self.order.turn():
            lamb = GroupLamb(self, self.kept((ranges, tiles), lambda: summed_work(ranges, tiles, _NUM_SCALARS)), work)
        numbers = {tile: number for number, tile in enumerate(tiles)}

        def update(flat: Mapping[str, torch.Tensor], tile: Tile) -> None:
            # A gradient has its parameter's dtype: each stands in for the other in the stage that does not touch it.
            missing, given = (PARAM, GRAD) if PARAM not in flat else (GRAD, PARAM)
            whole = {missing: flat[given], **flat}
            fmt = _format(whole[PARAM], whole[GRAD], flat)
            with self.order.turn():
                lamb.run(tile.stage, fmt, fmt.slots.of(whole), numbers[tile.begin, tile.end])

        return update

    def of_tensors(self, tensors: Iterable[ResidentTensor], scale: GradScale) -> None:
        """Update tensors in place: by Triton in few launches those that can go in one batch."""
        launches, single = divided(tensors, _format_of if self.by_triton else lambda tensor: None)
        for batch in launches:
            self._update_batch(batch, scale)
        if single:
            self._update_one_by_one(single, scale)

    def _update_batch(self, batch: Batch, scale: GradScale) -> None:
        work, ranges = _work_of(batch.tensors, scale)
        with self.order.turn():
            summed = self.kept(ranges, lambda: summed_work_of_tensors(ranges, _NUM_SCALARS))
            lamb, slots = GroupLamb(self, summed, work), batch.fmt.slots.of(batch.tensors[0].flats())
            pointer_offsets = self.order.reads(self.sent_pointer_offsets.of(batch, ranges))
            for stage in range(2):
                lamb.run(stage, batch.fmt, slots, 0, pointer_offsets=pointer_offsets)
        torch.autograd.graph.increment_version(batch.written)

    def _update_one_by_one(self, tensors: Sequence[ResidentTensor], scale: GradScale) -> None:
        work, ranges = _work_of(tensors, scale)
        sums = sums_of_tensors({begin: tensor.parameter for (begin, _), tensor in zip(ranges, tensors, strict=True)})
        update = self.of_group(replace(work, sums=sums))
        for stage in range(2):
            for where, tensor in zip(ranges, tensors, strict=True):
                flats = tensor.flats()
                update(flats, Tile(0, *where, stage, 2))
                if stage:
                    put_back(flats[PARAM], tensor.parameter)

    def compile_ahead(self, flat: Mapping[str, torch.Tensor], spans: Spans, scale: GradScale) -> None:
        fmt = _format(flat[PARAM], flat[GRAD], flat)
        library(fmt, l2=False, scaled=scale.unscale is not None or scale.clip is not None)
        row_sums_cpu.library(ITSELF, torch.float32, rounded=True)
        warm_up_format(fmt.second)


class GroupLamb:
    """A step of LAMB over tiles, stage by stage, with the totals of tensors in between; called in turns."""

    def __init__(self, updater: LambUpdater, summed: SummedWork, work: GroupWork) -> None:
        self._by_triton, self._reads = updater.by_triton, updater.order.reads
        self._summed, self._work = summed, work
        self._sums = summed.new_sums()
        hypers = [hyper for _, _, hyper in work.spans]
        self._scalars = decided(hypers, _scalars_of, lambda table: upload(table, updater.device))
        self._has_totals = False

    def run(
        self, stage: int, fmt: UpdateFormat, slots: Slots, tile: int, pointer_offsets: torch.Tensor | None = None
    ) -> None:
        """Run one stage of one tile. The first one of the second stage adds up the totals before.

        Args:
            fmt: the first stage's, a `LambMomentsFormat`.
        """
        for shared in (*self._summed.tensors, self._sums, self._scalars):
            self._reads(shared)
        if stage and not self._has_totals:
            self._add_up()
        assert isinstance(fmt, LambMomentsFormat)
        work, sums, scalars = self._summed.tables[tile], self._summed.sums_of(tile, self._sums), self._scalars
        scale = GradScale(found_inf=self._work.scale.found_inf) if stage else self._work.scale
        if not len(work.rows):
            return
        if self._by_triton:
            of_stage, sums_of_stage = (fmt.second, None) if stage else (fmt, sums)
            elementwise_triton.update(
                of_stage, slots, work, scalars, scale=scale, sums=sums_of_stage, pointer_offsets=pointer_offsets
            )
        elif stage:
            elementwise_cpu.chunk_update(fmt.second, slots, self._summed.spans[tile], scalars, scale=scale)
        else:
            elementwise_cpu.summed_update(fmt, slots, work, scalars, sums, scale=scale)

    def _add_up(self) -> None:
        """Put the totals of each tensor into its scalars, once all sums of this rank are complete.

        Of tensors that lie on several ranks, every rank adds up the same numbers in the same order, so all scale their
        shards alike.
        """
        self._has_totals = True
        sum_elements = row_sums_triton.sum_elements if self._by_triton else row_sums_cpu.sum_elements
        sum_elements(self._sums.view(-1), self._summed.totals, self._scalars.view(-1))
        if self._work.sums is not None:
            totals = self._scalars[:, -NUM_SUMS:].t()
            wide = host_empty(totals.shape, torch.float64).copy_(totals)
            self._work.sums(wide, [begin for begin, _, _ in self._work.spans])
            totals.copy_(wide)


def _scalars_of(hypers: Sequence[LambHyper]) -> torch.Tensor:
    """Make a row of scalars for each tensor, on the CPU, in numpy's memory."""
    rows = {hyper: row for row, hyper in enumerate(dict.fromkeys(hypers))}
    return torch.from_numpy(scalar_table(list(rows)).numpy()[[rows[hyper] for hyper in hypers]])


def _format(param: torch.Tensor, grad: torch.Tensor, kinds: Collection[str]) -> LambMomentsFormat:
    """Return the first stage's format for a parameter that has these kinds of states, among others."""
    return LambMomentsFormat(param.dtype, grad.dtype, master=MASTER in kinds)


def _format_of(tensor: ResidentTensor) -> LambMomentsFormat:
    assert tensor.parameter.grad is not None
    return _format(tensor.parameter, tensor.parameter.grad, tensor.states)


def _work_of(tensors: Sequence[ResidentTensor], scale: GradScale) -> tuple[GroupWork, tuple[tuple[int, int], ...]]:
    """Return the work of updating tensors in place, each as a tile, and the ranges of these tiles."""
    ranges = tuple(_ranges(tensors))
    spans = [(*where, tensor.hyper) for where, tensor in zip(ranges, tensors, strict=True)]
    return GroupWork(0, spans, ranges, scale), ranges


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
