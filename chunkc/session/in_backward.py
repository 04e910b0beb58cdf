"""Begin updates during the backward of a session's graphs, and refuse graphs that would read half-updated parameters.

A compiled backward reports a group when its gradients are complete and on their way home, and nothing of it is read
from home again. An update at home may begin then. An update in slots is part of the backward's plan, so it is asked for
before the backward begins. From a group's update to that optimizer's `step()` no graph that uses the group may run: it
would compute with parameters of two steps.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Set

import torch

from chunkc.ir.errors import UnsupportedError
from chunkc.ir.layout import ChunkGroup, ChunkLayout
from chunkc.ir.plan import Tile, tiles_by_group
from chunkc.policy.state import PhaseContext, transient_in
from chunkc.runtime.store.store import ChunkStore
from chunkc.session.declared_states import keeper_of
from chunkc.session.protocols import Starter


class UpdatesInBackward:
    """The optimizers that update in a session's backwards, and the forwards that have had no backward yet.

    Forwards are counted for each optimizer since its own last step: a step of another optimizer does not end them. An
    optimizer that joins in the middle of a step waits for all forwards that have had no backward yet.
    """

    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        self._open: Counter[int] = Counter()
        self._in_flight: weakref.WeakKeyDictionary[Starter, Counter[int]] = weakref.WeakKeyDictionary()
        self._in_slots: dict[int, weakref.ref[Starter]] = {}

    @property
    def wanted(self) -> bool:
        """Whether an optimizer waits for groups with complete gradients."""
        return len(self._in_flight) > 0

    def join(self, starter: Starter) -> None:
        if starter not in self._in_flight:
            self._in_flight[starter] = self._open.copy()

    def enter_forward(self, groups: Collection[int]) -> None:
        """Admit the forward of a graph that uses these groups.

        Raises:
            UnsupportedError: the update of one of them has begun.
        """
        self._refuse(groups, "forward")

    def leave_forward(self, groups: Collection[int]) -> None:
        """Count a forward of a graph that uses these groups and has a backward; a forward that failed has none."""
        for in_flight in self._counted():
            in_flight.update(groups)

    def enter_backward(self, groups: Collection[int], *, is_last: bool = True) -> None:
        """Admit and count a backward of a graph that uses these groups.

        Args:
            is_last: false if another backward of the same forward follows, and counts in its place.

        Raises:
            UnsupportedError: as above, or it would add to consumed gradients.
        """
        self._refuse(groups, "backward")
        for group in groups:
            self._store.gradients.check_not_consumed(group)
        for in_flight in self._counted() if is_last else ():
            for group in groups:
                if in_flight[group] > 0:
                    in_flight[group] -= 1

    def gradients_complete(self, group: int) -> None:
        """Begin the updates of a group with complete gradients, unless another backward may add to these."""
        for starter, in_flight in list(self._in_flight.items()):
            if in_flight[group] == 0:
                starter.begin_update(group)

    def updates_in_slots(self, groups: Collection[int]) -> tuple[tuple[int, int], ...]:
        """Return (group, stages of its update) of the groups that a graph's backward may update.

        No other backward that uses them is to come. Called in the graph's forward, which does not count yet, and before
        the backward.
        """
        num_stages_of: dict[int, int] = {}
        self._in_slots.clear()
        for starter, in_flight in list(self._in_flight.items()):
            for group in sorted(groups):
                if in_flight[group] == 0 and (num_stages := starter.stages_in_slots(group)):
                    num_stages_of[group], self._in_slots[group] = num_stages, weakref.ref(starter)
        return tuple(sorted(num_stages_of.items()))

    def phase_context(self, groups: Collection[int], made: Set[str], hooked: frozenset[str]) -> PhaseContext:
        """Return the context of a phase of a graph that uses these groups (see `updates_in_slots` and `transient`)."""
        updates = self.updates_in_slots(groups)
        starters = {group: self._in_slots[group]() for group, _ in updates}
        return PhaseContext(
            hooked=hooked,
            updates=updates,
            undoable=frozenset(
                group for group, starter in starters.items() if starter is not None and starter.undoable
            ),
            transient=self.transient(made, hooked, updates),
            marks_complete=self.wanted,
        )

    def expected(self, layout: ChunkLayout, parameters: Mapping[str, torch.Tensor]) -> PhaseContext:
        """Predict `phase_context` from optimizers' declarations. The optimizers join from now on."""
        by_starter: dict[Starter, list[ChunkGroup]] = {}
        for group in layout.groups:
            keepers = [keeper_of(parameters.get(s.spec.name)) for s in group.slices]
            keeper = keepers[0] if all(other is keepers[0] for other in keepers) else None
            starter = None if keeper is None else keeper.starter_in(self._store)
            if starter is not None and group.trainable:
                by_starter.setdefault(starter, []).append(group)
        for starter in by_starter:
            self.join(starter)
        contexts = [starter.expected(groups) for starter, groups in by_starter.items()]
        return PhaseContext(
            updates=tuple(sorted(update for context in contexts for update in context.updates)),
            undoable=frozenset(group for context in contexts for group in context.undoable),
            transient=frozenset(group for context in contexts for group in context.transient),
            marks_complete=self.wanted,
        )

    def transient(self, made: Set[str], hooked: Set[str], updates: Collection[tuple[int, int]]) -> frozenset[int]:
        """Return the resident groups that have no gradients before and after a phase of a graph.

        Args:
            made: parameters for which the graph's backward makes gradients; `hooked`: those returned to autograd.
            updates: of the graph, as of `updates_in_slots`.
        """
        updated, starters = {group for group, _ in updates}, list(self._in_flight)
        resident = self._store.resident if starters else frozenset[int]()
        free = {i for i in resident if i in updated or any(starter.stages_in_slots(i) for starter in starters)}
        return transient_in(self._store.layout, free, made, hooked, updated)

    def updating(self, tiles: Collection[Tile]) -> Callable[[Tile], None]:
        """Return the function that updates these tiles of groups, which the latest `updates_in_slots` has named."""
        updates = {
            group: starter.updating(group, of_group)
            for group, of_group in tiles_by_group(tiles).items()
            if (starter := self._in_slots[group]()) is not None
        }
        return lambda tile: updates[tile.group](tile)

    def stepped(self, starter: Starter) -> None:
        """Forget the forwards counted for an optimizer: its step has ended."""
        if starter in self._in_flight:
            self._in_flight[starter].clear()

    def _counted(self) -> list[Counter[int]]:
        return [self._open, *self._in_flight.values()]

    def has_begun(self, group: int) -> bool:
        """Whether a group's update has begun in the backward, and no step has ended since."""
        return any(group in starter.begun for starter in self._in_flight)

    def _refuse(self, groups: Collection[int], phase: str) -> None:
        for starter in list(self._in_flight):
            starter.take_back(groups)
        if any(self.has_begun(group) for group in groups):
            raise UnsupportedError(
                f'a {phase} would use parameters that the last backward has begun to update (overlap="backward"): call '
                "optimizer.step() after each backward(), or, where gradients are accumulated, run all but the last "
                "backward() inside `with optimizer.accumulating():`; with undoable=True as well, the update is undone "
                "instead, and a GradScaler may skip a step"
            )
