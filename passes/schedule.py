"""When items move: who leaves, and prefetch and write-back placed against the links.

The future is known. Where room is short, that item leaves which costs the fewest seconds to bring back for each byte
and each call that it is away: least seconds / (bytes x calls to its next use). Of items that cost alike per byte (one
link, no latency) this is the one whose next use is furthest away, which is optimal for items of one size (Belady 1966;
PatrickStar, arXiv:2108.05818). With sizes that differ, no such rule is: items that left first stay after all where
those that left later have made room enough. On random small instances with two rates, latencies and sizes from 1 to 9
this took 0.4 % more seconds than the best schedule, and furthest next use alone 1.3 %.

Capacity changes from call to call: it is what the budget leaves beside residents and non-model data. First the
residency intervals are found; then each load starts as late as hides its copy, if the calls before have room for it,
and each write-back keeps its slot until it is hidden, likewise. Every link has its own queue. Saved storages that go
home between the phases (`passes.activations`) queue there with the chunks.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chunkc.ir.hardware import Hardware
from chunkc.ir.items import Item, ItemId, MovedId, SavedStorage
from chunkc.ir.plan import (
    ARRIVE,
    EVICT,
    LEAVE,
    OFFLOAD,
    PREFETCH,
    RELOAD,
    WAIT,
    WRITE_BACK,
    Event,
    Position,
)

NEVER = sys.maxsize
"""The next use of an item that is not used again."""


@dataclass
class Interval:
    """An item in a slot: its slot is held during calls `start` to `end - 1`, its data used from `first` to `last`.

    `floor` and `ceiling` bound how far `start` and `end` may move; at `begin_s` the load should begin, on the
    estimated clock. Without `loads` the item was made where it is. Of a saved storage, the room is counted with the
    calls that hold it, and here only before and after them.
    """

    item: MovedId
    first: int
    last: int
    dirty: bool
    start: int
    end: int
    floor: int = 0
    ceiling: int = 0
    begin_s: float = 0.0
    loads: bool = True


def required_nbytes(position: Position, sizes: Mapping[Any, int]) -> int:
    """Slots that a call cannot do without."""
    return sum(sizes[chunk] for chunk in position.items)


def schedule(
    positions: Sequence[Position],
    items: Mapping[MovedId, Item],
    capacity: Sequence[int],
    hardware: Hardware,
    barriers: Sequence[int] = (),
    saved: Sequence[Interval] = (),
    used_up: Collection[ItemId] = (),
) -> tuple[tuple[tuple[Event, ...], ...], tuple[int, ...]]:
    """Events before each call (one entry more than calls), and slot bytes during each call.

    Args:
        positions: the calls, in order, with the items each needs.
        items: every item that the calls need, and every saved one.
        capacity: bytes for slots at each call; at least what the call itself needs.
        barriers: indices of calls before which no copy for a later call may start (a new phase begins there).
        saved: intervals of saved storages around their copies.
        used_up: items that nobody needs after their last use, so that they are not written back then.
    """
    sizes = {name: item.nbytes for name, item in items.items()}
    assert all(required_nbytes(p, sizes) <= c for p, c in zip(positions, capacity))
    intervals = residency(positions, items, capacity, hardware)
    for interval in {interval.item: interval for interval in intervals if interval.item in used_up}.values():
        interval.dirty = False  # the last one of its item
    intervals = sorted([*intervals, *saved], key=lambda interval: (interval.first, interval.item))
    occupancy = [0] * len(positions)
    for interval in intervals:
        for index in range(interval.start, interval.end):
            occupancy[index] += sizes[interval.item]
    _advance_loads(intervals, positions, items, capacity, occupancy, hardware, barriers)
    _delay_evictions(intervals, positions, items, capacity, occupancy, hardware, barriers)
    return _emit(intervals, len(positions), items), tuple(occupancy)


def residency(
    positions: Sequence[Position], items: Mapping[MovedId, Item], capacity: Sequence[int], hardware: Hardware
) -> list[Interval]:
    """Residency intervals, each from the first to the last use that it serves; see the module for who leaves."""
    uses: dict[ItemId, list[int]] = {}
    for index, position in enumerate(positions):
        for name in position.items:
            uses.setdefault(name, []).append(index)
    for indices in uses.values():
        indices.append(NEVER)
        indices.reverse()  # the next use is the last entry
    waiting = _Leaving(items, uses, hardware)
    present: dict[ItemId, Interval] = {}
    closed: list[Interval] = []
    occupied = 0
    for index, position in enumerate(positions):
        occupied += sum(items[name].nbytes for name in position.items if name not in present)
        leaving: list[ItemId] = []
        while occupied > capacity[index] and (first := waiting.next(index, present, position.items)) is not None:
            leaving.append(first)
            occupied -= items[first].nbytes
        for name in reversed(leaving):
            if occupied + items[name].nbytes <= capacity[index]:  # those that left after it have made the room
                occupied += items[name].nbytes
                waiting.add(name)
            else:
                closed.append(present.pop(name))
        for name in sorted(position.items):
            interval = present.setdefault(name, Interval(name, index, index, False, index, index + 1))
            interval.last, interval.end = index, index + 1
            interval.dirty |= name in position.writes
            uses[name].pop()
            waiting.add(name)
    return sorted([*closed, *present.values()], key=lambda interval: (interval.first, interval.item))


class _Leaving:
    """Items in the order in which they leave, at whatever call it is asked for.

    Among items of one price per byte this is the order of next uses, at every call alike: a heap for each price.

    Args:
        uses: of each item, the calls that still need it, the next one last.
    """

    def __init__(self, items: Mapping[MovedId, Item], uses: Mapping[ItemId, Sequence[int]], hardware: Hardware) -> None:
        self._uses = uses
        self._rank = {name: number for number, name in enumerate(sorted(uses))}
        self._price = {name: _price_s(items[name], hardware) for name in uses}
        # Of (-next use, -rank, item); an entry of a former use is stale.
        self._heaps: dict[float, list[tuple[int, int, ItemId]]] = {price: [] for price in self._price.values()}

    def add(self, name: ItemId) -> None:
        """The item may leave until its next use."""
        heapq.heappush(self._heaps[self._price[name]], (-self._uses[name][-1], -self._rank[name], name))

    def next(self, index: int, present: Container[ItemId], needed: Container[ItemId]) -> ItemId | None:
        """Take out the item that leaves first at a call, of those that are present and not needed by it; None: none."""
        found: tuple[float, int, float] | None = None
        for price, heap in self._heaps.items():
            while heap and not self._may_leave(heap[0], present, needed):
                heapq.heappop(heap)
            if heap:
                found = min(found or (math.inf, 0, price), (price / (-heap[0][0] - index), heap[0][1], price))
        return None if found is None else heapq.heappop(self._heaps[found[2]])[2]

    def _may_leave(self, entry: tuple[int, int, ItemId], present: Container[ItemId], needed: Container[ItemId]) -> bool:
        name = entry[2]
        return name in present and name not in needed and self._uses[name][-1] == -entry[0]


def _price_s(item: Item, hardware: Hardware) -> float:
    """Seconds that it takes to bring a byte of the item back, to as many digits as rates of one link agree to."""
    seconds = item.way_back.seconds(item.nbytes, hardware) / item.nbytes if item.nbytes else 0.0
    return float(f"{seconds:.9g}")


def _clock(positions: Sequence[Position]) -> list[float]:
    """Estimated time at which each call starts; one more entry for the end."""
    times = [0.0]
    for position in positions:
        times.append(times[-1] + position.cost_s)
    return times


def _advance_loads(
    intervals: Sequence[Interval],
    positions: Sequence[Position],
    items: Mapping[MovedId, Item],
    capacity: Sequence[int],
    occupancy: list[int],
    hardware: Hardware,
    barriers: Sequence[int],
) -> None:
    """Start each load as late as hides its copy behind arithmetic, as far as there is room.

    Backwards in time, each link's queue gives the moment each copy should begin; then room is given out in the order of
    need, so that what is needed next comes first when a link is the bottleneck.
    """
    times = _clock(positions)
    previous_end: dict[MovedId, int] = {}
    for interval in intervals:
        earliest = max((b for b in barriers if b <= interval.first), default=0)
        interval.floor = max(earliest, previous_end.get(interval.item, 0))
        previous_end[interval.item] = interval.end
    link_free: dict[str, float] = {}
    in_order = sorted((i for i in intervals if i.loads), key=lambda i: (i.first, i.item))
    for interval in reversed(in_order):
        item = items[interval.item]
        way = item.way_back
        finish = min(times[interval.first], link_free.get(way.link, math.inf))
        interval.begin_s = link_free[way.link] = finish - way.seconds(item.nbytes, hardware)
    for interval in in_order:
        nbytes = items[interval.item].nbytes
        while (
            interval.start > interval.floor
            and times[interval.start] > interval.begin_s
            and occupancy[interval.start - 1] + nbytes <= capacity[interval.start - 1]
        ):
            interval.start -= 1
            occupancy[interval.start] += nbytes


def _delay_evictions(
    intervals: Sequence[Interval],
    positions: Sequence[Position],
    items: Mapping[MovedId, Item],
    capacity: Sequence[int],
    occupancy: list[int],
    hardware: Hardware,
    barriers: Sequence[int],
) -> None:
    """Keep a dirty item's slot until its write-back is hidden, as far as there is room."""
    times = _clock(positions)
    next_start: dict[MovedId, int] = {}
    for interval in reversed(intervals):
        latest = min((b for b in barriers if b > interval.last), default=len(positions))
        interval.ceiling = min(latest, next_start.get(interval.item, len(positions)))
        next_start[interval.item] = interval.start
    link_free: dict[str, float] = {}
    for interval in sorted(intervals, key=lambda i: (i.last, i.item)):
        if not interval.dirty:
            continue
        item = items[interval.item]
        way = item.way_home
        begin = max(times[interval.last + 1], link_free.get(way.link, 0.0))
        end = link_free[way.link] = begin + way.seconds(item.nbytes, hardware)
        while (
            interval.end < interval.ceiling
            and times[interval.end] < end
            and occupancy[interval.end] + item.nbytes <= capacity[interval.end]
        ):
            occupancy[interval.end] += item.nbytes
            interval.end += 1


