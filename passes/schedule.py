"""When chunks move: eviction by furthest next use, prefetch and write-back placed against the links.

Chunks have one size and the future is known, so evicting the chunk whose next use is furthest away is optimal
(Belady 1966; PatrickStar, arXiv:2108.05818). Capacity changes from call to call: it is what the budget leaves
beside residents and non-model data. First the residency intervals are found; then each load starts as late as hides
its copy, if the calls before have room for it, and each write-back keeps its slot until it is hidden, likewise.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from chunkc.ir.hardware import Hardware
from chunkc.ir.plan import EVICT, PREFETCH, WAIT, WRITE_BACK, Event, Position

NEVER = sys.maxsize
"""The next use of a chunk that is not used again."""


@dataclass
class Interval:
    """A chunk in a slot: its slot is held during calls `start` to `end - 1`, its data used from `first` to `last`.

    `floor` and `ceiling` bound how far `start` and `end` may move; at `begin_s` the load should begin, on the
    estimated clock.
    """

    chunk: str
    first: int
    last: int
    dirty: bool
    start: int
    end: int
    floor: int = 0
    ceiling: int = 0
    begin_s: float = 0.0


def required_nbytes(position: Position, sizes: Mapping[str, int]) -> int:
    """Slots that a call cannot do without."""
    return sum(sizes[chunk] for chunk in position.chunks)


def schedule(
    positions: Sequence[Position],
    sizes: Mapping[str, int],
    capacity: Sequence[int],
    hardware: Hardware,
    barriers: Sequence[int] = (),
) -> tuple[tuple[tuple[Event, ...], ...], tuple[int, ...]]:
    """Events before each call (one entry more than calls), and slot bytes during each call.

    Args:
        positions: the calls, in order, with the chunks each needs.
        sizes: bytes of every chunk.
        capacity: bytes for slots at each call; at least what the call itself needs.
        barriers: indices of calls before which no copy for a later call may start (a new phase begins there).
    """
    assert all(required_nbytes(p, sizes) <= c for p, c in zip(positions, capacity))
    intervals = furthest_next_use(positions, sizes, capacity)
    occupancy = [0] * len(positions)
    for interval in intervals:
        for index in range(interval.start, interval.end):
            occupancy[index] += sizes[interval.chunk]
    _advance_loads(intervals, positions, sizes, capacity, occupancy, hardware, barriers)
    _delay_evictions(intervals, positions, sizes, capacity, occupancy, hardware, barriers)
    return _emit(intervals, len(positions), sizes), tuple(occupancy)


def furthest_next_use(
    positions: Sequence[Position], sizes: Mapping[str, int], capacity: Sequence[int]
) -> list[Interval]:
    """Residency intervals, each from the first to the last use that it serves."""
    uses: dict[str, list[int]] = {}
    for index, position in enumerate(positions):
        for chunk in position.chunks:
            uses.setdefault(chunk, []).append(index)
    for indices in uses.values():
        indices.append(NEVER)
        indices.reverse()  # the next use is the last entry
    rank = {chunk: number for number, chunk in enumerate(sorted(uses))}
    present: dict[str, Interval] = {}
    closed: list[Interval] = []
    furthest: list[tuple[int, int, str]] = []  # a heap of (-next use, -rank, chunk); an entry of a former use is stale
    occupied = 0
    for index, position in enumerate(positions):
        occupied += sum(sizes[chunk] for chunk in position.chunks if chunk not in present)
        while occupied > capacity[index] and furthest:
            next_use, _, chunk = heapq.heappop(furthest)
            if chunk in present and chunk not in position.chunks and uses[chunk][-1] == -next_use:
                closed.append(present.pop(chunk))
                occupied -= sizes[chunk]
        for chunk in sorted(position.chunks):
            interval = present.setdefault(chunk, Interval(chunk, index, index, False, index, index + 1))
            interval.last, interval.end = index, index + 1
            interval.dirty |= chunk in position.writes
            uses[chunk].pop()
            heapq.heappush(furthest, (-uses[chunk][-1], -rank[chunk], chunk))
    return sorted([*closed, *present.values()], key=lambda interval: (interval.first, interval.chunk))


def _clock(positions: Sequence[Position]) -> list[float]:
    """Estimated time at which each call starts; one more entry for the end."""
    times = [0.0]
    for position in positions:
        times.append(times[-1] + position.cost_s)
    return times


def _advance_loads(
    intervals: Sequence[Interval],
    positions: Sequence[Position],
    sizes: Mapping[str, int],
    capacity: Sequence[int],
    occupancy: list[int],
    hardware: Hardware,
    barriers: Sequence[int],
) -> None:
    """Start each load as late as hides its copy behind arithmetic, as far as there is room.

    Backwards in time, the link's queue gives the moment each copy should begin; then room is given out in the order of
    need, so that what is needed next comes first when the link is the bottleneck.
    """
    times = _clock(positions)
    previous_end: dict[str, int] = {}
    for interval in intervals:
        earliest = max((b for b in barriers if b <= interval.first), default=0)
        interval.floor = max(earliest, previous_end.get(interval.chunk, 0))
        previous_end[interval.chunk] = interval.end
    link_free = math.inf
    in_order = sorted(intervals, key=lambda i: (i.first, i.chunk))
    for interval in reversed(in_order):
        finish = min(times[interval.first], link_free)
        interval.begin_s = link_free = finish - sizes[interval.chunk] / hardware.to_device_bytes_per_s
    for interval in in_order:
        while (
            interval.start > interval.floor
            and times[interval.start] > interval.begin_s
            and occupancy[interval.start - 1] + sizes[interval.chunk] <= capacity[interval.start - 1]
        ):
            interval.start -= 1
            occupancy[interval.start] += sizes[interval.chunk]


def _delay_evictions(
    intervals: Sequence[Interval],
    positions: Sequence[Position],
    sizes: Mapping[str, int],
    capacity: Sequence[int],
    occupancy: list[int],
    hardware: Hardware,
    barriers: Sequence[int],
) -> None:
    """Keep a dirty chunk's slot until its write-back is hidden, as far as there is room."""
    times = _clock(positions)
    next_start: dict[str, int] = {}
    for interval in reversed(intervals):
        latest = min((b for b in barriers if b > interval.last), default=len(positions))
        interval.ceiling = min(latest, next_start.get(interval.chunk, len(positions)))
        next_start[interval.chunk] = interval.start
    link_free = 0.0
    for interval in sorted(intervals, key=lambda i: (i.last, i.chunk)):
        if not interval.dirty:
            continue
        begin = max(times[interval.last + 1], link_free)
        link_free = begin + sizes[interval.chunk] / hardware.to_home_bytes_per_s
        while (
            interval.end < interval.ceiling
            and times[interval.end] < link_free
            and occupancy[interval.end] + sizes[interval.chunk] <= capacity[interval.end]
        ):
            occupancy[interval.end] += sizes[interval.chunk]
            interval.end += 1


def _emit(intervals: Sequence[Interval], num_positions: int, sizes: Mapping[str, int]) -> tuple[tuple[Event, ...], ...]:
    """Intervals as events: at each stop write-backs first, then slots given back, then taken, then waited for."""
    write_backs: list[list[Event]] = [[] for _ in range(num_positions + 1)]
    evictions: list[list[Event]] = [[] for _ in range(num_positions + 1)]
    prefetches: list[list[Event]] = [[] for _ in range(num_positions + 1)]
    waits: list[list[Event]] = [[] for _ in range(num_positions + 1)]
    for interval in intervals:
        chunk, nbytes = interval.chunk, sizes[interval.chunk]
        prefetches[interval.start].append(Event(PREFETCH, chunk, nbytes))
        waits[interval.first].append(Event(WAIT, chunk, nbytes))
        if interval.dirty:
            write_backs[interval.last + 1].append(Event(WRITE_BACK, chunk, nbytes))
            evictions[interval.end].append(Event(WAIT, chunk, nbytes))
        evictions[interval.end].append(Event(EVICT, chunk, nbytes))
    return tuple((*w, *e, *p, *r) for w, e, p, r in zip(write_backs, evictions, prefetches, waits))
