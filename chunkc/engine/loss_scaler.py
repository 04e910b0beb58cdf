"""By what a loss is multiplied, so that small gradients are not lost in fp16: DeepSpeed's static and dynamic scale.

The algorithm is that of `DynamicLossScaler` in DeepSpeed 0.19 (deepspeed/runtime/fp16/loss_scaler.py), which goes back
to Megatron-LM and to Micikevicius et al., "Mixed Precision Training" (arXiv:1710.03740).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from chunkc.ir.errors import ChunkcError, OptionsError

FACTOR = 2.0
"""By which a dynamic scale grows and shrinks."""


@dataclass
class LossScaler:
    """A scale that stays.

    Attributes:
        loss_scale: by which losses are multiplied, and gradients divided.
    """

    loss_scale: float = 1.0

    def update(self, overflow: bool) -> None:
        """A step was taken, or skipped because of an overflow."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as plain numbers."""
        return asdict(self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned.

        Raises:
            OptionsError: it is another kind of scaler's; nothing has changed.
        """
        if set(state_dict) != set(asdict(self)):
            raise OptionsError(
                f"the state of a loss scaler has {sorted(state_dict)}; this one's: {sorted(asdict(self))}"
            )
        for name, value in state_dict.items():
            setattr(self, name, value)


@dataclass
class DynamicLossScaler(LossScaler):
    """A scale as large as gradients allow: halved where they overflow, doubled where they have not for long.

    Attributes:
        loss_scale: the scale now.
        window: it doubles each time that as many steps have passed since the step after an overflow.
        min_scale: below which it does not go.
        hysteresis: at how many overflows it is halved first; at each one after that it is halved again.
        consecutive: whether any step without overflow makes that count begin anew; else only a doubling does.
        steps: so far, skipped ones among them.
        last_overflow: the number of the latest step that overflowed, from 0; -1: none.
        left: what is left of the hysteresis.
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
        """A step was taken, or skipped because of an overflow.

        Raises:
            ChunkcError: it overflowed, and the scale is the smallest one already.
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
