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
import sys
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from chunkc.ir.hardware import Hardware
from chunkc.ir.items import Item, MovedId
from chunkc.ir.layout import GRAD, Chunk
from chunkc.ir.plan import Position

Way = tuple[str, float]
"""A link, and the seconds of one copy over it while all else rests."""


class TooSlow(Exception):
    """Calls take longer than was asked for: a search gives such a plan up."""


@dataclass(eq=False, slots=True)
class Interval:
    """An item in a slot: its slot is held during calls `start` to `end - 1`, its data used from `first` to `last`.

    `floor` and `ceiling` bound how far `start` and `end` may move, `before` is the item's interval before; at `begin_s`
    the load should begin, on a clock without waits. Without `loads` the item was made where it is. Of a saved storage,
    the room is counted with the calls that hold it, and here only before and after them.

    `way_back` and `way_home` are links, and seconds of a copy over them; a load that moves no byte only takes its room.
    Of a gradient, `gradient_of` is the group: it is loaded only once it has been written home.
    """

    item: MovedId
    nbytes: int
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
    way_back: Way = ("", 0.0)
    way_home: Way = ("", 0.0)
    moves: bool = True
    gradient_of: int | None = None


def schedule_copies(
    intervals: Sequence[Interval],
    positions: Sequence[Position],
    items: Mapping[MovedId, Item],
    capacity: Sequence[int],
    hardware: Hardware,
    barriers: Sequence[int],
    most_s: float = math.inf,
) -> CopyScheduler:
    """Let intervals begin earlier and end later, such that copies are hidden as far as there is room.

    Args:
        intervals: in order of their first uses and, of these, of names; each as short as its uses allow.

    Returns:
        With all calls behind it.

    Raises:
        TooSlow: they take more than `most_s`.
    """
    pacing = CopyScheduler(intervals, positions, items, capacity, hardware, barriers)
    for index in range(len(positions) + 1):
        if pacing.least_s(index) > most_s:
            raise TooSlow
        pacing.stop(index)
    return pacing


@dataclass(eq=False)
class _Queue:
    """Loads of one link in the order of need; those before `at` have begun."""

    loads: list[Interval] = field(default_factory=list)
    at: int = 0


@dataclass(eq=False)
class _Leaving:
    """Write-backs under way, as they began, with the time at which each is done.

    Attributes:
        nbytes: of all of them.
        next_s: when the first of them is done.
        next_ceiling: the first call during which one of them may not go on.
    """

    done_s: dict[Interval, float] = field(default_factory=dict)
    nbytes: int = 0
    next_s: float = math.inf
    next_ceiling: int = sys.maxsize
    _in_order: tuple[list[float], list[int]] | None = None

    def add(self, one: Interval, done_s: float) -> None:
        self.done_s[one] = done_s
        self.nbytes += one.nbytes
        self.next_s, self.next_ceiling = min(self.next_s, done_s), min(self.next_ceiling, one.ceiling)
        self._in_order = None

    def give_back(self, index: int, now: float, over_nbytes: float) -> float:
        """Let go at a stop of those that are done, that may go on no longer, or whose room the call needs, which lacks
        so much with all of them. When computation goes on."""
        if now < self.next_s and index < self.next_ceiling and over_nbytes <= 0:
            return now
        for one, done_s in list(self.done_s.items()):
            if done_s <= now or index >= one.ceiling or over_nbytes > 0:
                now = max(now, done_s)
                one.end = index
                over_nbytes -= one.nbytes
                self.nbytes -= one.nbytes
                del self.done_s[one]
        self.next_s = min(self.done_s.values(), default=math.inf)
        self.next_ceiling = min((one.ceiling for one in self.done_s), default=sys.maxsize)
        self._in_order = None
        return now

    def nbytes_at(self, time_s: float) -> int:
        """Bytes of those that are not done by then."""
        if self._in_order is None:
            in_order = sorted([(done_s, one.nbytes) for one, done_s in self.done_s.items()])
            gone = [0, *accumulate(nbytes for _, nbytes in in_order)]
            self._in_order = [done_s for done_s, _ in in_order], gone
        times_s, gone = self._in_order
        return self.nbytes - gone[bisect_right(times_s, time_s)]


