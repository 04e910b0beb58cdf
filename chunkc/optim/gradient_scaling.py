"""Scale losses, and find overflowing gradients without traffic.

Whether a gradient overflowed comes from sums that the backward took in slots (see `norms`), and gradients are unscaled
inside the update.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from chunkc.optim.grad_scale import inverted
from chunkc.optim.optimizer import ChunkedOptimizer
from chunkc.torch_private.grad_scaler import OverflowsElsewhere


class GradScaler(OverflowsElsewhere):
    """`torch.amp.GradScaler`, with the same arguments, for the usual loop:

        scaler.scale(loss).backward()
        scaler.clip_grad_norm_(optimizer, 1.0)  # in place of unscale_ and torch's function; or left out
        scaler.step(optimizer)
        scaler.update()

    PyTorch's own scaler reads and writes every gradient to see whether one overflows, over the link if they are at
    home. This one does so only in `unscale_`, and for optimizers that are not of `chunkc.optim`.
    """

    @staticmethod
    def like(scaler: Any, device: str) -> Any:
        """Return a copy of PyTorch's own scaler; one of another type, or a disabled one, as it is."""
        if type(scaler) is not torch.amp.GradScaler or not scaler.is_enabled():
            return scaler
        copy = GradScaler(device)
        copy.load_state_dict(scaler.state_dict())
        return copy

    _stepped: weakref.WeakSet[ChunkedOptimizer]

    def found_inf_of(self, optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
        if not isinstance(optimizer, ChunkedOptimizer) or optimizer.overlap.is_final:
            return None
        self.__dict__.setdefault("_stepped", weakref.WeakSet()).add(optimizer)
        return optimizer.overflows()

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Update the scale as PyTorch's scaler does, and announce it to optimizers that can undo updates.

        To announce it the host waits for the device.
        """
        super().update(new_scale)
        for optimizer in self.__dict__.get("_stepped", ()):
            if optimizer.scheduler.stages:
                optimizer.assumed_scale.expect(inverted(torch.tensor(self.get_scale(), device="cpu")))

    def clip_grad_norm_(self, optimizer: Any, max_norm: float, *, error_if_nonfinite: bool = False) -> torch.Tensor:
        """Clip gradients that the step will unscale: see `clip_grad_norm_` of chunkc's optimizers.

        Returns:
            The norm of all gradients, divided by the loss's scale.

        Raises:
            RuntimeError, UnsupportedError: as there.
        """
        return optimizer.clip_grad_norm_(
            max_norm, error_if_nonfinite=error_if_nonfinite, loss_scale=self.scale_now(optimizer)
        )
