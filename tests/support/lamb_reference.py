"""LAMB in plain PyTorch, and cases of its kernels for both stages."""

from __future__ import annotations

from itertools import pairwise
from types import ModuleType

import torch
from torch import Tensor

from chunkc.kernels.arithmetic import exact_root
from chunkc.kernels.formats import AdamFormat, AdamSlots, GradScale
from chunkc.kernels.lamb import LAMB_APPLY, LAMB_MOMENTS
from chunkc.kernels.lamb_formats import LambHyper, LambPiece, LambScalars, LambWork, new_partials
from chunkc.kernels.lamb_host import apply_stage, moments_stage


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


def on(work: LambWork, device: torch.device | str) -> LambWork:
    """Return the same work on another device."""
    return work.with_rows(work.rows.to(device))


def update(kernel: ModuleType, fmt: AdamFormat, slots: AdamSlots, work: LambWork, scalars: Tensor) -> None:
    """Run both stages of a tile that contains all its tensors as a whole."""
    partials = new_partials(work, slots.param.device)
    kernel.lamb_moments(fmt, slots, work, scalars, partials)
    kernel.lamb_apply(fmt, slots, work, scalars, partials)


@moments_stage
def lamb_moments(
    fmt: AdamFormat, slots: AdamSlots, work: LambWork, scalars: Tensor, partials: Tensor, scale: GradScale
) -> None:
    """Run stage 1."""
    target = slots.param if slots.master is None else slots.master
    for piece, cuts in zip(work.pieces, work.cuts, strict=True):
        part = slice(piece.begin, piece.end)
        wide = slots.grad[part].to(torch.float32)
        for factor in (scale.unscale, scale.clip):
            if factor is not None:
                wide = wide * factor
        inputs = [wide, target[part], slots.exp_avg[part], slots.exp_avg_sq[part]]
        group = scalars[piece.group]
        new_avg, new_avg_sq, update = LAMB_MOMENTS.in_torch(inputs, group, l2=False, root=exact_root)
        _store(slots.exp_avg[part], new_avg, scale)
        _store(slots.exp_avg_sq[part], new_avg_sq, scale)
        for row, (begin, end) in enumerate(pairwise(cuts), start=piece.partial):
            squares = target[begin:end].double(), update[begin - piece.begin : end - piece.begin].double()
            sums = torch.stack([values.square().sum() for values in squares]).float()
            _store(partials[:, row], sums, scale)


@apply_stage
def lamb_apply(
    fmt: AdamFormat, slots: AdamSlots, work: LambWork, scalars: Tensor, partials: Tensor, scale: GradScale
) -> None:
    """Run stage 2."""
    target = slots.param if slots.master is None else slots.master
    for piece in work.pieces:
        part = slice(piece.begin, piece.end)
        group = scalars[piece.group]
        ratio = trust_ratio(partials, piece, LambScalars(*group.tolist()))
        inputs = [target[part], slots.exp_avg[part], slots.exp_avg_sq[part], ratio]
        (new_target,) = LAMB_APPLY.in_torch(inputs, group, l2=False, root=exact_root)
        if slots.master is not None:
            _store(slots.master[part], new_target, scale)
        _store(slots.param[part], new_target.to(slots.param.dtype), scale)


def trust_ratio(partials: Tensor, piece: LambPiece, scalars: LambScalars) -> Tensor:
    """Compute a tensor's trust ratio from its partial sums, 0-dim fp32."""
    norms = partials[:, piece.first_partial : piece.last_partial].double().sum(1).sqrt()
    usable = (norms != 0).all() & bool(scalars.adapt)
    ratio = (norms[0] / norms[1]).to(torch.float32).clamp(scalars.min_coeff, scalars.max_coeff)
    return torch.where(usable, ratio, 1.0)


def _store(target: Tensor, value: Tensor, scale: GradScale) -> None:
    """Store a value, unless `found_inf` is set."""
    if scale.found_inf is not None:
        value = torch.where(scale.found_inf != 0, target, value)
    target.copy_(value)
