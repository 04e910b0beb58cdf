"""LAMB in plain PyTorch, and both stages of its kernels, and of the reference's, on tiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from chunkc.kernels import elementwise_cpu, elementwise_triton, reference, row_sums_cpu, row_sums_triton
from chunkc.kernels.formats import NO_SCALE, GradScale, Slots
from chunkc.kernels.lamb import LambHyper, LambMomentsFormat, LambScalars
from chunkc.kernels.summed_work import NUM_SUMS, SummedWork

NUM_SCALARS = len(LambScalars._fields)


class StraightforwardLamb:
    """Algorithm 2 of arXiv:1904.00962 (phi the identity), a tensor at a time in double precision."""

    def __init__(self, values: list[Tensor]) -> None:
        self.values = [value.double() for value in values]
        self.exp_avgs = [torch.zeros_like(value) for value in self.values]
        self.exp_avg_sqs = [torch.zeros_like(value) for value in self.values]

    def step(self, grads: list[Tensor], hypers: list[LambHyper]) -> None:
        for w, m, v, g, h in zip(self.values, self.exp_avgs, self.exp_avg_sqs, grads, hypers, strict=True):
            g = g.double() * (-1 if h.maximize else 1)
            m.mul_(h.beta1).add_(g, alpha=1 - h.beta1)
            v.mul_(h.beta2).addcmul_(g, g, value=1 - h.beta2)
            r = (m / (1 - h.beta1**h.step)) / ((v / (1 - h.beta2**h.step)).sqrt() + h.eps) + h.weight_decay * w
            norms = float(w.norm()), float(r.norm())
            ratio = min(max(norms[0] / norms[1], h.min_coeff), h.max_coeff) if h.adapt and min(norms) > 0 else 1.0
            w.sub_(r, alpha=h.lr * ratio)


@dataclass(frozen=True)
class Kernel:
    """Both stages of a tile, `(fmt, slots, work, tile, scalars, sums, scale)`, and the totals between them.

    `fmt` is the first stage's. `add_up` takes the sums, their table and the scalars, flattened.
    """

    first: Callable[..., None]
    add_up: Callable[[Tensor, Tensor, Tensor], None]
    second: Callable[..., None]

    def totals(self, work: SummedWork, sums: Tensor, scalars: Tensor) -> None:
        self.add_up(sums.view(-1), work.totals, scalars.view(-1))

    def update(self, fmt: LambMomentsFormat, slots: Slots, work: SummedWork, scalars: Tensor) -> None:
        """Run both stages of one tile that contains all tensors as a whole."""
        sums, scalars = work.new_sums(), scalars.clone()
        self.first(fmt, slots, work, 0, scalars, sums)
        self.totals(work, sums, scalars)
        self.second(fmt, slots, work, 0, scalars)


def _first_on_cpu(
    fmt: LambMomentsFormat, slots: Slots, work: SummedWork, tile: int, scalars: Tensor, sums: Tensor, **scale: Any
) -> None:
    elementwise_cpu.summed_update(fmt, slots, work.tables[tile], scalars, work.sums_of(tile, sums), **scale)


def _second_on_cpu(
    fmt: LambMomentsFormat, slots: Slots, work: SummedWork, tile: int, scalars: Tensor, **scale: Any
) -> None:
    elementwise_cpu.chunk_update(fmt.second, slots, work.spans[tile], scalars, **scale)


def _first_by_triton(
    fmt: LambMomentsFormat, slots: Slots, work: SummedWork, tile: int, scalars: Tensor, sums: Tensor, **scale: Any
) -> None:
    elementwise_triton.update(fmt, slots, work.tables[tile], scalars, sums=work.sums_of(tile, sums), **scale)


def _second_by_triton(
    fmt: LambMomentsFormat, slots: Slots, work: SummedWork, tile: int, scalars: Tensor, **scale: Any
) -> None:
    elementwise_triton.update(fmt.second, slots, work.tables[tile], scalars, **scale)


@torch.no_grad()
def _first_of_reference(
    fmt: LambMomentsFormat,
    slots: Slots,
    work: SummedWork,
    tile: int,
    scalars: Tensor,
    sums: Tensor,
    scale: GradScale = NO_SCALE,
) -> None:
    target, states = slots.param if slots.master is None else slots.master, slots.states()
    wide = slots.grad.to(torch.float32)
    for factor in (scale.unscale, scale.clip):
        wide = wide if factor is None else wide * factor
    for (begin, end, span), place in zip(work.tables[tile].rows.tolist(), work.sums_of(tile, sums).unbind(1)):
        inputs = [tensor[begin:end] for tensor in (wide, target, *(states[kind] for kind in fmt.kinds))]
        terms = fmt.arithmetic.in_torch(inputs, scalars[span], l2=False)[-NUM_SUMS:]
        place.copy_(torch.stack([term.double().sum() for term in terms]))
    reference.chunk_update(fmt, slots, work.spans[tile], scalars, scale=scale)


def _second_of_reference(
    fmt: LambMomentsFormat, slots: Slots, work: SummedWork, tile: int, scalars: Tensor, **scale: Any
) -> None:
    reference.chunk_update(fmt.second, slots, work.spans[tile], scalars, **scale)


def _sum_rows(base: Tensor, rows: Tensor, sums: Tensor) -> None:
    for begin, end, place in rows.tolist():
        sums[place] = base[begin:end].double().sum()


ON_CPU = Kernel(_first_on_cpu, row_sums_cpu.sum_elements, _second_on_cpu)
BY_TRITON = Kernel(_first_by_triton, row_sums_triton.sum_elements, _second_by_triton)
REFERENCE = Kernel(_first_of_reference, _sum_rows, _second_of_reference)
