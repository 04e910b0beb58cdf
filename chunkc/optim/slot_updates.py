"""The optimizer's side of updates in slots that a backward makes (see `passes.early_updates`).

Whether a group may be updated is asked before the backward runs, since the plan depends on it; its steps are counted
with its first tile. Its gradients are used up then: the parameter's `.grad` says that there was one, and no more. If
the update can be undone, they go home, and its steps are counted by the optimizer's (see `undo`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from chunkc.ir.errors import OptionsError, UnsupportedError
from chunkc.ir.layout import GRAD, PARAM
from chunkc.ir.plan import Tile
from chunkc.kernels.formats import NO_SCALE
from chunkc.optim.group_spans import Task, make_states
from chunkc.optim.rule import GroupWork, TileUpdate
from chunkc.optim.running_updates import label_of
from chunkc.optim.step import group_spans
from chunkc.optim.undo import NotCounted
from chunkc.optim.update import compute
from chunkc.optim.update_scheduler import Begun, Entry, can_be_undone, has_states, interrupted, noted_of
from chunkc.runtime.store.consumed_gradients import ConsumedGradient
from chunkc.session.pending_readers import await_readers
from chunkc.session.session import Session

if TYPE_CHECKING:
    from chunkc.optim.optimizer import ChunkedOptimizer


@dataclass
class SlotUpdate:
    """The update of a group by one backward.

    Attributes:
        label: the group as its user knows it.
        tiles: those still to come.
    """

    update: TileUpdate
    label: str
    tiles: set[Tile] = field(default_factory=set)
    begun: bool = False

    def has_begun(self) -> bool:
        return self.begun

    def check(self) -> None:
        """Raise where the backward did not come to its end.

        Raises:
            StreamError: it did not.
        """
        if self.tiles:
            raise interrupted(self.label)


def is_ready(optimizer: ChunkedOptimizer, session: Session, index: int) -> bool:
    """Whether the next backward may update a group: all of it is this optimizer's, with states that are at home or
    have yet to be made, and the hyper-parameters make sense."""
    optimizer.in_backward.look_up(optimizer, session)
    entries = optimizer.in_backward.in_slots(session, index)
    store = session.store
    if not entries:
        return False
    names = {name for _, name, _ in entries}
    if names != {s.spec.name for s in store.layout.groups[index].slices}:
        return False
    if not all(parameter.requires_grad for parameter, _, _ in entries):
        return False
    if not set(optimizer.rule.states(optimizer.param_groups).kinds) <= set(optimizer.states.kinds):
        return False
    try:
        for group in {id(group): group for _, _, group in entries}.values():
            optimizer.check_group(group)
        for parameter, _, _ in entries:
            optimizer.check_dtype(parameter)
    except (OptionsError, UnsupportedError):
        return False  # the step says so
    if optimizer.overlap.undoable:
        return can_be_undone(optimizer, session, index, entries)
    if not session.keepers.has(optimizer, names):
        return session.keepers.has_none(names) and all(_lacks_states(optimizer, session, entry) for entry in entries)
    return all(has_states(optimizer, session, entry) for entry in entries)


def _lacks_states(optimizer: ChunkedOptimizer, session: Session, entry: Entry) -> bool:
    """Whether a parameter has no states yet, and chunks have room for all that it needs."""
    parameter, name, group = entry
    kinds = session.store.layout.groups[session.store.group_index(name)].state_kinds
    return not optimizer.kept_states_of(parameter) and set(optimizer.dtypes_of(parameter, group)) <= set(kinds)


def make_ready(optimizer: ChunkedOptimizer, session: Session, index: int) -> None:
    """Before a backward fetches anything: who reads parameters has ended, states are there, and masters are of what
    parameters contain."""
    entries = optimizer.in_backward.in_slots(session, index)
    await_readers(parameter for parameter, _, _ in entries)
    session.store.updates.wait(index)
    if not session.keepers.has(optimizer, names := [name for _, name, _ in entries]):
        session.store.reserve_states(index)
        session.keepers.keep(optimizer, index, names)
        with torch.no_grad():
            make_states(session, index, [Task(optimizer, *entry) for entry in entries])
    for parameter, _, _ in entries:
        optimizer.contents.follow(parameter, optimizer.states_of(parameter))


def update_tile(optimizer: ChunkedOptimizer, session: Session, tile: Tile, tiles: Sequence[Tile]) -> None:
    """Update a tile of a group whose gradients are complete; the first one begins the group's update."""
    found = optimizer.in_backward.beginning(session, tile.group)
    if found is None:
        found = _begin(optimizer, session, tile.group, tiles)
    assert isinstance(found, SlotUpdate)
    compute(session.store, found.update, tile, whole=(PARAM, GRAD))
    found.tiles.remove(tile)


def _begin(optimizer: ChunkedOptimizer, session: Session, index: int, tiles: Sequence[Tile]) -> SlotUpdate:
    entries, store, undoable = optimizer.in_backward.in_slots(session, index), session.store, optimizer.overlap.undoable
    stepping = NotCounted(optimizer) if undoable else optimizer
    spans = group_spans(optimizer, session, index, [Task(stepping, *entry) for entry in entries])
    ranges = [(tile.begin, tile.end) for tile in tiles if tile.stage == 0]
    scale = optimizer.in_backward.assumed.on(store.tier.device) if undoable else NO_SCALE
    of_group = optimizer.updater(store.tier.device).of_group(GroupWork(index, spans, ranges, scale))
    made = SlotUpdate(of_group, label_of(session, index), set(tiles))
    if undoable:
        store.shadow_copies.begin(index)
        optimizer.in_backward.note(session, index, [noted_of(optimizer, *entry) for entry in entries], made)
        made.begun = True
        return made
    stand_ins = {name: ConsumedGradient(parameter, name) for parameter, name, _ in entries}
    noted = [
        Begun(p, name, stand_ins[name], stand_ins[name]._version, p._version, optimizer.hyper_now(group, p))
        for p, name, group in entries
    ]
    optimizer.in_backward.note(session, index, noted, made)  # before it begins: it may be interrupted
    made.begun = True
    store.consume_gradients(index, stand_ins)
    return made
