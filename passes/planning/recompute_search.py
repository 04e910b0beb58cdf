"""Choose the saved storages to recompute: regions of the forward, of which only values that later ones read are kept.

The forward's calls are cut into recompute regions. Values that one region reads of another are kept, and all other
results of its calls are dropped: when the backward comes to it, the region is recomputed from the kept values. Long
regions keep less and have more alive at once while the backward goes through one. Cuts fall where the forward itself
passes on the fewest bytes: between blocks, which so become equal regions.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from chunkc.passes.planning.recompute import Recomputable

EVERY = (1, 2, 3, 4, 6, 8, 12, 16, 24)
"""Step from one region's end to the next, over the places where few bytes are passed on."""

SLACK = 1.25
"""Factor on the fewest bytes passed on, up to which a place counts as having few."""


@dataclass(frozen=True)
class RecomputeRegions:
    """Regions of a forward that are recomputed one by one.

    Attributes:
        ends: the calls before which they end, in order, without the last one's end. Empty: all of it is one region.
        kept: storages that are kept though they cross no end.
    """

    ends: tuple[int, ...] = ()
    kept: frozenset[str] = frozenset()


def dropped_between(recomputable: Recomputable | None, regions: RecomputeRegions | None) -> frozenset[str]:
    """Return the storages that these regions drop: all that may be dropped, and cross no end. None: nothing."""
    if recomputable is None or regions is None:
        return frozenset()
    read, ends = recomputable.last_read, (*regions.ends, inf)
    crossing = {
        s for s, maker in recomputable.first_maker.items() if ends[bisect_right(regions.ends, maker)] <= read.get(s, -1)
    }
    return (recomputable.droppable | recomputable.inner) - crossing - regions.kept


def needed_before_region(recomputable: Recomputable, ends: Sequence[int]) -> frozenset[str]:
    """Return the storages that the backward reads before it comes to their region: a table that all layers read, say.

    If dropped, such a storage has its region recomputed that early, and all results of it alive until its turn.
    """
    saved = dropped_between(recomputable, RecomputeRegions(tuple(ends))) & recomputable.droppable
    by_region: dict[int, list[str]] = {}
    for storage in saved:
        by_region.setdefault(bisect_right(ends, recomputable.first_maker[storage]), []).append(storage)
    needed: set[str] = set()
    turn = -1  # the backward call by which all later regions have been recomputed
    for _, storages in sorted(by_region.items(), reverse=True):
        needed |= {storage for storage in storages if recomputable.first_needed[storage] < turn}
        turn = max([turn, *(recomputable.first_needed[storage] for storage in storages)])
    return frozenset(needed)


def ways_to_cut(recomputable: Recomputable) -> Iterator[tuple[int, ...]]:
    """Yield ways to cut a forward, each as the calls before which a region ends; the shortest regions first."""
    passed = recomputable.passed_nbytes()
    yielded: set[tuple[int, ...]] = set()
    limits = sorted(nbytes for nbytes in passed if nbytes)
    for limit in (None, *(limits[len(limits) // 2 : len(limits) // 2 + 1]), *limits[:1]):
        places = [cut for cut, nbytes in enumerate(passed, 1) if limit is None or nbytes <= limit * SLACK]
        for step in EVERY if limit is not None else (1,):
            cuts = tuple(places[::-step][::-1])
            if cuts and cuts not in yielded:
                yielded.add(cuts)
                yield cuts


def leanest(
    recomputable: Recomputable | None, needs: Callable[[frozenset[str]], int], *, is_part: bool = False
) -> RecomputeRegions | None:
    """Choose the regions with which a step needs the least; None: nothing can be recomputed.

    Args:
        needs: bytes that a step needs if these storages are dropped.
        is_part: other graphs run between the forward and its backward, so that it may be one region, too.
    """
    if recomputable is None:
        return None
    ways: dict[frozenset[str], RecomputeRegions] = {}
    for ends in (*([()] if is_part else []), *reversed(list(ways_to_cut(recomputable)))):
        for kept in (needed_before_region(recomputable, ends), frozenset[str]()):
            regions = RecomputeRegions(ends, kept)
            ways[dropped_between(recomputable, regions)] = regions
    nbytes = {regions: needs(dropped) for dropped, regions in ways.items() if recomputable.without(dropped).saved}
    return min(nbytes, key=lambda regions: (nbytes[regions], -len(regions.ends), len(regions.kept)), default=None)