class CopyScheduler:
    """As far as the calls have been gone through.

    Attributes:
        occupancy: slot bytes during each call, as far as they are decided.
        now: when computation comes to this stop.
    """

    def __init__(
        self,
        intervals: Sequence[Interval],
        positions: Sequence[Position],
        items: Mapping[MovedId, Item],
        capacity: Sequence[int],
        hardware: Hardware,
        barriers: Sequence[int],
    ) -> None:
        """See `schedule_copies`."""
        self._positions, self._capacity = positions, capacity
        self.occupancy, self._times = _occupied(intervals, len(positions)), _clock(positions)
        self.now = 0.0
        self._free: dict[str, float] = {}  # link -> when its queue is empty
        self._leaving = _Leaving()
        self._arriving: dict[Interval, float] = {}  # loads that have begun -> when they are done
        self._ahead_nbytes = 0  # of those of them that a later call is the first to need
        self._needed_nbytes = [0] * len(positions)  # of those, by that call
        self._written: set[int] = set()  # groups whose gradients are at home
        self._to_copy: dict[str, float] = {}  # link -> seconds of copies to come, gradients' loads left out
        _bound(intervals, barriers, len(positions))
        _set_ways(intervals, items, hardware)
        self._starting: dict[int, list[Interval]] = {}
        self._ending: dict[int, list[Interval]] = {}
        for one in intervals:
            if one.loads:
                self._starting.setdefault(one.first, []).append(one)
            if one.dirty:
                self._ending.setdefault(one.last + 1, []).append(one)
                self._will_copy(one.way_home)
        self._queues = self._queued(intervals)

    def _queued(self, intervals: Iterable[Interval]) -> Sequence[_Queue]:
        """Each link's loads, with the time at which each should begin."""
        queues: dict[str, _Queue] = {}
        for one in intervals:
            if one.loads:
                queues.setdefault(one.way_back[0], _Queue()).loads.append(one)
        for queue in queues.values():
            due_s = math.inf
            for one in reversed(queue.loads):
                one.begin_s = due_s = min(self._times[one.first], due_s) - one.way_back[1]
                if one.gradient_of is None:
                    self._will_copy(one.way_back)
        return tuple(queues.values())

    def _will_copy(self, way: Way) -> None:
        link, copy_s = way
        self._to_copy[link] = self._to_copy.get(link, 0.0) + copy_s

    def stop(self, index: int) -> None:
        """What happens before a call, and the call itself."""
        leaving = self._leaving
        for one in self._ending.get(index, ()):
            if one.gradient_of is not None:
                self._written.add(one.gradient_of)
            leaving.add(one, self._copied(one.way_home))
        if index == len(self._positions):
            self.now = leaving.give_back(index, self.now, -math.inf)
            return
        self._ahead_nbytes -= self._needed_nbytes[index]
        self.occupancy[index] += self._ahead_nbytes
        over_nbytes = self.occupancy[index] + leaving.nbytes - self._capacity[index]
        self.now = leaving.give_back(index, self.now, over_nbytes)
        self.occupancy[index] += leaving.nbytes
        needed = self._starting.get(index, ())
        for one in needed:
            if one not in self._arriving:
                self._load(one, index)
        self._load_ahead(index)
        for one in needed:
            self.now = max(self.now, self._arriving.pop(one))
        self.now += self._positions[index].cost_s

    def least_s(self, index: int) -> float:
        """What all calls take at least: what is behind this stop, and the arithmetic of those to come or, of a link,
        the copies."""
        copies_s = [self._free.get(link, 0.0) + more_s for link, more_s in self._to_copy.items()]
        return max(self.now + self._times[-1] - self._times[index], *copies_s, 0.0)

    def _copied(self, way: Way) -> float:
        """When a copy that queues now is done."""
        link, copy_s = way
        self._free[link] = done_s = max(self.now, self._free.get(link, 0.0)) + copy_s
        self._to_copy[link] -= copy_s
        return done_s

    def _load(self, one: Interval, index: int) -> None:
        one.start = index
        if one.gradient_of is not None:
            if one.gradient_of not in self._written:  # it begins empty
                self._arriving[one] = self.now
                return
            self._will_copy(one.way_back)
        self._arriving[one] = self._copied(one.way_back)

    def _load_ahead(self, index: int) -> None:
        """Begin loads that later calls need, in the order of need, as long as there is room up to them beside what
        will still be on its way home. What is so far, nothing is given back until the next stop."""
        begins_s, at = self.now - self._times[index], index  # as far as room is known
        room_nbytes, ahead_nbytes = self._capacity[index] - self.occupancy[index], self._ahead_nbytes
        while (one := self._next(index)) is not None and one.nbytes <= room_nbytes:
            while at + 1 < one.first and one.nbytes <= room_nbytes:
                at += 1
                ahead_nbytes -= self._needed_nbytes[at]
                in_use_nbytes = self.occupancy[at] + ahead_nbytes + self._leaving.nbytes_at(begins_s + self._times[at])
                room_nbytes = min(room_nbytes, self._capacity[at] - in_use_nbytes)
            if one.nbytes > room_nbytes:
                break
            self._load(one, index)
            room_nbytes -= one.nbytes
            ahead_nbytes += one.nbytes
            self.occupancy[index] += one.nbytes
            self._ahead_nbytes += one.nbytes
            self._needed_nbytes[one.first] += one.nbytes

    def _next(self, index: int) -> Interval | None:
        """The load that is needed first of those that are due and may begin."""
        heads = [one for queue in self._queues if (one := self._due(queue, index)) is not None]
        return min(heads, key=lambda one: (one.first, one.item)) if len(heads) > 1 else heads[0] if heads else None

    def _due(self, queue: _Queue, index: int) -> Interval | None:
        """A link's first load that may begin at this stop and is due: it is not hidden if it begins at the next."""
        loads, arriving, leaving = queue.loads, self._arriving, self._leaving.done_s
        while queue.at < len(loads) and ((one := loads[queue.at]).first <= index or one in arriving):
            queue.at += 1
        for at in range(queue.at, len(loads)):
            one = loads[at]
            if one.floor > index or self._times[index + 1] <= one.begin_s:
                return None
            before = one.before
            if one not in arriving and (before is None or (before.last < index and before not in leaving)):
                if not one.moves:
                    continue  # it only takes its room: that can wait
                return one
        return None


