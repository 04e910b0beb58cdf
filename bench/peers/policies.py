"""Plan chunk movements as other systems do; the same simulator times these plans and chunkc's.

Each gives the events of a phase from the same positions, sizes and capacities that chunkc's planner has. Saved
storages that go home between the phases leave and come back as far from their uses as chunks are fetched ahead. They
are kinder to the systems than those are to themselves: exact bytes at every call, no cost of deciding.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from chunkc.ir.items import Item, SavedStorage
from chunkc.ir.layout import Chunk
from chunkc.ir.links import TO_DEVICE, TO_HOME
from chunkc.ir.plan import EVICT, PREFETCH, WAIT, WRITE_BACK, Event, Moment, PhasePlan, Position
from chunkc.ir.program import FORWARD
from chunkc.passes.planning.offload import Saved

NEVER = 1 << 60


@dataclass(frozen=True)
class Policy:
    """Policy: when an item is fetched, and which item is evicted for it.

    Attributes:
        name: for people.
        distance: items of so many positions ahead are fetched where there is room; 0: each when it is needed.
        releases: items leave as soon as no position within the distance needs them, room or not.
        by_next_use: where room is short, evict the item with the furthest next use, else the one used longest ago.
    """

    name: str
    distance: int = 0
    releases: bool = False
    by_next_use: bool = False


POLICIES = (
    Policy("ZeRO-3: fetch and release", releases=True),
    Policy("ZeRO-3: prefetch distance 1", distance=1, releases=True),
    Policy("ZeRO-3: prefetch distance 2", distance=2, releases=True),
    Policy("PatrickStar, Gemini: Belady without prefetch", by_next_use=True),
    Policy("Belady, prefetch distance 1", distance=1, by_next_use=True),
    Policy("LRU", releases=False),
)
"""Fetch and release by layer (DeepSpeed ZeRO-3); the furthest next use leaves (PatrickStar; Gemini after its warm-up
iteration); least recently used."""


@dataclass
class _Tier:
    """State of the slots while a policy goes through the positions."""

    items: Mapping[Chunk, Item]
    present: dict[Chunk, int] = field(default_factory=dict)  # with the position of its latest use
    dirty: set[Chunk] = field(default_factory=set)
    nbytes: int = 0
    stop: list[Event] = field(default_factory=list)

    def fetch(self, item: Chunk, at: int) -> None:
        spec = self.items[item]
        self.stop.append(Event(PREFETCH, item, spec.nbytes, spec.way_back.link))
        self.present[item] = at
        self.nbytes += spec.nbytes

    def leave(self, item: Chunk) -> None:
        spec = self.items[item]
        if item in self.dirty:
            self.dirty.remove(item)
            self.stop.append(Event(WRITE_BACK, item, spec.nbytes, spec.way_home.link))
            self.stop.append(Event(WAIT, item, spec.nbytes, spec.way_home.link))
        self.stop.append(Event(EVICT, item, spec.nbytes))
        del self.present[item]
        self.nbytes -= spec.nbytes


@dataclass
class _SavedOnTheWay:
    """Saved storages that have left no longer than `distance` positions ago, or come back for one so far ahead."""

    by_position: Mapping[int, Sequence[Saved]]
    distance: int
    leaves: bool
    links: tuple[str, str]
    moving: dict[Saved, int] = field(default_factory=dict)  # with the position of its use

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.moving)

    def begin(self, index: int) -> list[Event]:
        """Begin a position: fetch ahead of it, and wait for what it needs."""
        stop = []
        if self.leaves:
            for one in self.by_position.get(index - 1, ()):
                stop.append(Event(WRITE_BACK, SavedStorage(one.storage), one.nbytes, self.links[1]))
                self.moving[one] = index - 1
            return stop + self.let_go(lambda one: self.moving[one] + 1 + self.distance <= index)
        for one in self.by_position.get(index, ()):
            if one not in self.moving:
                stop.append(self._reload(one))
            self.moving.pop(one, None)  # from here on it counts with what the calls hold
            stop.append(Event(WAIT, SavedStorage(one.storage), one.nbytes, self.links[0]))
        return stop

    def let_go(self, which: Callable[[Saved], bool]) -> list[Event]:
        """Room of storages is given back, which waits for their copies."""
        gone = [one for one in self.moving if self.leaves and which(one)]
        for one in gone:
            del self.moving[one]
        return [
            event
            for one in gone
            for event in (
                Event(WAIT, SavedStorage(one.storage), one.nbytes, self.links[1]),
                Event(EVICT, SavedStorage(one.storage), one.nbytes),
            )
        ]

    def ahead(self, index: int, room_nbytes: Sequence[int]) -> list[Event]:
        """Prefetch items for later positions, as far as this one and those between have room for it."""
        stop = []
        for at in range(index + 1, index + 1 + self.distance if not self.leaves else 0):
            for one in self.by_position.get(at, ()):
                if one not in self.moving and self.nbytes + one.nbytes <= min(room_nbytes[: at - index]):
                    self.moving[one] = at
                    stop.append(self._reload(one))
        return stop

    def _reload(self, one: Saved) -> Event:
        return Event(PREFETCH, SavedStorage(one.storage), one.nbytes, self.links[0])


def _on_the_way(policy: Policy, phase: str, saved: Sequence[Saved], links: tuple[str, str]) -> _SavedOnTheWay:
    found: dict[int, list[Saved]] = {}
    for one in saved:
        found.setdefault(one.last if phase == FORWARD else one.first, []).append(one)
    return _SavedOnTheWay(found, policy.distance, phase == FORWARD, links)


def phase_plan(
    policy: Policy,
    phase: str,
    positions: Sequence[Position],
    items: Mapping[Chunk, Item],
    capacity: Sequence[int],
    saved: Sequence[Saved] = (),
    links: tuple[str, str] = (TO_DEVICE, TO_HOME),
) -> PhasePlan:
    """The phase as the policy moves its items; all leave at its end.

    Args:
        saved: storages that are at home between the phases.
        links: by which these come back, and leave.

    Raises:
        ValueError: a position by itself needs more than its capacity.
    """
    away = _on_the_way(policy, phase, saved, links)
    uses: dict[Chunk, list[int]] = {}
    for index, position in enumerate(positions):
        for item in position.items:
            uses.setdefault(item, []).append(index)
    tier, stops, moments = _Tier(items), [], []
    rooms = [have - sum(items[item].nbytes for item in at.items) for have, at in zip(capacity, positions, strict=True)]

    def next_use(item: Chunk, at: int) -> int:
        return next((use for use in uses[item] if use >= at), NEVER)

    def first_to_leave(at: int, needed: Collection[Chunk]) -> Chunk | None:
        found = [item for item in tier.present if item not in needed]
        rank: Callable[[Chunk], tuple[int, str]] = (
            (lambda item: (-next_use(item, at), str(item)))
            if policy.by_next_use
            else (lambda item: (tier.present[item], str(item)))
        )
        return min(found, key=rank, default=None)

    for index, position in enumerate(positions):
        begun = away.begin(index)
        tier.stop, coming_back = (begun, []) if away.leaves else ([], begun)
        ahead = positions[index : index + 1 + policy.distance]
        if policy.releases:
            wanted = {item for one in ahead for item in one.items}
            for item in sorted(set(tier.present) - wanted):
                tier.leave(item)
        missing = sorted(position.items - set(tier.present))
        room = capacity[index] - sum(items[item].nbytes for item in missing)
        if tier.nbytes + away.nbytes > room:
            tier.stop += away.let_go(lambda one: True)
        while tier.nbytes + away.nbytes > room:
            leaving = first_to_leave(index, position.items)
            if leaving is None:
                raise ValueError(f"{position.name} needs more than {capacity[index]} bytes of slots")
            tier.leave(leaving)
        tier.stop += coming_back  # into the room of what has left
        for item in missing:
            tier.fetch(item, index)
        for item in sorted(position.items):
            tier.present[item] = index
        waits = [Event(WAIT, item, items[item].nbytes, items[item].way_back.link) for item in sorted(position.items)]
        for one in ahead[1:]:
            for item in sorted(one.items - set(tier.present)):
                if tier.nbytes + away.nbytes + items[item].nbytes <= capacity[index]:
                    tier.fetch(item, index)
        tier.stop += away.ahead(index, [capacity[index] - tier.nbytes, *rooms[index + 1 : index + 1 + policy.distance]])
        stops.append((*tier.stop, *waits))
        moments.append(_moment(position, phase, tier.nbytes + away.nbytes))
        tier.dirty |= position.writes
    tier.stop = away.begin(len(positions)) + away.let_go(lambda one: True)
    for item in sorted(tier.present):
        tier.leave(item)
    return PhasePlan(phase, (*stops, tuple(tier.stop)), tuple(moments))


def _moment(position: Position, phase: str, slot_nbytes: int) -> Moment:
    return Moment(
        name=position.name,
        phase=phase,
        op=position.op,
        module=position.module,
        parameter_nbytes=0,
        gradient_nbytes=0,
        state_nbytes=0,
        other_nbytes=0,
        non_model_nbytes=position.non_model_nbytes,
        slot_nbytes=slot_nbytes,
    )