def _emit(
    intervals: Sequence[Interval], num_positions: int, items: Mapping[MovedId, Item]
) -> tuple[tuple[Event, ...], ...]:
    """Intervals as events: at each stop write-backs first, then slots given back, then taken, then waited for."""
    write_backs: list[list[Event]] = [[] for _ in range(num_positions + 1)]
    evictions: list[list[Event]] = [[] for _ in range(num_positions + 1)]
    prefetches: list[list[Event]] = [[] for _ in range(num_positions + 1)]
    waits: list[list[Event]] = [[] for _ in range(num_positions + 1)]
    for interval in intervals:
        chunk, item = interval.item, items[interval.item]
        nbytes, back, home = item.nbytes, item.way_back.link, item.way_home.link
        if isinstance(chunk, SavedStorage):
            if interval.loads:
                prefetches[interval.start].append(Event(RELOAD, chunk, nbytes, back))
                waits[interval.first].append(Event(ARRIVE, chunk, nbytes, back))
            else:
                write_backs[interval.last + 1].append(Event(OFFLOAD, chunk, nbytes, home))
                evictions[interval.end].append(Event(LEAVE, chunk, nbytes, home))
            continue
        inward, outward = (way.moved_nbytes(nbytes) for way in (item.way_back, item.way_home))
        prefetches[interval.start].append(Event(PREFETCH, chunk, inward, back))
        waits[interval.first].append(Event(WAIT, chunk, inward, back))
        if interval.dirty:
            write_backs[interval.last + 1].append(Event(WRITE_BACK, chunk, outward, home))
            evictions[interval.end].append(Event(WAIT, chunk, outward, home))
        evictions[interval.end].append(Event(EVICT, chunk, nbytes))
    return tuple((*w, *e, *p, *r) for w, e, p, r in zip(write_backs, evictions, prefetches, waits))
