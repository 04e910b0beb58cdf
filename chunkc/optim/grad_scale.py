"""What `torch.amp.GradScaler` tells an optimizer: by what gradients were multiplied, and whether one overflowed."""

from __future__ import annotations

from typing import Any

import torch

from chunkc.kernels.formats import NO_SCALE, GradScale
from chunkc.optim import pending_steps as pending_steps


def grad_scale_of(optimizer: Any, clip: torch.Tensor | None = None) -> GradScale:
    """What the scaler has set on an optimizer for the step under way, as its kernels want it.

    Args:
        clip: what gradients are multiplied by after that: 0-dim fp32.
    """
    scale, found_inf = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    if scale is None and found_inf is None and clip is None:
        return NO_SCALE
    unscale = None if scale is None else inverted(scale)
    return GradScale(unscale, clip, None if found_inf is None else found_inf.detach().float().reshape(()))


def inverted(scale: torch.Tensor) -> torch.Tensor:
    """What undoes a loss's scale, inverted as `GradScaler.unscale_` does it, in double precision: 0-dim fp32."""
    return scale.detach().double().reciprocal().float().reshape(())


def is_skipped(scale: GradScale) -> bool:
    """Whether the host can see that a gradient overflowed, without waiting for a device."""
    return scale.found_inf is not None and not pending_steps.is_remote(scale.found_inf) and bool(scale.found_inf != 0)


def on_the_cpu(scale: GradScale) -> GradScale:
    """The same, for an update on the CPU; waits for the device."""

    def moved(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.cpu()

    return scale if scale is NO_SCALE else GradScale(moved(scale.unscale), moved(scale.clip), moved(scale.found_inf))
