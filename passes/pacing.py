"""When copies begin and slots are given back, on the clock that the plan itself will run by.

The calls are gone through in order, with the time at which each begins, each link's queue, and the computation's waits,
as the simulator has them. At each stop

- a write-back that is done by then gives its slot back. One that is not keeps it, and is waited for only where the next
  call lacks the room otherwise;
- what is needed next is loaded, in the order of need, as far as there is room beside what is still on its way home.
  A load that is not due yet, since it would be hidden if it began later, waits.

So where a link is the bottleneck, both ways are busy, and computation does not wait for what leaves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from chunkc.ir.chunks import GRAD, Chunk
from chunkc.ir.hardware import Hardware
from chunkc.ir.items import Copy, Item, MovedId
from chunkc.ir.plan import Position


@dataclass(eq=False)
class Interval:
    """An item in a slot: its slot is held during calls `start` to `end - 1`, its data used from `first` to `last`.

    `floor` and `ceiling` bound how far `start` and `end` may move, `before` is the item's interval before; at `begin_s`
    the load should begin, on a clock without waits. Without `loads` the item was made where it is. Of a saved storage,
    the room is counted with the calls that hold it, and here only before and after them.
    """

    item: MovedId
    first: int
    last: int
    dirty: bool
    start: int
    end: int
    floor: int = 0
    ceiling: int = 0
    before: Interval | None = None
    begin_s: float = 0.0
    loads: bool = True


def pace(
    intervals: Sequence[Interval],
    positions: Sequence[Position],
    items: Mapping[MovedId, Item],
    capacity: Sequence[int],
    hardware: Hardware,
    barriers: Sequence[int],
) -> Pacing:
    """Let intervals begin earlier and end later, such that copies are hidden as far as there is room.

    Args:
        intervals: in order of their first uses, each as short as its uses allow.

    Returns:
        With all calls behind it.
    """
    pacing = Pacing(positions, items, capacity, hardware)
    pacing.bound(intervals, barriers)
    for index in range(len(positions) + 1):
        pacing.stop(index)
    return pacing


@dataclass(eq=False)
class _Queue:
    """Loads of one link in the order of need; those before `at` have begun."""

    loads: list[Interval]
    at: int = 0


@dataclass
class Pacing:
    """As far as the calls have been gone through.

    Attributes:
        occupancy: slot bytes during each call, as far as they are decided.
        now: when computation comes to this stop.
        free: link -> when its queue is empty.
        leaving: write-backs under way, with the time at which each is done, in the order in which they began.
        arriving: loads that have begun -> when they are done.
        written: groups whose gradients are at home.
    """

    positions: Sequence[Position]
    items: Mapping[MovedId, Item]
    capacity: Sequence[int]
    hardware: Hardware
    now: float = 0.0
    free: dict[str, float] = field(default_factory=dict)
    leaving: dict[Interval, float] = field(default_factory=dict)
    arriving: dict[Interval, float] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)

    def bound(self, intervals: Sequence[Interval], barriers: Sequence[int]) -> None:
        """How far each interval may move, and when its load is due."""
        end = len(self.positions)
        self.occupancy, self._times = [0] * end, _clock(self.positions)
        self._starting: dict[int, list[Interval]] = {}
        self._ending: dict[int, list[Interval]] = {}
        previous: dict[MovedId, Interval] = {}
        for one in intervals:
            for index in range(one.start, one.end):
                self.occupancy[index] += self.items[one.item].nbytes
            one.floor = max((at for at in barriers if at <= one.first), default=0)
            one.ceiling = min((at for at in barriers if at > one.last), default=end)
            one.before = previous.get(one.item)
            if one.before is not None:
                one.before.ceiling = min(one.before.ceiling, one.first)
            previous[one.item] = one
            if one.loads:
                self._starting.setdefault(one.first, []).append(one)
            if one.dirty:
                self._ending.setdefault(one.last + 1, []).append(one)
        in_order = sorted((one for one in intervals if one.loads), key=lambda one: (one.first, one.item))
        self._queues: dict[str, _Queue] = {}
        for one in in_order:
            self._queues.setdefault(self.items[one.item].way_back.link, _Queue([])).loads.append(one)
        for queue in self._queues.values():
            due_s = math.inf
            for one in reversed(queue.loads):
                item = self.items[one.item]
                due_s = min(self._times[one.first], due_s) - item.way_back.seconds(item.nbytes, self.hardware)
                one.begin_s = due_s

    def stop(self, index: int) -> None:
        """What happens before a call, and the call itself."""
        for one in self._ending.get(index, ()):
            if isinstance(one.item, Chunk) and one.item.kind == GRAD:
                self.written.add(one.item.group)
            self.leaving[one] = self._copied(self.items[one.item].way_home, one)
        self._give_back(index)
        if index == len(self.positions):
            return
        needed = self._starting.get(index, ())
        for one in needed:
            if one not in self.arriving:
                self._load(one, index)
        while (ahead := self._next(index)) is not None and self._has_room(ahead, index):
            self._load(ahead, index)
        for one in needed:
            self.now = max(self.now, self.arriving.pop(one))
        self.now += self.positions[index].cost_s

    def _copied(self, way: Copy, one: Interval) -> float:
        """When a copy that queues now is done."""
        start = max(self.now, self.free.get(way.link, 0.0))
        self.free[way.link] = start + way.seconds(self.items[one.item].nbytes, self.hardware)
        return self.free[way.link]

    def _give_back(self, index: int) -> None:
        """Slots of write-backs that are done, that may go on no longer, or whose room the call needs."""
        over = -math.inf
        if index < len(self.positions):
            over = self.occupancy[index] + self._leaving_nbytes - self.capacity[index]
        for one, done_s in list(self.leaving.items()):
            if done_s <= self.now or index >= one.ceiling or over > 0:
                self.now = max(self.now, done_s)
                one.end = index
                over -= self.items[one.item].nbytes
                del self.leaving[one]
            else:
                self.occupancy[index] += self.items[one.item].nbytes

    @property
    def _leaving_nbytes(self) -> int:
        return sum(self.items[one.item].nbytes for one in self.leaving)

    def _load(self, one: Interval, index: int) -> None:
        item = self.items[one.item]
        is_empty = isinstance(one.item, Chunk) and one.item.kind == GRAD and one.item.group not in self.written
        self.arriving[one] = self.now if is_empty else self._copied(item.way_back, one)
        for at in range(index, one.first):
            self.occupancy[at] += item.nbytes
        one.start = index

    def _next(self, index: int) -> Interval | None:
        """The load that is needed first of those that are due and may begin."""
        heads = (next(self._due(queue, index), None) for queue in self._queues.values())
        return min((one for one in heads if one is not None), key=lambda one: (one.first, one.item), default=None)

    def _due(self, queue: _Queue, index: int) -> Iterator[Interval]:
        """Loads of a link that may begin at this stop and are due: they are not hidden if they begin at the next."""
        while queue.at < len(queue.loads) and self._has_begun(queue.loads[queue.at], index):
            queue.at += 1
        for at in range(queue.at, len(queue.loads)):
            one = queue.loads[at]
            if one.floor > index or self._times[index + 1] <= one.begin_s:
                return
            before = one.before
            if not self._has_begun(one, index) and (
                before is None or (before.last < index and before not in self.leaving)
            ):
                yield one

    def _has_begun(self, one: Interval, index: int) -> bool:
        return one.first <= index or one in self.arriving

    def _has_room(self, one: Interval, index: int) -> bool:
        """Whether a load may begin here, beside what will still be on its way home."""
        nbytes, begins_s = self.items[one.item].nbytes, self.now - self._times[index]
        for at in range(index, one.first):
            beside = nbytes
            if at > index:
                begin_s = begins_s + self._times[at]
                beside += sum(
                    self.items[other.item].nbytes for other, done_s in self.leaving.items() if done_s > begin_s
                )
            if self.occupancy[at] + beside > self.capacity[at]:
                return False
        return True


def _clock(positions: Sequence[Position]) -> list[float]:
    """When each call starts where nothing is waited for; one more entry for the end."""
    times = [0.0]
    for position in positions:
        times.append(times[-1] + position.cost_s)
    return times
