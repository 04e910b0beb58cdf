"""Updates that begin during the backward, as the graphs of a session see them: which groups, and who must not run then.

A compiled backward says when a group is settled at home: its gradients are complete and on their way, and nothing of
it is read from home again. Whoever wants to update the group at home may begin then. A group that is updated in slots
is asked for before the backward begins, since its update is part of the backward's plan. From its update to that
optimizer's `step()` no graph that uses the group may run: it would compute with parameters of two steps.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Set

import torch

from chunkc.ir.errors import UnsupportedError
from chunkc.ir.layout import ChunkGroup, ChunkLayout
from chunkc.ir.plan import Tile
from chunkc.policy.state import PhaseContext, transient_in
from chunkc.runtime.store.store import ChunkStore
from chunkc.session.declared_states import declared
from chunkc.session.protocols import Starter


class UpdatesInBackward:
    """Who begins updates during a session's backward, and which forwards still wait for theirs.

    Forwards are counted for each optimizer, since its own last step: another one's step says nothing of them. One that
    joins in the middle of a step waits for all that have had no backward yet.
    """

    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        self._open: Counter[int] = Counter()
        self._in_flight: weakref.WeakKeyDictionary[Starter, Counter[int]] = weakref.WeakKeyDictionary()
        self._in_slots: dict[int, weakref.ref[Starter]] = {}

    @property
    def wanted(self) -> bool:
        """Whether anybody wants to know when a group is settled."""
        return len(self._in_flight) > 0

    def join(self, starter: Starter) -> None:
        if starter not in self._in_flight:
            self._in_flight[starter] = self._open.copy()

    def enter_forward(self, groups: Collection[int]) -> None:
        """A graph that uses these groups is about to run its forward.

        Raises:
            UnsupportedError: the update of one of them has begun.
        """
        self._refuse(groups, "forward")

    def leave_forward(self, groups: Collection[int]) -> None:
        """A graph that uses these groups has run a forward that has a backward; one that failed has none."""
        for in_flight in self._counted():
            in_flight.update(groups)

    def enter_backward(self, groups: Collection[int], *, is_last: bool = True) -> None:
        """A graph that uses these groups is about to run the backward of one of its forwards.

        Args:
            is_last: else another one follows it, which adds to `.grad`, and counts.

        Raises:
            UnsupportedError: as above, or it would add to gradients that were used up.
        """
        self._refuse(groups, "backward")
        for group in groups:
            self._store.check_not_consumed(group)
        for in_flight in self._counted() if is_last else ():
            for group in groups:
                if in_flight[group] > 0:
                    in_flight[group] -= 1

    def gradients_complete(self, group: int) -> None:
        """A group is settled in the backward that runs now; its updates begin unless another backward may follow."""
        for starter, in_flight in list(self._in_flight.items()):
            if in_flight[group] == 0:
                starter.begin_update(group)

    def updates_in_slots(self, groups: Collection[int]) -> tuple[tuple[int, int], ...]:
        """(group, stages of its update) of those groups that a graph's backward may update in slots: none is to come
        that uses them. Asked in its forward, which does not count yet, and before the backward."""
        found: dict[int, int] = {}
        self._in_slots.clear()
        for starter, in_flight in list(self._in_flight.items()):
            for group in sorted(groups):
                if in_flight[group] == 0 and (num_stages := starter.stages_in_slots(group)):
                    found[group], self._in_slots[group] = num_stages, weakref.ref(starter)
        return tuple(sorted(found.items()))

    def undoable(self, updates: Collection[tuple[int, int]]) -> frozenset[int]:
        """The groups of these, which the latest `updates_in_slots` has named, whose updates can be undone."""
        starters = {group: self._in_slots[group]() for group, _ in updates}
        return frozenset(group for group, starter in starters.items() if starter is not None and starter.undoable)

    def expected(self, layout: ChunkLayout, parameters: Mapping[str, torch.Tensor]) -> PhaseContext:
        """What `updates_in_slots`, `undoable` and `transient` will find once optimizers do as they have said of their
        parameters; these are asked from now on."""
        by_starter: dict[Starter, list[ChunkGroup]] = {}
        for group in layout.groups:
            known = [parameters.get(s.spec.name) for s in group.slices]
            said = [None if parameter is None else declared(parameter) for parameter in known]
            keepers = [one.keeper() if one is not None and one.keeper is not None else None for one in said]
            keeper = keepers[0] if all(one is keepers[0] for one in keepers) else None
            starter = None if keeper is None else keeper.starter_in(self._store)
            if starter is not None and group.trainable:
                by_starter.setdefault(starter, []).append(group)
        updates: set[tuple[int, int]] = set()
        transient: set[int] = set()
        undoable: set[int] = set()
        for starter, groups in by_starter.items():
            self.join(starter)
            num_stages, in_slots, in_place = starter.expects(groups)
            updates |= {(group, num_stages) for group in in_slots | in_place}
            transient |= in_place
            undoable |= in_slots if starter.undoable else set()
        return PhaseContext(
            updates=tuple(sorted(updates)), undoable=frozenset(undoable), transient=frozenset(transient)
        )

    def transient(self, made: Set[str], hooked: Set[str], updates: Collection[tuple[int, int]]) -> frozenset[int]:
        """Groups that stay, and have no gradients before and after a phase of a graph.

        Args:
            made: parameters whose gradients the graph's backward makes; `hooked`: those that it returns to autograd.
            updates: what `updates_in_slots` has found for it.
        """
        updated, starters = {group for group, _ in updates}, list(self._in_flight)
        resident = self._store.resident if starters else frozenset[int]()
        free = {i for i in resident if i in updated or any(one.stages_in_slots(i) for one in starters)}
        return transient_in(self._store.layout, free, made, hooked, updated)

    def updating(self, tiles: Collection[Tile]) -> Callable[[Tile], None]:
        """What updates these tiles of groups, which the latest `updates_in_slots` has named."""
        by_group: dict[int, list[Tile]] = {}
        for tile in tiles:
            by_group.setdefault(tile.group, []).append(tile)
        starters = {group: starter for group in by_group if (starter := self._in_slots[group]()) is not None}
        for group, starter in starters.items():
            starter.make_ready(group)

        def update(tile: Tile) -> None:
            starters[tile.group].update(tile, by_group[tile.group])

        return update

    def stepped(self, starter: Starter) -> None:
        """An optimizer has ended its step: for it, no forward before this counts any more."""
        if starter in self._in_flight:
            self._in_flight[starter].clear()

    def _counted(self) -> list[Counter[int]]:
        return [self._open, *self._in_flight.values()]

    def has_begun(self, group: int) -> bool:
        """Whether a group's update has begun in the backward, and no step has ended since."""
        return any(group in starter.begun_groups() for starter in self._in_flight)

    def _refuse(self, groups: Collection[int], phase: str) -> None:
        for starter in list(self._in_flight):
            starter.take_back(groups)
        if any(self.has_begun(group) for group in groups):
            raise UnsupportedError(
                f'a {phase} would use parameters that the last backward has begun to update (overlap="backward"): call '
                "optimizer.step() after each backward(), or, where gradients are accumulated, run all but the last "
                "backward() inside `with optimizer.accumulating():`; with undoable=True beside it the update is undone "
                "instead, and a GradScaler may skip a step"
            )
