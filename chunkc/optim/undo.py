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


def flat_shadow_copies(session: Session, index: int) -> tuple[dict[str, torch.Tensor], Callable[[], None]]:
    """What an update of a group by the CPU computes with, and what has to be copied there before: gradients are those
    at home, all else is in twins."""
    home, store = flat_home(session, index), session.store
    shadow_copies = store.shadow_copies.flat(store.layout, index, [kind for kind in home if kind != GRAD])

    def fill() -> None:
        for kind, shadow in shadow_copies.items():
            shadow.copy_(home[kind])

    return {**home, **shadow_copies}, fill
