"""What every LAMB does around its stages: the checks before, tensors' versions after."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from chunkc.kernels.formats import NO_SCALE, AdamFormat, AdamSlots, GradScale
from chunkc.kernels.lamb_formats import LambWork, check_lamb

Run = Callable[[AdamFormat, AdamSlots, LambWork, Tensor, Tensor, GradScale], None]
"""One implementation of a stage: checked (format, slots, work, scalars, partials, scale)."""


Stage = Callable[..., None]
"""A stage of the update of a tile, with `scale` as a keyword, see `chunkc.kernels.lamb_reference`."""


def moments_stage(run: Run) -> Stage:
    """Stage 1, by `run`. Raises ValueError as `check_lamb` does."""
    return _stage(run, lambda slots, partials: (slots.exp_avg, slots.exp_avg_sq, partials))


def apply_stage(run: Run) -> Stage:
    """Stage 2, by `run`. Raises ValueError as `check_lamb` does."""
    return _stage(run, lambda slots, partials: (slots.param, slots.master))


def _stage(run: Run, written: Callable[[AdamSlots, Tensor], tuple[Tensor | None, ...]]) -> Stage:
    @functools.wraps(run)
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
        run(fmt, slots, work, scalars, partials, scale)
        changed = [tensor for tensor in written(slots, partials) if tensor is not None]
        torch.autograd.graph.increment_version(changed)

    return stage