def _set_ways(intervals: Iterable[Interval], items: Mapping[MovedId, Item], hardware: Hardware) -> None:
    """Say of each interval how its item moves: alike for all that one `Item` describes."""
    known: dict[tuple[int, int], tuple[Way, Way, bool]] = {}
    for one in intervals:
        item = items[one.item]
        key = id(item), one.nbytes
        if key not in known:
            back = item.way_back.link, item.way_back.seconds(one.nbytes, hardware)
            home = item.way_home.link, item.way_home.seconds(one.nbytes, hardware)
            known[key] = back, home, item.way_back.moved_nbytes(one.nbytes) > 0
        one.way_back, one.way_home, one.moves = known[key]
        if isinstance(one.item, Chunk) and one.item.kind == GRAD:
            one.gradient_of = one.item.group


def _occupied(intervals: Iterable[Interval], num_positions: int) -> list[int]:
    """Bytes in slots during each call."""
    changes = [0] * (num_positions + 1)
    for one in intervals:
        changes[one.start] += one.nbytes
        changes[one.end] -= one.nbytes
    return list(accumulate(changes[:-1]))


def _bound(intervals: Iterable[Interval], barriers: Sequence[int], end: int) -> None:
    """How far each interval may move: not past a barrier, nor into the item's next one."""
    previous: dict[MovedId, Interval] = {}
    for one in intervals:
        behind = bisect_right(barriers, one.first)
        one.floor = barriers[behind - 1] if behind else 0
        behind = bisect_right(barriers, one.last)
        one.ceiling = barriers[behind] if behind < len(barriers) else end
        one.before = previous.get(one.item)
        if one.before is not None:
            one.before.ceiling = min(one.before.ceiling, one.first)
        previous[one.item] = one


def _clock(positions: Sequence[Position]) -> list[float]:
    """When each call starts where nothing is waited for; one more entry for the end."""
    times = [0.0]
    for position in positions:
        times.append(times[-1] + position.cost_s)
    return times
