"""Which saved storages a backward makes again: stretches of the forward, of which only what later ones read is kept.

The forward's calls are cut into stretches. What one stretch reads of another is kept, and all else that its calls make
is dropped: when the backward comes to it, the stretch runs again from what is kept. Long stretches keep less and have
more alive at once while the backward goes through one. Cuts fall where the forward itself passes on the fewest bytes:
between blocks, which so fall into like stretches.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from chunkc.passes.planning.recompute import Recomputable

EVERY = (1, 2, 3, 4, 6, 8, 12, 16, 24)
"""Of the places where few bytes are passed on, stretches end at each one, at every second, and so on."""

SLACK = 1.25
"""How much more than the fewest bytes are few."""


@dataclass(frozen=True)
class RecomputeRegions:
    """Parts of a forward that run again one by one.

    Attributes:
        ends: the calls before which they end, in order, but for the last one's end. Empty: all of it is one stretch.
        kept: what stays though it crosses no end.
    """

    ends: tuple[int, ...] = ()
    kept: frozenset[str] = frozenset()


def dropped_between(known: Recomputable | None, recompute_regions: RecomputeRegions | None) -> frozenset[str]:
    """What is dropped by these stretches: all that may be, and crosses no end. None: nothing."""
    if known is None or recompute_regions is None:
        return frozenset()
    read, ends = known.last_read, (*recompute_regions.ends, inf)
    crossing = {
        s
        for s, made in known.first_maker.items()
        if ends[bisect_right(recompute_regions.ends, made)] <= read.get(s, -1)
    }
    return (known.droppable | known.inner) - crossing - recompute_regions.kept


def needed_before_region(known: Recomputable, ends: Sequence[int]) -> frozenset[str]:
    """What the backward reads before it comes to the stretch that makes it: a table that all layers read, say.

    Dropped, it has its stretch run again that early, and all that this makes alive until its turn.
    """
    gone = dropped_between(known, RecomputeRegions(tuple(ends))) & known.droppable
    by_region: dict[int, list[str]] = {}
    for storage in gone:
        by_region.setdefault(bisect_right(ends, known.first_maker[storage]), []).append(storage)
    found: set[str] = set()
    turn = -1  # when what later stretches make has been asked for
    for _, storages in sorted(by_region.items(), reverse=True):
        early = {storage for storage in storages if known.first_needed[storage] < turn}
        found |= early
        turn = max([turn, *(known.first_needed[storage] for storage in storages)])
    return frozenset(found)


def ways_to_cut(known: Recomputable) -> Iterator[tuple[int, ...]]:
    """Ways to cut a forward, each as the calls before which a stretch ends; the shortest stretches first."""
    passed = known.passed_nbytes()
    seen: set[tuple[int, ...]] = set()
    limits = sorted(nbytes for nbytes in passed if nbytes)
    for limit in (None, *(limits[len(limits) // 2 : len(limits) // 2 + 1]), *limits[:1]):
        places = [cut for cut, nbytes in enumerate(passed, 1) if limit is None or nbytes <= limit * SLACK]
        for step in EVERY if limit is not None else (1,):
            cuts = tuple(places[::-step][::-1])
            if cuts and cuts not in seen:
                seen.add(cuts)
                yield cuts


def leanest(
    known: Recomputable | None, needs: Callable[[frozenset[str]], int], *, is_part: bool = False
) -> RecomputeRegions | None:
    """Stretches with which a step needs the least; None: nothing can be made again.

    Args:
        needs: bytes that a step needs where these storages are dropped.
        is_part: other graphs run between the forward and its backward, so that it may be one stretch, too.
    """
    if known is None:
        return None
    ways: dict[frozenset[str], RecomputeRegions] = {}
    for ends in (*([()] if is_part else []), *reversed(list(ways_to_cut(known)))):
        for kept in (needed_before_region(known, ends), frozenset[str]()):
            way = RecomputeRegions(ends, kept)
            ways[dropped_between(known, way)] = way
    found = {way: needs(gone) for gone, way in ways.items() if known.without(gone).dropped}
    return min(found, key=lambda way: (found[way], -len(way.ends), len(way.kept)), default=None)
