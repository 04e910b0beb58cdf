"""Schedule when copies begin and slots are given back, on the clock that the plan itself will run by.

The calls are gone through in order, with the time at which each begins, each link's queue, and the computation's waits,
as in the simulator. At each stop

- a write-back that is done by then gives its slot back. Another one keeps its slot, and is waited for only if the next
  call lacks the room otherwise;
- items that are needed next are loaded, in the order of need, as far as there is room next to the write-backs under
  way. A load that is not due yet, since it would be hidden if it began later, waits.

So if a link is the bottleneck, both directions are busy, and computation does not wait for write-backs.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from chunkc.ir.clock import Clock
from chunkc.ir.hardware import Hardware
from chunkc.ir.items import Item, MovedId
from chunkc.ir.layout import GRAD, Chunk
from chunkc.ir.plan import Position

Way = tuple[str, float]
"""A link, and the seconds of one copy over it while the other links rest."""


class TooSlow(Exception):
    """Abort of a plan with calls that take longer than the limit: a search gives such a plan up."""


@dataclass(eq=False, slots=True)
class Interval:
    """An item in a slot: its slot is held during calls `start` to `end - 1`, its data used from `first` to `last`.

    `floor` and `ceiling` bound how far `start` and `end` may move, `before` is the item's interval before; at `begin_s`
    the load should begin, on a clock without waits. Without `loads` the item was computed in place. Of a saved storage,
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
        The scheduler after all calls.

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
class _WriteBacks:
    """Write-backs under way, in the order they began, with the time at which each is done.

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

    def add(self, interval: Interval, done_s: float) -> None:
        self.done_s[interval] = done_s
        self.nbytes += interval.nbytes
        self.next_s, self.next_ceiling = min(self.next_s, done_s), min(self.next_ceiling, interval.ceiling)
        self._in_order = None

    def give_back(self, index: int, now: float, over_nbytes: float) -> float:
        """Free at a stop the slots of write-backs that are done, may go on no longer, or hold room that the call needs.

        Args:
            over_nbytes: room that the call lacks while it has none of these slots.

        Returns:
            The time at which computation goes on.
        """
        if now < self.next_s and index < self.next_ceiling and over_nbytes <= 0:
            return now
        for interval, done_s in list(self.done_s.items()):
            if done_s <= now or index >= interval.ceiling or over_nbytes > 0:
                now = max(now, done_s)
                interval.end = index
                over_nbytes -= interval.nbytes
                self.nbytes -= interval.nbytes
                del self.done_s[interval]
        self.next_s = min(self.done_s.values(), default=math.inf)
        self.next_ceiling = min((interval.ceiling for interval in self.done_s), default=sys.maxsize)
        self._in_order = None
        return now

    def nbytes_at(self, time_s: float) -> int:
        """Return the bytes of write-backs that are not done by then."""
        if self._in_order is None:
            in_order = sorted([(done_s, interval.nbytes) for interval, done_s in self.done_s.items()])
            done_nbytes = [0, *accumulate(nbytes for _, nbytes in in_order)]
            self._in_order = [done_s for done_s, _ in in_order], done_nbytes
        times_s, done_nbytes = self._in_order
        return self.nbytes - done_nbytes[bisect_right(times_s, time_s)]


class CopyScheduler:
    """State of the schedule after a number of calls.

    Attributes:
        occupancy: slot bytes during each call, as far as they are decided.
        clock: of this stop: `Clock.now` is when computation comes to it.
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
        self.clock = Clock()
        self._write_backs = _WriteBacks()
        self._arriving: dict[Interval, float] = {}  # loads that have begun -> when they are done
        self._ahead_nbytes = 0  # of those of them that a later call is the first to need
        self._needed_nbytes = [0] * len(positions)  # the same, by that call
        self._to_copy: dict[str, float] = {}  # link -> seconds of copies to come, gradients' loads left out
        _bound(intervals, barriers, len(positions))
        _set_ways(intervals, items, hardware)
        self._starting: dict[int, list[Interval]] = {}
        self._ending: dict[int, list[Interval]] = {}
        for interval in intervals:
            if interval.loads:
                self._starting.setdefault(interval.first, []).append(interval)
            if interval.dirty:
                self._ending.setdefault(interval.last + 1, []).append(interval)
                self._will_copy(interval.way_home)
        self._queues = self._queued(intervals)

    def _queued(self, intervals: Iterable[Interval]) -> Sequence[_Queue]:
        """Queue each link's loads, with the time at which each should begin."""
        queues: dict[str, _Queue] = {}
        for interval in intervals:
            if interval.loads:
                queues.setdefault(interval.way_back[0], _Queue()).loads.append(interval)
        for queue in queues.values():
            due_s = math.inf
            for load in reversed(queue.loads):
                load.begin_s = due_s = min(self._times[load.first], due_s) - load.way_back[1]
                if load.gradient_of is None:
                    self._will_copy(load.way_back)
        return tuple(queues.values())

    def _will_copy(self, way: Way) -> None:
        link, copy_s = way
        self._to_copy[link] = self._to_copy.get(link, 0.0) + copy_s

    def stop(self, index: int) -> None:
        """Schedule the copies before a call, and the call itself."""
        clock, write_backs = self.clock, self._write_backs
        for interval in self._ending.get(index, ()):
            if interval.gradient_of is not None:
                clock.written.add(interval.gradient_of)
            write_backs.add(interval, self._copied(interval.way_home))
        if index == len(self._positions):
            clock.wait(write_backs.give_back(index, clock.now, -math.inf))
            return
        self._ahead_nbytes -= self._needed_nbytes[index]
        self.occupancy[index] += self._ahead_nbytes
        over_nbytes = self.occupancy[index] + write_backs.nbytes - self._capacity[index]
        clock.wait(write_backs.give_back(index, clock.now, over_nbytes))
        self.occupancy[index] += write_backs.nbytes
        needed = self._starting.get(index, ())
        for load in needed:
            if load not in self._arriving:
                self._load(load, index)
        self._load_ahead(index)
        for load in needed:
            clock.wait(self._arriving.pop(load))
        clock.run(self._positions[index].cost_s)

    def least_s(self, index: int) -> float:
        """Return a lower bound for the seconds of all calls, as far as it is known at this stop.

        It is the larger of the time until now with the arithmetic that is left, and of each link's time with its
        copies.
        """
        copies_s = [self.clock.free_s(link) + more_s for link, more_s in self._to_copy.items()]
        return max(self.clock.now + self._times[-1] - self._times[index], *copies_s, 0.0)

    def _copied(self, way: Way) -> float:
        """Queue a copy now and return when it is done."""
        link, copy_s = way
        _, done_s = self.clock.copy(link, copy_s)
        self._to_copy[link] -= copy_s
        return done_s

    def _load(self, load: Interval, index: int) -> None:
        load.start = index
        if load.gradient_of is not None:
            if load.gradient_of not in self.clock.written:  # it begins empty
                self._arriving[load] = self.clock.now
                return
            self._will_copy(load.way_back)
        self._arriving[load] = self._copied(load.way_back)

    def _load_ahead(self, index: int) -> None:
        """Begin loads that later calls need, in the order of need, as long as there is room up to them.

        The room counts the write-backs that will still be under way. Nothing that is present is given back until the
        next stop.
        """
        late_s, at = self.clock.now - self._times[index], index  # waits so far; the call up to which room is known
        room_nbytes, ahead_nbytes = self._capacity[index] - self.occupancy[index], self._ahead_nbytes
        while (load := self._next(index)) is not None and load.nbytes <= room_nbytes:
            while at + 1 < load.first and load.nbytes <= room_nbytes:
                at += 1
                ahead_nbytes -= self._needed_nbytes[at]
                leaving_nbytes = self._write_backs.nbytes_at(late_s + self._times[at])
                in_use_nbytes = self.occupancy[at] + ahead_nbytes + leaving_nbytes
                room_nbytes = min(room_nbytes, self._capacity[at] - in_use_nbytes)
            if load.nbytes > room_nbytes:
                break
            self._load(load, index)
            room_nbytes -= load.nbytes
            ahead_nbytes += load.nbytes
            self.occupancy[index] += load.nbytes
            self._ahead_nbytes += load.nbytes
            self._needed_nbytes[load.first] += load.nbytes

    def _next(self, index: int) -> Interval | None:
        """Return the load that is needed first of those that are due and may begin."""
        heads = [load for queue in self._queues if (load := self._due(queue, index)) is not None]
        return min(heads, key=lambda load: (load.first, load.item)) if len(heads) > 1 else heads[0] if heads else None

    def _due(self, queue: _Queue, index: int) -> Interval | None:
        """Return a link's first load that may begin and is due at this stop.

        It is due if the copy would not be hidden any more when it began at the next stop.
        """
        loads, arriving, leaving = queue.loads, self._arriving, self._write_backs.done_s
        while queue.at < len(loads) and ((load := loads[queue.at]).first <= index or load in arriving):
            queue.at += 1
        for at in range(queue.at, len(loads)):
            load = loads[at]
            if load.floor > index or self._times[index + 1] <= load.begin_s:
                return None
            before = load.before
            if load not in arriving and (before is None or (before.last < index and before not in leaving)):
                if not load.moves:
                    continue  # it only takes its room: that can wait
                return load
        return None


