"""Define the interfaces that a session calls on optimizers; `chunkc.optim` implements them.

They name stores and groups, never sessions: this module stands below the session, and an optimizer stands above it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Sequence
from typing import Any, Protocol

import torch

from chunkc.ir.layout import ChunkGroup
from chunkc.ir.plan import Tile
from chunkc.policy.state import PhaseContext
from chunkc.runtime.store.store import ChunkStore


class Starter(Protocol):
    """The updates of one optimizer in the backwards of one session's graphs."""

    def expected(self, groups: Sequence[ChunkGroup]) -> PhaseContext:
        """Return the context of calls of graphs with these groups, all this optimizer's, once states exist."""

    def begin_update(self, group: int) -> None:
        """Begin the update at home of a group with complete gradients, if it is this optimizer's."""

    def stages_in_slots(self, group: int) -> int:
        """Return the stages of a group's update if the next backward may run it, in slots or resident, else 0."""

    def updating(self, group: int, tiles: Sequence[Tile]) -> Callable[[Tile], None]:
        """Prepare a group for the backward that is about to run, and return the function that updates its tiles."""

    @property
    def undoable(self) -> bool:
        """Whether updates leave gradients as they are, and can be undone."""

    def take_back(self, groups: Collection[int]) -> None:
        """Undo the updates of these groups that have begun, if they can be undone."""

    @property
    def begun(self) -> Container[int]:
        """The groups with updates that have begun in a backward since the last step."""

    def __hash__(self) -> int: ...


class StateKeeper(Protocol):
    """An optimizer that keeps states of parameters, which move when the parameters do."""

    def kept_states_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return the states of a parameter, for the caller to replace by copies elsewhere; empty where none exist."""

    def starter_in(self, store: ChunkStore) -> Starter | None:
        """Return this optimizer's updates in the backwards of the session with this store; None: it makes none."""
