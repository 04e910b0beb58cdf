"""Begin an optimizer's updates in the backward, for the graphs of a session (see `chunkc.session.in_backward`)."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Container, Sequence
from typing import TYPE_CHECKING

from chunkc.ir.layout import ChunkGroup
from chunkc.ir.plan import Tile
from chunkc.optim import resident_updates as resident_updates
from chunkc.optim import slot_updates
from chunkc.optim.update_mode import groups_at_home
from chunkc.passes.planning.update_placement import can_update_resident
from chunkc.session.session import Session

if TYPE_CHECKING:
    from chunkc.optim.optimizer import ChunkedOptimizer


class BackwardStarter:
    """Begins one optimizer's updates in the backwards of one session.

    The optimizer owns it, and the session calls it: both exist whenever a method runs.
    """

    def __init__(self, optimizer: weakref.ref[ChunkedOptimizer], session: Session) -> None:
        self._optimizer_reference, self._session_reference = optimizer, weakref.ref(session)

    @property
    def _optimizer(self) -> ChunkedOptimizer:
        optimizer = self._optimizer_reference()
        assert optimizer is not None
        return optimizer

    @property
    def _session(self) -> Session:
        session = self._session_reference()
        assert session is not None
        return session

    def begin_update(self, group: int) -> bool:
        return self._optimizer.in_backward.begin(self._optimizer, self._session, group)

    @property
    def undoable(self) -> bool:
        return self._optimizer.overlap.undoable

    def take_back(self, groups: Collection[int]) -> None:
        self._optimizer.in_backward.take_back(self._session, groups)

    def begun_groups(self) -> Container[int]:
        return self._optimizer.in_backward.begun_in(self._session)

    def expects(self, groups: Sequence[ChunkGroup]) -> tuple[int, frozenset[int], frozenset[int]]:
        optimizer, indices = self._optimizer, frozenset(group.index for group in groups)
        home = groups_at_home(self._session, groups, optimizer.overlap.update_on, optimizer.rule.num_stages)
        num_stages = optimizer.rule.num_stages
        may_stay = not optimizer.overlap.undoable and can_update_resident(optimizer.states, num_stages)
        staying = indices if may_stay else frozenset[int]()
        return num_stages, indices - home, staying

    def stages_in_slots(self, group: int) -> int:
        if group in self._session.store.resident:
            return int(resident_updates.is_ready(self._optimizer, self._session, group))
        ready = slot_updates.is_ready(self._optimizer, self._session, group)
        return self._optimizer.rule.num_stages if ready else 0

    def make_ready(self, group: int) -> None:
        of = resident_updates if group in self._session.store.resident else slot_updates
        of.make_ready(self._optimizer, self._session, group)

    def update(self, tile: Tile, tiles: Sequence[Tile]) -> None:
        if tile.group in self._session.store.resident:
            resident_updates.update_group(self._optimizer, self._session, tile.group)
        else:
            slot_updates.update_tile(self._optimizer, self._session, tile, tiles)