def _set_ways(intervals: Iterable[Interval], items: Mapping[MovedId, Item], hardware: Hardware) -> None:
    """Set each interval's links and copy times: equal for all intervals of one `Item`."""
    ways: dict[tuple[int, int], tuple[Way, Way, bool]] = {}
    for interval in intervals:
        item, nbytes = items[interval.item], interval.nbytes
        key = id(item), nbytes
        if key not in ways:
            back = item.way_back.link, item.way_back.seconds(nbytes, hardware)
            home = item.way_home.link, item.way_home.seconds(nbytes, hardware)
            ways[key] = back, home, item.way_back.moved_nbytes(nbytes) > 0
        interval.way_back, interval.way_home, interval.moves = ways[key]
        if isinstance(interval.item, Chunk) and interval.item.kind == GRAD:
            interval.gradient_of = interval.item.group


def _occupied(intervals: Iterable[Interval], num_positions: int) -> list[int]:
    """Return the bytes in slots during each call."""
    changes = [0] * (num_positions + 1)
    for interval in intervals:
        changes[interval.start] += interval.nbytes
        changes[interval.end] -= interval.nbytes
    return list(accumulate(changes[:-1]))


def _bound(intervals: Iterable[Interval], barriers: Sequence[int], end: int) -> None:
    """Bound how far each interval may move: not past a barrier, nor into the item's next one."""
    previous: dict[MovedId, Interval] = {}
    for interval in intervals:
        passed = bisect_right(barriers, interval.first)
        interval.floor = barriers[passed - 1] if passed else 0
        passed = bisect_right(barriers, interval.last)
        interval.ceiling = barriers[passed] if passed < len(barriers) else end
        interval.before = previous.get(interval.item)
        if interval.before is not None:
            interval.before.ceiling = min(interval.before.ceiling, interval.first)
        previous[interval.item] = interval


def _clock(positions: Sequence[Position]) -> list[float]:
    """Return when each call starts if nothing is waited for, with one more entry for the end."""
    times = [0.0]
    for position in positions:
        times.append(times[-1] + position.cost_s)
    return times
