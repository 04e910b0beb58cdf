"""A base class over the private parts of `torch.amp.GradScaler`, the same in all of `versions.CHECKED`.

`torch.distributed.fsdp.sharded_grad_scaler` overrides `_unscale_grads_`, too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch.amp.grad_scaler import OptState


class OverflowsElsewhere(torch.amp.GradScaler, ABC):
    """A `GradScaler` that asks `found_inf_of` for overflow before it reads gradients that it does not unscale."""

    @abstractmethod
    def found_inf_of(self, optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
        """Return 0-dim fp32, not 0 if a gradient of the optimizer is not finite; None: read the gradients."""

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        only_looks = allow_fp16  # set by `step` of an optimizer that unscales by itself; `unscale_` passes False
        found = self.found_inf_of(optimizer) if only_looks else None
        if found is None:
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        return {found.device: found}

    def scale_now(self, optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
        """Return the factor by which an optimizer's gradients are still scaled, 0-dim fp32; None: they are not."""
        is_unscaled = self._per_optimizer_states[id(optimizer)]["stage"] is OptState.UNSCALED
        return None if is_unscaled or not self.is_enabled() else self._get_scale_async()
