"""`torch.amp.GradScaler` as something to build upon: by what its own parts are called, on every version in `versions`.

`_unscale_grads_` is what `torch.distributed.fsdp.sharded_grad_scaler` overrides too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch.amp.grad_scaler import OptState


class OverflowsElsewhere(torch.amp.GradScaler, ABC):
    """A `GradScaler` that asks `found_inf_of` first whether gradients overflow, where it divides none."""

    @abstractmethod
    def found_inf_of(self, optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
        """0-dim fp32, not 0 if a gradient of the optimizer is not finite; None: look at the gradients."""

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        only_looks = allow_fp16  # `step` of an optimizer that divides by itself; `unscale_` says False
        found = self.found_inf_of(optimizer) if only_looks else None
        if found is None:
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        return {found.device: found}

    def scale_now(self, optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
        """By what the gradients of an optimizer are too large, 0-dim fp32; None: by nothing, or no more."""
        is_unscaled = self._per_optimizer_states[id(optimizer)]["stage"] is OptState.UNSCALED
        return None if is_unscaled or not self.is_enabled() else self._get_scale_async()
