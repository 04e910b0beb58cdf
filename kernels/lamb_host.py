"""Wrap LAMB's stages: check their arguments before, and increment tensors' versions after."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from chunkc.kernels.formats import NO_SCALE, AdamFormat, AdamSlots, GradScale
from chunkc.kernels.lamb_formats import LambWork, check_lamb

Kernel = Callable[[AdamFormat, AdamSlots, LambWork, Tensor, Tensor, GradScale], None]
"""Implementation of a stage, with checked arguments (format, slots, work, scalars, partials, scale)."""


Stage = Callable[..., None]
"""Stage of the update of a tile: `(fmt, slots, work, scalars, partials, *, scale)`.

Args:
    fmt: fp32 parameters, or low precision with a master; fp32 moments, rounding to nearest.
    work: of this tile, from `lamb_work`.
    scalars: `[num_groups, 10]` fp32, see `chunkc.kernels.hyperparameters.scalar_table`.
    partials: `[2, num_partials]` fp32, see `new_partials`.
    scale: of the gradients. Where its `found_inf` is not 0, nothing changes.

Raises:
    ValueError: see `check_lamb`.
"""


def moments_stage(kernel: Kernel) -> Stage:
    """Make stage 1 of `kernel`: new moments, and the partial sums of the tile's rows, which are overwritten.

    With the gradient g (widened to fp32, times the factors of `scale`), moments m and v, parameter w (the master, where
    there is one), and step t:

        m = lerp(m, g, 1 - beta1)
        v = beta2 * v + (1 - beta2) * g * g
        u = (m / (1 - beta1 ** t)) / (sqrt(v) / sqrt(1 - beta2 ** t) + eps) + weight_decay * w
        partials[0, row] = sum(w * w),  partials[1, row] = sum(u * u)

    Moments have the same bits from every kernel; sums are up to fp32 rounding, with the same bits every time.
    """
    return _stage(kernel, lambda slots, partials: (slots.exp_avg, slots.exp_avg_sq, partials))


def apply_stage(kernel: Kernel) -> Stage:
    """Make stage 2 of `kernel`: w = w - lr * ratio * u, with u as in stage 1 from the new moments.

    A tensor's trust ratio is norm(w) / norm(u) (the paper's, phi the identity), within its group's limits, and 1 where
    either norm is 0 or its group does not adapt. Its partial sums are complete. Without limits, this is the rule of
    apex' FusedLAMB with `use_nvlamb=True` and of torch_optimizer's Lamb, except that the latter limits norm(w) to 10
    and by default leaves out the bias corrections, and apex limits the norm of all gradients (`GradScale.clip` here).
    DeepSpeed's FusedLamb has the limits. Gradients are not read, nor the factors of `scale`.
    """
    return _stage(kernel, lambda slots, partials: (slots.param, slots.master))


def _stage(kernel: Kernel, written: Callable[[AdamSlots, Tensor], tuple[Tensor | None, ...]]) -> Stage:
    @functools.wraps(kernel)
    @torch.compiler.disable
    @torch.no_grad()
    def stage(
        fmt: AdamFormat,
        slots: AdamSlots,
        work: LambWork,
        scalars: Tensor,
        partials: Tensor,
        *,
        scale: GradScale = NO_SCALE,
    ) -> None:
        check_lamb(fmt, slots, work, scalars, partials, scale)
        kernel(fmt, slots, work, scalars, partials, scale)
        if work.pointer_offsets is not None:
            return
        changed = [tensor for tensor in written(slots, partials) if tensor is not None]
        torch.autograd.graph.increment_version(changed)

    return stage
