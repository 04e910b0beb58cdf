"""Begin an optimizer's updates in the backward, for the graphs of a session (see `chunkc.session.in_backward`)."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Container, Sequence
from typing import TYPE_CHECKING

from chunkc.ir.layout import ChunkGroup
from chunkc.ir.plan import Tile
from chunkc.optim import resident_updates as resident_updates
from chunkc.optim import slot_updates
from chunkc.optim.update_on import at_home
from chunkc.passes.planning.update_placement import can_update_resident
from chunkc.session.session import Session

if TYPE_CHECKING:
    from chunkc.optim.optimizer import ChunkedOptimizer


class BackwardStarter:
    """Begins one optimizer's updates. Owned by it: it is there whenever this is asked."""

    def __init__(self, optimizer: ChunkedOptimizer) -> None:
        self._reference = weakref.ref(optimizer)

    @property
    def _optimizer(self) -> ChunkedOptimizer:
        optimizer = self._reference()
        assert optimizer is not None
        return optimizer

    def begin_update(self, session: Session, group: int) -> bool:
        return self._optimizer.in_backward.begin(self._optimizer, session, group)

    @property
    def undoable(self) -> bool:
        return self._optimizer.overlap.undoable

    def take_back(self, session: Session, groups: Collection[int]) -> None:
        self._optimizer.in_backward.take_back(session, groups)

    def begun_in(self, session: Session) -> Container[int]:
        return self._optimizer.in_backward.begun_in(session)

    def expects(self, session: Session, groups: Sequence[ChunkGroup]) -> tuple[int, frozenset[int], frozenset[int]]:
        optimizer, indices = self._optimizer, frozenset(group.index for group in groups)
        home = at_home(session, groups, optimizer.overlap.update_on, optimizer.rule.num_stages)
        num_stages = optimizer.rule.num_stages
        may_stay = not optimizer.overlap.undoable and can_update_resident(optimizer.states, num_stages)
        staying = indices if may_stay else frozenset[int]()
        return num_stages, indices - home, staying

    def stages_in_slots(self, session: Session, group: int) -> int:
        if group in session.store.resident:
            return int(resident_updates.is_ready(self._optimizer, session, group))
        ready = slot_updates.is_ready(self._optimizer, session, group)
        return self._optimizer.rule.num_stages if ready else 0

    def make_ready(self, session: Session, group: int) -> None:
        of = resident_updates if group in session.store.resident else slot_updates
        of.make_ready(self._optimizer, session, group)

    def update(self, session: Session, tile: Tile, tiles: Sequence[Tile]) -> None:
        if tile.group in session.store.resident:
            resident_updates.update_group(self._optimizer, session, tile.group)
        else:
            slot_updates.update_tile(self._optimizer, session, tile, tiles)
