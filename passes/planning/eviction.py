"""Choose which items to evict and when, and emit the plan's events.

The future is known. If room is short, the item is evicted that costs the fewest seconds to bring back for each byte and
each call that it is away: least seconds / (bytes x calls to its next use). Of items that cost alike per byte (one link,
no latency) this is the one with the furthest next use, which is optimal for items of one size (Belady 1966;
PatrickStar, arXiv:2108.05818). With different sizes no such rule is: items evicted first stay after all if those
evicted later have made room enough. On random small instances with two rates, latencies and sizes from 1 to 9 this took
0.4 % more seconds than the best schedule, and furthest next use alone 1.3 %.

Capacity changes from call to call: it is the budget minus residents and non-model data. First the residency intervals
are chosen; then copies are placed against the clock (`planning.copy_scheduling`). Every link has its own queue.
Offloaded storages (`planning.offload`) queue there with the chunks.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from chunkc.ir.hardware import Hardware
from chunkc.ir.items import Item, MovedId
from chunkc.ir.layout import Chunk
from chunkc.ir.plan import EVICT, PREFETCH, WAIT, WRITE_BACK, Event, Position
from chunkc.passes.planning.copy_scheduling import Interval, schedule_copies

NEVER = sys.maxsize
"""Next use of an item that is not used again."""


@dataclass(frozen=True)
class Schedule:
    """Slot residency of every item.

    Attributes:
        occupancy: slot bytes during each call.
        seconds: of the calls, with their waits.
    """

    intervals: Sequence[Interval]
    items: Mapping[MovedId, Item]
    occupancy: tuple[int, ...]
    seconds: float

    def stops(self) -> tuple[tuple[Event, ...], ...]:
        """Return the events before each call, with one more entry than calls."""
        return _emit(self.intervals, len(self.occupancy), self.items)


def schedule(
    positions: Sequence[Position],
    items: Mapping[MovedId, Item],
    capacity: Sequence[int],
    hardware: Hardware,
    barriers: Sequence[int] = (),
    saved: Sequence[Interval] = (),
    consumed: Collection[Chunk] = (),
    most_s: float = math.inf,
) -> Schedule:
    """Schedule the slots of all items.

    Args:
        positions: the calls, in order, with the items each needs.
        items: every item that the calls need, and every saved one.
        capacity: bytes for slots at each call; at least what the call itself needs.
        barriers: indices of calls before which no copy for a later call may start (a new phase begins there).
        saved: intervals of saved storages around their copies.
        consumed: items without a reader after their last use, so that they are not written back then.

    Raises:
        TooSlow: the calls take more than `most_s`.
    """
    intervals = residency(positions, items, capacity, hardware)
    last = {interval.item: interval for interval in intervals if interval.item in consumed}
    for interval in last.values():
        interval.dirty = False
    if saved:
        intervals = sorted([*intervals, *saved], key=lambda interval: (interval.first, str(interval.item)))
    scheduler = schedule_copies(intervals, positions, items, capacity, hardware, barriers, most_s)
    return Schedule(intervals, items, tuple(scheduler.occupancy), scheduler.clock.now)


def residency(
    positions: Sequence[Position], items: Mapping[MovedId, Item], capacity: Sequence[int], hardware: Hardware
) -> list[Interval]:
    """Choose residency intervals, each from the first to the last use that it serves, ordered by first use and name.

    See the module for the eviction rule. Items are numbers here, in order of their names.
    """
    names = sorted({name for position in positions for name in position.items}, key=str)
    number = {name: at for at, name in enumerate(names)}
    nbytes = [items[name].nbytes for name in names]
    uses: list[list[int]] = [[] for _ in names]
    needs = [sorted(map(number.__getitem__, position.items)) for position in positions]
    for index, needed in enumerate(needs):
        for item in needed:
            uses[item].append(index)
    for indices in uses:
        indices.append(NEVER)
        indices.reverse()  # the next use is the last entry
    distinct = {id(item): item for item in items.values()}  # few: equal items are one object
    price_s = {key: _price_s(item, hardware) for key, item in distinct.items()}
    evictable = _EvictionQueue([price_s[id(items[name])] for name in names], uses)
    present: dict[int, Interval] = {}
    closed: list[tuple[int, int, Interval]] = []
    occupied = 0
    for index, (position, needed) in enumerate(zip(positions, needs, strict=True)):
        for item in needed:
            uses[item].pop()
            if item not in present:
                occupied += nbytes[item]
        evicted: list[int] = []
        while occupied > capacity[index] and (first := evictable.next(index, present)) is not None:
            evicted.append(first)
            occupied -= nbytes[first]
        assert occupied <= capacity[index], f"{position.name} needs {occupied} bytes of {capacity[index]}"
        for item in reversed(evicted):
            if occupied + nbytes[item] <= capacity[index]:  # later evictions have made the room
                occupied += nbytes[item]
                evictable.add(item)
            else:
                interval = present.pop(item)
                closed.append((interval.first, item, interval))
        for item in needed:
            name = names[item]
            if item not in present:
                present[item] = Interval(name, nbytes[item], index, index, False, index, index + 1)
            interval = present[item]
            interval.last, interval.end = index, index + 1
            interval.dirty |= name in position.writes
            evictable.add(item)
    closed += [(interval.first, item, interval) for item, interval in present.items()]
    return [interval for *_, interval in sorted(closed, key=itemgetter(0, 1))]


class _EvictionQueue:
    """Present items in the order of their eviction, at any call.

    Among items of one price per byte this is the order of next uses, at every call alike: a heap for each price.

    Args:
        prices: of each item, the seconds that bring a byte of it back.
        uses: of each item, the calls that need it after the current one, the next one last.
    """

    def __init__(self, prices: Sequence[float], uses: Sequence[Sequence[int]]) -> None:
        self._uses, self._prices = uses, prices
        # Entries are (-next use, -item); an entry of a former use is stale.
        self._heaps: dict[float, list[tuple[int, int]]] = {price: [] for price in prices}

    def add(self, item: int) -> None:
        """Make the item evictable until its next use."""
        heapq.heappush(self._heaps[self._prices[item]], (-self._uses[item][-1], -item))

    def next(self, index: int, present: Container[int]) -> int | None:
        """Take out the first item to evict at a call, of those that are present and not needed by it; None: none."""
        first: tuple[float, int, float] | None = None
        for price, heap in self._heaps.items():
            while heap and not (-heap[0][1] in present and self._uses[-heap[0][1]][-1] == -heap[0][0]):
                heapq.heappop(heap)
            if heap:
                first = min(first or (math.inf, 0, price), (price / (-heap[0][0] - index), heap[0][1], price))
        return None if first is None else -heapq.heappop(self._heaps[first[2]])[1]


def _price_s(item: Item, hardware: Hardware) -> float:
    """Return the seconds that bring a byte of the item back, to as many digits as rates of one link agree to."""
    seconds = item.way_back.seconds(item.nbytes, hardware) / item.nbytes if item.nbytes else 0.0
    return float(f"{seconds:.9g}")


def _emit(
    intervals: Sequence[Interval], num_positions: int, items: Mapping[MovedId, Item]
) -> tuple[tuple[Event, ...], ...]:
    """Turn intervals into events: at each stop write-backs first, then evictions, then prefetches, then waits."""
    write_backs: list[list[Event]] = [[] for _ in range(num_positions + 1)]
    evictions: list[list[Event]] = [[] for _ in range(num_positions + 1)]
    prefetches: list[list[Event]] = [[] for _ in range(num_positions + 1)]
    waits: list[list[Event]] = [[] for _ in range(num_positions + 1)]
    for interval in intervals:
        moved, item = interval.item, items[interval.item]
        nbytes, back, home = item.nbytes, item.way_back.link, item.way_home.link
        inward, outward = (way.moved_nbytes(nbytes) for way in (item.way_back, item.way_home))
        if interval.loads:
            prefetches[interval.start].append(Event(PREFETCH, moved, inward, back))
            waits[interval.first].append(Event(WAIT, moved, inward, back))
        if interval.dirty:
            write_backs[interval.last + 1].append(Event(WRITE_BACK, moved, outward, home))
            evictions[interval.end].append(Event(WAIT, moved, outward, home))
        if interval.end > interval.first:  # else the calls hold a saved storage that is back
            evictions[interval.end].append(Event(EVICT, moved, nbytes))
    return tuple((*w, *e, *p, *r) for w, e, p, r in zip(write_backs, evictions, prefetches, waits))
