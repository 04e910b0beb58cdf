"""Scale gradients inside updates: read the scale of one step, and assume that of the next one."""

from __future__ import annotations

import torch

from chunkc.kernels.formats import NO_SCALE, GradScale
from chunkc.optim import pending_steps


def inverted(scale: torch.Tensor) -> torch.Tensor:
    """Invert a loss's scale as `GradScaler.unscale_` does it, in double precision: 0-dim fp32."""
    return scale.detach().double().reciprocal().float().reshape(())


def is_skipped(scale: GradScale) -> bool:
    """Whether the host can see that a gradient overflowed, without waiting for a device."""
    return scale.found_inf is not None and not pending_steps.is_remote(scale.found_inf) and bool(scale.found_inf != 0)


def on_the_cpu(scale: GradScale) -> GradScale:
    """Copy a scale for an update on the CPU; waits for the device."""

    def moved(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.cpu()

    return scale if scale is NO_SCALE else GradScale(moved(scale.unscale), moved(scale.clip), moved(scale.found_inf))


class AssumedScale:
    """The scale that the next gradients are assumed to have: that of the last ones, or one that a scaler has announced.

    Attributes:
        is_likely: whether the next staged updates will be committed if the next gradients are like the last ones: those
            overflowed nowhere, and were not clipped. Updates that will be undone only cost time.
    """

    def __init__(self) -> None:
        self._scale = NO_SCALE
        self.is_likely = True

    def expect(self, unscale: torch.Tensor | None) -> None:
        """Assume that gradients will first be multiplied by this, 0-dim fp32; None: by nothing."""
        self._scale = NO_SCALE if unscale is None else GradScale(unscale.cpu())

    def on(self, device: torch.device) -> GradScale:
        """Return the scale for kernels on a device."""
        unscale = self._scale.unscale
        return self._scale if unscale is None or device.type == "cpu" else GradScale(unscale.to(device))

    def is_what_was(self, scale: GradScale) -> bool:
        """Whether an update with the assumed scale equals one with the step's, which is assumed from now on.

        Waits for the device.
        """
        actual, assumed = on_the_cpu(scale), self._scale
        self.expect(actual.unscale)
        overflows = actual.found_inf is not None and float(actual.found_inf) != 0
        self.is_likely = not overflows and _factor(actual.clip) == 1
        return self.is_likely and _factor(actual.unscale) == _factor(assumed.unscale)


def _factor(factor: torch.Tensor | None) -> float:
    return 1.0 if factor is None else float(factor)
