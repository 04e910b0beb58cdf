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
"""Stage of the update of a tile, with `scale` as a keyword, see `chunkc.kernels.lamb_reference`."""


def moments_stage(kernel: Kernel) -> Stage:
    """Make stage 1 of `kernel`. The stage raises ValueError as `check_lamb` does."""
    return _stage(kernel, lambda slots, partials: (slots.exp_avg, slots.exp_avg_sq, partials))


def apply_stage(kernel: Kernel) -> Stage:
    """Make stage 2 of `kernel`. The stage raises ValueError as `check_lamb` does."""
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
