"""Updates in the backward that `step()` can undo, to the bit: for clipping, loss scales, and all that is known late.

A group is updated as soon as its gradients are complete, as if nothing would change them, and what that writes waits in
twins (see `chunkc.runtime.store.shadow_copies`); the gradients go home, too. `step()` then compares: where no gradient,
parameter or hyper-parameter was changed since, none overflowed and the norm asks for no clipping, the twins become
home. Else they are dropped, and the group is updated as if the backward had not; the next backward does not try. So
bits are those of
`overlap="none"`, whatever happens in between. (SuperOffload, arXiv:2509.21271, speculates and validates like this, and
computes backwards to undo, which is not exact.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from chunkc.ir.layout import GRAD
from chunkc.kernels.formats import NO_SCALE, GradScale
from chunkc.optim.grad_scale import on_the_cpu
from chunkc.optim.group_spans import flat_home
from chunkc.optim.states import Dtypes
from chunkc.session.session import Session

if TYPE_CHECKING:
    from chunkc.optim.optimizer import ChunkedOptimizer


class NotCounted:
    """An optimizer whose parameters are about to be updated by a step that it does not count yet (see `Stepping`)."""

    def __init__(self, optimizer: ChunkedOptimizer) -> None:
        self._optimizer = optimizer

    def states_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        return self._optimizer.states_of(parameter)

    def dtypes_of(self, parameter: torch.Tensor, group: Mapping[str, Any]) -> Dtypes:
        return self._optimizer.dtypes_of(parameter, group)

    def begin_states(self, state: Mapping[str, Any], kinds: Iterable[str]) -> None:
        """All are there."""

    def begin_update_of(self, parameter: torch.Tensor, state: Mapping[str, Any]) -> None:
        """It changes once the update stands."""

    def hyper_at(self, group: Mapping[str, Any], step: int) -> Any:
        return self._optimizer.hyper_at(group, step)

    def next_hyper(self, parameter: torch.Tensor, at: Callable[[int], Any]) -> Any:
        return at(int(self.states_of(parameter)["step"]) + 1)


def count(optimizer: ChunkedOptimizer, parameter: torch.Tensor) -> None:
    """The update of a parameter stands: it has changed, and its step counts."""
    state = optimizer.states_of(parameter)
    optimizer.begin_update_of(parameter, state)
    state["step"].fill_(int(state["step"]) + 1)


class AssumedScale:
    """By what the next gradients are taken to be too large: by what the last ones were, or what a scaler has told.

    Attributes:
        is_likely: whether the next update will stand, if the next gradients are like the last ones: those overflowed
            nowhere, and were not clipped. A backward whose updates will be undone only loses time by them.
    """

    def __init__(self) -> None:
        self._scale = NO_SCALE
        self.is_likely = True

    def expect(self, unscale: torch.Tensor | None) -> None:
        """Gradients will be multiplied by this first, 0-dim fp32; None: by nothing."""
        self._scale = NO_SCALE if unscale is None else GradScale(unscale.cpu())

    def on(self, device: torch.device) -> GradScale:
        """The scale, for kernels there."""
        unscale = self._scale.unscale
        return self._scale if unscale is None or device.type == "cpu" else GradScale(unscale.to(device))

    def is_what_was(self, scale: GradScale) -> bool:
        """Whether an update with the assumed scale is one with that of the step, which is expected from now on.

        Waits for the device.
        """
        known, assumed = on_the_cpu(scale), self._scale
        self.expect(known.unscale)
        overflows = known.found_inf is not None and float(known.found_inf) != 0
        self.is_likely = not overflows and _factor(known.clip) == 1
        return self.is_likely and _factor(known.unscale) == _factor(assumed.unscale)


def _factor(of: torch.Tensor | None) -> float:
    return 1.0 if of is None else float(of)


def flat_shadow_copies(session: Session, index: int) -> tuple[dict[str, torch.Tensor], Callable[[], None]]:
    """What an update of a group by the CPU computes with, and what has to be copied there before: gradients are those
    at home, all else is in twins."""
    home, store = flat_home(session, index), session.store
    shadow_copies = store.shadow_copies.flat(store.layout, index, [kind for kind in home if kind != GRAD])

    def fill() -> None:
        for kind, shadow in shadow_copies.items():
            shadow.copy_(home[kind])

    return {**home, **shadow_copies}, fill
