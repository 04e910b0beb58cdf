"""Scale a loss so that small gradients do not underflow in fp16: DeepSpeed's static and dynamic loss scale.

The algorithm is that of `DynamicLossScaler` in DeepSpeed 0.19 (deepspeed/runtime/fp16/loss_scaler.py), after
Megatron-LM and Micikevicius et al., "Mixed Precision Training" (arXiv:1710.03740).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from chunkc.ir.errors import ChunkcError, OptionsError

FACTOR = 2.0
"""Factor by which a dynamic scale grows and shrinks."""


@dataclass
class LossScaler:
    """A constant loss scale.

    Attributes:
        loss_scale: factor of losses, and divisor of gradients.
    """

    loss_scale: float = 1.0

    def update(self, overflow: bool) -> None:
        """Do nothing after a step: the scale is constant."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as plain numbers."""
        return asdict(self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned.

        Raises:
            OptionsError: the state is that of another kind of scaler; nothing has changed.
        """
        if set(state_dict) != set(asdict(self)):
            raise OptionsError(
                f"the state of a loss scaler has {sorted(state_dict)}; this one's: {sorted(asdict(self))}"
            )
        for name, value in state_dict.items():
            setattr(self, name, value)


@dataclass
class DynamicLossScaler(LossScaler):
    """A loss scale that is halved when gradients overflow, and doubled after many steps without overflow.

    Attributes:
        loss_scale: current scale.
        window: steps without overflow between doublings; the first is at step `last_overflow + 1 + window`.
        min_scale: smallest scale.
        hysteresis: index, from 1, of the first overflow that halves the scale; each later one halves it again.
        consecutive: whether any step without overflow restarts that count of overflows; otherwise only a doubling does.
        steps: number of steps so far, including skipped ones.
        last_overflow: index of the latest step that overflowed, from 0; -1: none.
        left: overflows until the scale is halved: 1 if the next one halves it.
    """

    loss_scale: float = 2.0**16
    window: int = 1000
    min_scale: float = 1.0
    hysteresis: int = 2
    consecutive: bool = False
    steps: int = 0
    last_overflow: int = -1
    left: int = 0

    def __post_init__(self) -> None:
        self.left = self.left or self.hysteresis

    def update(self, overflow: bool) -> None:
        """Adjust the scale after a step.

        Args:
            overflow: whether gradients overflowed, so that the step was skipped.

        Raises:
            ChunkcError: gradients overflowed, and the scale is already the smallest.
        """
        if overflow:
            if self.hysteresis == 1 or self.left == 1:
                if self.loss_scale == self.min_scale:
                    raise ChunkcError(
                        f"gradients overflow although the loss scale is at its minimum, {self.min_scale:g}: the model "
                        "diverges, or its loss is too large for fp16; lower the learning rate, clip gradients, or use "
                        "bf16"
                    )
                self.loss_scale = max(self.loss_scale / FACTOR, self.min_scale)
            else:
                self.left -= 1
            self.last_overflow = self.steps
        else:
            if self.consecutive:
                self.left = self.hysteresis
            stable = self.steps - self.last_overflow - 1
            if stable > 0 and stable % self.window == 0:
                self.left = self.hysteresis
                self.loss_scale *= FACTOR
        self.steps += 1
