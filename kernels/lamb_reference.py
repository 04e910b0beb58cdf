"""Update by LAMB in plain PyTorch: the reference for tests of the other kernels. Neither fast nor frugal."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from chunkc.kernels.arithmetic import exact_root
from chunkc.kernels.formats import AdamFormat, AdamSlots, GradScale
from chunkc.kernels.lamb import LAMB_APPLY, LAMB_MOMENTS
from chunkc.kernels.lamb_formats import LambPiece, LambScalars, LambWork
from chunkc.kernels.lamb_host import apply_stage, moments_stage


@moments_stage
def lamb_moments(
    fmt: AdamFormat, slots: AdamSlots, work: LambWork, scalars: Tensor, partials: Tensor, scale: GradScale
) -> None:
    """Run stage 1 of a LAMB update of a tile: new moments, and the partial sums of the tile's rows.

    With the gradient g (widened to fp32, times the factors of `scale`), moments m and v, parameter w (the master, where
    there is one), and step t:

        m = lerp(m, g, 1 - beta1)
        v = beta2 * v + (1 - beta2) * g * g
        u = (m / (1 - beta1 ** t)) / (sqrt(v) / sqrt(1 - beta2 ** t) + eps) + weight_decay * w
        partials[0, row] = sum(w * w),  partials[1, row] = sum(u * u)

    Moments have the same bits from every kernel; sums are up to fp32 rounding. Where `found_inf` is not 0 nothing
    changes, the sums neither.

    Args:
        fmt: fp32 parameters, or low precision with a master; fp32 moments, rounding to nearest.
        work: of this tile, from `lamb_work`.
        scalars: `[num_groups, 10]` fp32, see `chunkc.kernels.hyperparameters.scalar_table`.
        partials: `[2, num_partials]` fp32, see `new_partials`; the tile's rows are overwritten.

    Raises:
        ValueError: see `check_lamb`.
    """
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
    """Run stage 2: w = w - lr * ratio * u, with u as in stage 1 from the new moments. Gradients are not read.

    A tensor's trust ratio is norm(w) / norm(u) (the paper's, phi the identity), within its group's limits, and 1 where
    either norm is 0 or its group does not adapt. Without limits, this is the rule of apex' FusedLAMB with
    `use_nvlamb=True` and of torch_optimizer's Lamb, except that the latter limits norm(w) to 10 and by default leaves
    out the bias corrections, and apex limits the norm of all gradients (`GradScale.clip` here). DeepSpeed's FusedLamb
    has the limits.

    Args:
        slots: `grad` is not read.
        partials: complete for every tensor that has elements in this tile.
        scale: only `found_inf` is read: where it is not 0 nothing changes.

    Raises:
        ValueError: see `check_lamb`.
    """
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
