"""Which saved storages a backward makes again: stretches of the forward, of which only what later ones read is kept.

The forward's calls are cut into stretches. What one stretch reads of another is kept, and all else that its calls make
is dropped: when the backward comes to it, the stretch runs again from what is kept. Long stretches keep less and have
more alive at once while the backward goes through one. Cuts fall where the forward itself passes on the fewest bytes:
between blocks, which so fall into like stretches.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from math import inf

from chunkc.passes.reruns import Repeatable

EVERY = (1, 2, 3, 4, 6, 8, 12, 16, 24)
"""Of the places where few bytes are passed on, stretches end at each one, at every second, and so on."""

SLACK = 1.25
"""How much more than the fewest bytes are few."""


def dropped_between(known: Repeatable, cuts: Sequence[int]) -> frozenset[str]:
    """What is dropped where stretches end before these calls, in order: all that may be and crosses no cut."""
    read, ends = known.last_read, (*cuts, inf)
    kept = {s for s, made in known.first_maker.items() if ends[bisect_right(cuts, made)] <= read.get(s, -1)}
    return (known.droppable | known.inner) - kept


def stretches(known: Repeatable) -> Iterator[tuple[int, ...]]:
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


def leanest_cuts(known: Repeatable | None, needs: Callable[[frozenset[str]], int]) -> tuple[int, ...]:
    """Where to cut so that a step needs the least; nowhere: nothing can be made again.

    Args:
        needs: bytes that a step needs where these storages are dropped.
    """
    if known is None:
        return ()
    ways = {dropped_between(known, cuts): cuts for cuts in reversed(list(stretches(known)))}
    found = {cuts: needs(gone) for gone, cuts in ways.items() if known.without(gone).dropped}
    return min(found, key=lambda cuts: (found[cuts], -len(cuts)), default=())


def up_to(known: Repeatable | None, cuts: Sequence[int], count: int | None = None) -> frozenset[str]:
    """What is dropped where the first `count` stretches between cuts run again, by default all."""
    if known is None or not cuts:
        return frozenset()
    gone = dropped_between(known, cuts)
    end = len(known.forward.calls) if count is None or count > len(cuts) else cuts[count - 1]
    return frozenset(storage for storage in gone if known.first_maker[storage] < end)
