"""When an optimizer's updates may run: the argument `overlap`, beside `update_on`."""

from __future__ import annotations

from dataclasses import dataclass

from chunkc.ir.errors import OptionsError
from chunkc.optim.update_on import CPU, DEVICE, UPDATE_ON

NONE, FORWARD, BACKWARD, BOTH = "none", "forward", "backward", "both"
OVERLAP = (NONE, FORWARD, BACKWARD, BOTH)


@dataclass(frozen=True)
class OverlapMode:
    """What of the model's own work an optimizer's updates run beside.

    Attributes:
        mode: one of `OVERLAP`.
        update_on: where the optimizer updates chunks.
        undoable: whether `step()` can undo what the backward has updated (see `undo`).

    Raises:
        OptionsError: there is no such mode or place, nothing is updated by the CPU that could go on after `step()`, or
            nothing in the backward that could be undone.
    """

    mode: str = NONE
    update_on: str = DEVICE
    undoable: bool = False

    def __post_init__(self) -> None:
        for name, value, allowed in (("update_on", self.update_on, UPDATE_ON), ("overlap", self.mode, OVERLAP)):
            if value not in allowed:
                words = ", ".join(f'"{word}"' for word in allowed)
                raise OptionsError(f"{name} is {value!r}; allowed: {words}")
        if self.beside_forward and self.update_on == DEVICE:
            raise OptionsError(
                f'overlap={self.mode!r} is for updates by the CPU: use update_on="{CPU}" or "auto", or '
                f'overlap="{BACKWARD}"'
            )
        if self.undoable and not self.beside_backward:
            raise OptionsError(
                f'undoable=True is for updates in the backward: use overlap="{BACKWARD}" or "{BOTH}", not {self.mode!r}'
            )

    @property
    def beside_forward(self) -> bool:
        """Whether updates go on after `step()`, beside the next forward."""
        return self.mode in (FORWARD, BOTH)

    @property
    def beside_backward(self) -> bool:
        """Whether updates begin in the backward, before `step()`."""
        return self.mode in (BACKWARD, BOTH)

    @property
    def is_final(self) -> bool:
        """Whether what a backward has updated stands, and its gradients are used up."""
        return self.beside_backward and not self.undoable
