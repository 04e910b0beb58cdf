"""What of the values that a forward saves is absent until its backward: the choices that there are, for the policy."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from chunkc.ir.errors import BudgetError
from chunkc.ir.hardware import Hardware
from chunkc.ir.items import KEEP_ALL, ActivationPlan
from chunkc.ir.layout import ChunkLayout
from chunkc.options import Activations
from chunkc.passes.planning.recompute_search import RecomputeRegions, dropped_between, leanest
from chunkc.passes.planning.residency import (
    SLACK_CHUNKS,
    choose_offloaded,
    chunk_sizes,
    evenly_spread,
    fixed_nbytes,
    needed_nbytes,
)
from chunkc.policy.captured_step import Captured, profile
from chunkc.policy.first_fit import first_that_fits
from chunkc.policy.host_memory import HostFull, check_copies
from chunkc.policy.step_seconds import update_arithmetic_s


def leanest_activation_plan(captured: Captured, activations: Activations, layout: ChunkLayout) -> ActivationPlan:
    """What is absent where a graph needs the least."""
    if activations == "keep":
        return KEEP_ALL
    if activations == "offload":
        return _all_copied(captured)
    again = _all_again(captured, layout)
    if activations == "rerun":
        return again
    ways = (_all_copied(captured), again, _all_copied(captured, again.recomputed))
    return min(ways, key=lambda activation_plan: _needed_nbytes(captured, activation_plan, layout))


def leanest_form(captured: Captured, activations: Activations, layout: ChunkLayout) -> Captured:
    """The same graph where it needs the least."""
    return captured.following(leanest_activation_plan(captured, activations, layout))


def activation_plans(captured: Captured, activations: Activations, layout: ChunkLayout) -> tuple[ActivationPlan, ...]:
    """What may be absent whatever the budget is, in the order in which it is tried; `quickest` finds all between.

    Under "auto" the last one copies nothing: the host may have no room for copies.
    """
    least = leanest_activation_plan(captured, activations, layout)
    if activations == "auto":
        return tuple(dict.fromkeys((KEEP_ALL, least, _all_again(captured, layout))))
    return tuple(dict.fromkeys((KEEP_ALL, least) if activations == "keep" else (least,)))


# --- some values copied, some made again, and groups that stay in the room that this leaves ---


@dataclass(frozen=True)
class EarlierSearch:
    """The quickest way that a search has found of a graph, what it was asked, and which groups might stay in which
    room."""

    asked: tuple[object, ...]
    allowed: frozenset[int]
    room_nbytes: int
    absent: ActivationPlan
    seconds: float


class SearchSpace:
    """Ways in which a graph's values may be absent, by how many groups stay beside them and how many stretches of the
    forward run again; of the other values as many are copied home as it takes.

    Stretches that run again are spread evenly among those that do not, so that links and arithmetic are both busy all
    along. Values of the first stretches are absent first: they are away for longest, so that they take the fewest
    seconds for each byte and moment. Behind the last one that has to be absent nothing runs again.

    Args:
        allowed: groups that may stay.
        external_nbytes: of the budget, by others.
        hardware: its host's memory has the copies.
        consumed, with_shadow_copies: see `check_copies`.
    """

    def __init__(
        self,
        captured: Captured,
        layout: ChunkLayout,
        allowed: Collection[int],
        budget_nbytes: int,
        external_nbytes: int,
        hardware: Hardware,
        *,
        consumed: Collection[int] = (),
        with_shadow_copies: bool = False,
    ) -> None:
        self._captured, self._layout, self._budget_nbytes = captured, layout, budget_nbytes - external_nbytes
        self._allowed, self._recompute_regions = evenly_spread(allowed), _recompute_regions(captured, layout)
        self._hardware, self._whole_budget_nbytes = hardware, budget_nbytes
        self._consumed, self._with_shadow_copies = consumed, with_shadow_copies
        self._known_nbytes: dict[frozenset[int], int] = {}
        self.recompute_regions = 0 if self._recompute_regions is None else len(self._recompute_regions.ends) + 1
        """The most that run again."""

    @cached_property
    def groups(self) -> tuple[int, int]:
        """The fewest and the most groups to ask for. With fewer nothing has to be absent either, and what has room
        stays anyway; beside more there is no room whatever is absent."""
        kept = profile(self._captured, self._layout).passes
        slack = SLACK_CHUNKS * max(chunk_sizes(self._layout, kept).values(), default=0)
        most = self._most_beside(self._least_nbytes)
        fewest = self._most_beside(lambda resident: needed_nbytes(kept, self._layout, resident) + slack)
        return min(fewest, most), most

    @cached_property
    def enough_s(self) -> float:
        """A step that takes no longer is good enough: that of its arithmetic, where nothing runs twice, and `MORE` of
        it."""
        captured, layout = self._captured, self._layout
        calls_s = sum(position.cost_s for position in profile(captured, layout).passes)
        return MORE * (calls_s + update_arithmetic_s(layout, layout.groups_of(captured.trained), self._hardware))

    @cached_property
    def may_keep(self) -> bool:
        """Whether values may stay. Those of a part of a model may where those of the other parts could, too: these come
        later, and find what has stayed in their way."""
        kept = profile(self._captured, self._layout).passes
        needed = fixed_nbytes(self._layout, frozenset()) + needed_nbytes(kept, self._layout)
        return (
            self._captured.graph_fraction == 1
            or needed + self._captured.other_graphs_nbytes <= self._whole_budget_nbytes
        )

    def _most_beside(self, needed: Callable[[frozenset[int]], int]) -> int:
        """How many groups may stay where the graph needs that beside them."""

        def missing(staying: int) -> int:
            resident = frozenset(self._allowed[:staying])
            return fixed_nbytes(self._layout, resident) + needed(resident) - self._budget_nbytes

        return max(0, bisect_right(range(len(self._allowed) + 1), 0, key=missing) - 1)

    def at(self, staying: int, recomputed: int) -> ActivationPlan:
        """What is absent where so many groups stay, evenly spread, and so many stretches run again, if all have to.

        Where all do and the host has no room for the copies that are left to make, more stretches run again.
        """
        resident = frozenset(self._allowed[:staying])
        away = self._copied(self._captured, resident)
        if not recomputed:
            return ActivationPlan(away)
        end = 1 + max(map(self._recompute_region, away), default=-1)
        found = self._running_again(recomputed, end, resident)
        if recomputed < self.recompute_regions or self._has_room(found, resident):
            return found
        ends = range(end, self.recompute_regions)

        def has_room(end: int) -> bool:
            return self._has_room(self._running_again(recomputed, end, resident), resident)

        return self._running_again(recomputed, end + bisect_left(ends, True, key=has_room), resident)

    def _running_again(self, recomputed: int, end: int, resident: frozenset[int]) -> ActivationPlan:
        """What is absent where stretches before `end` run again."""
        again = self._spread(recomputed, end)
        return ActivationPlan(self._copied(self._captured.following(ActivationPlan(recomputed=again)), resident), again)

    def _has_room(self, absent: ActivationPlan, resident: frozenset[int]) -> bool:
        with suppress(HostFull):
            self.check_host(absent, resident)
            return True
        return False

    @property
    def found_before(self) -> EarlierSearch | None:
        """What was quickest of this graph where at least as much was possible: where it takes no longer now, nothing
        is quicker."""
        known: EarlierSearch | None = self._captured.__dict__.get("_found_before")
        room_nbytes = self._budget_nbytes
        is_no_less = known is not None and known.room_nbytes >= room_nbytes and known.allowed >= {*self._allowed}
        return known if known is not None and is_no_less and known.asked == self._asked else None

    def note(self, absent: ActivationPlan, seconds: float) -> None:
        """What is the quickest here."""
        found = EarlierSearch(self._asked, frozenset(self._allowed), self._budget_nbytes, absent, seconds)
        self._captured.__dict__["_found_before"] = found

    @property
    def _asked(self) -> tuple[object, ...]:
        layout, consumed = self._layout, frozenset(self._consumed)
        return (
            self._hardware,
            self._whole_budget_nbytes,
            len(layout.groups),
            layout.replicated_by_choice,
            consumed,
            self._with_shadow_copies,
        )

    def is_best(self, absent: ActivationPlan, resident: frozenset[int]) -> bool:
        """Whether nothing can be quicker: all that may stay does."""
        return not absent and resident == frozenset(self._allowed)

    def check_host(self, absent: ActivationPlan, resident: frozenset[int]) -> None:
        """Whether the host has room for the copies. Raises `HostFull` where it has not."""
        seen, sizes = self._captured.following(absent), (self._hardware, self._whole_budget_nbytes)
        check_copies(
            seen, self._layout, resident, *sizes, consumed=self._consumed, with_shadow_copies=self._with_shadow_copies
        )

    def _copied(self, lean: Captured, resident: frozenset[int]) -> frozenset[str]:
        """What goes home of a graph that drops some values."""
        kept, least_nbytes = profile(lean, self._layout), self._least_nbytes(resident)
        return choose_offloaded(lean.offloadable, kept, least_nbytes, self._layout, self._budget_nbytes, resident)

    def _least_nbytes(self, resident: frozenset[int]) -> int:
        """What the graph needs beside these residents where all goes home that may."""
        if resident not in self._known_nbytes:
            least = profile(self._captured.following(_all_copied(self._captured)), self._layout)
            self._known_nbytes[resident] = needed_nbytes(least.passes, self._layout, resident)
        return self._known_nbytes[resident]

    def _recompute_region(self, storage: str) -> int:
        """Which stretch makes it; what goes into the forward belongs to the first."""
        known = self._captured.repeatable
        assert known is not None
        assert self._recompute_regions is not None
        return bisect_right(self._recompute_regions.ends, known.first_maker.get(storage, 0))

    @cached_property
    def _gone(self) -> dict[int, list[str]]:
        """Stretch -> what is dropped where it runs again."""
        found: dict[int, list[str]] = {}
        for storage in dropped_between(self._captured.repeatable, self._recompute_regions):
            found.setdefault(self._recompute_region(storage), []).append(storage)
        return found

    def _spread(self, recomputed: int, end: int) -> frozenset[str]:
        """What is dropped where so many stretches run again, evenly spread, but none from `end` on."""
        count = self.recompute_regions
        chosen = (at for at in range(end) if (at + 1) * recomputed // count > at * recomputed // count)
        return frozenset(storage for at in chosen for storage in self._gone.get(at, ()))


Found = TypeVar("Found")


def first_or_quickest(
    ways: Sequence[ActivationPlan],
    mixes: SearchSpace | None,
    decided: Callable[[ActivationPlan], Found],
    seconds: Callable[[Found, float], float],
    resident: Callable[[Found], frozenset[int]],
) -> Found:
    """What follows from the first way that fits; with `mixes`, from the quickest of the ways and these.

    Args:
        ways: without any value absent comes first.
        seconds: of what follows, where they are no more than that many.
        resident: groups that stay there.

    Raises:
        BudgetError: see `first_that_fits`.
    """

    def checked(absent: ActivationPlan) -> Found:
        found = decided(absent)
        if mixes is not None:
            mixes.check_host(absent, resident(found))
        return found

    def timed(absent: ActivationPlan, most_s: float) -> tuple[float, tuple[ActivationPlan, Found]] | None:
        with suppress(BudgetError, HostFull):
            found = checked(absent)
            return seconds(found, most_s), (absent, found)
        return None

    may_keep = mixes is None or mixes.may_keep
    tried = ways if may_keep else tuple(filter(None, ways)) or ways
    try:
        absent, first = first_that_fits(tried, lambda way: (way, checked(way)))
    except BudgetError as error:
        if mixes is None or not error.elsewhere or (best := quickest(mixes, timed)) is None:
            raise
        return best[1][1]  # fewer copies, for which the host has room
    if mixes is None or not may_keep or not any(ways) or mixes.is_best(absent, resident(first)):
        return first
    if (known := mixes.found_before) is not None:
        again = timed(known.absent, most_s := known.seconds * BARELY_MORE)
        if again is not None and again[0] <= most_s:
            return again[1][1]
    best = quickest(mixes, timed)
    if best is None or best[0] > mixes.enough_s:
        others = [timed(way, math.inf if best is None else best[0] * BARELY_MORE) for way in ways]
        best = min((one for one in (*others, best) if one is not None), key=lambda one: one[0])
    mixes.note(best[1][0], best[0])
    return best[1][1]


COARSE, FINE = 2, 16
"""Into how many parts numbers of groups and of stretches are divided, at the beginning of a search and at its end; no
step is less than one of them."""


MORE = 1.005
"""A step that takes so many times the seconds of its arithmetic is as good as any: a search ends there. Seconds are not
known as well as that."""

BARELY_MORE = 1 + 1e-9
"""So much slower than the quickest so far is slower for sure, however sums were rounded: nobody asks how much. And only
a way that is so much quicker than another is quicker."""


def quickest(
    mixes: SearchSpace, timed: Callable[[ActivationPlan, float], tuple[float, Found] | None]
) -> tuple[float, Found] | None:
    """The way of least seconds that a search finds, with what `timed` says of it; None: none fits.

    From a few ways all over, steps are taken to whichever neighbour is quicker, each time none is with half the step:
    first among those where nothing runs again, then among all. One that is good enough ends the search.

    Args:
        timed: seconds of a way, with what comes of it; None: it does not fit. Where they are more than the number
            that it is given, `inf` will do.
    """
    best_s = math.inf
    places: dict[tuple[int, int], ActivationPlan] = {}
    found: dict[ActivationPlan, tuple[float, Found] | None] = {}

    def seconds(place: tuple[int, int]) -> float:
        nonlocal best_s
        absent = places[place] = places.get(place) or mixes.at(*place)
        if absent not in found:
            found[absent] = timed(absent, best_s * BARELY_MORE)
        this = found[absent]
        this_s = math.inf if this is None else this[0]
        best_s = min(best_s, this_s)
        return this_s

    (fewest, most), recompute_regions = mixes.groups, mixes.recompute_regions

    def downhill(at: tuple[int, int], directions: Sequence[tuple[int, int]]) -> tuple[int, int]:
        parts = 2 * COARSE
        while parts <= FINE and seconds(at) > mixes.enough_s:
            m, k = max(1, (most - fewest) // parts), max(1, recompute_regions // parts)
            around = [(at[0] + m * more, at[1] + k * again) for more, again in directions]
            near = min(
                [at, *(p for p in around if fewest <= p[0] <= most and 0 <= p[1] <= recompute_regions)], key=seconds
            )
            if seconds(near) * BARELY_MORE < seconds(at):
                at = near
            else:
                parts *= 2
        return at

    grid = _grid(fewest, most, recompute_regions)
    row = [place for place in grid if not place[1]]
    enough = (place for place in row if seconds(place) <= mixes.enough_s)
    once = downhill(next(enough, None) or min(row, key=seconds), [(1, 0), (-1, 0)])
    if seconds(once) <= mixes.enough_s:
        return found[places[once]]
    best = downhill(min(once, *grid, key=seconds), [(1, 0), (-1, 0), (0, 1), (0, -1)])
    return found[places[best]]


def _grid(fewest: int, most: int, recompute_regions: int) -> Sequence[tuple[int, int]]:
    """Places all over; first those beside which most stay: the fewer groups move the better."""
    parts = range(COARSE + 1)
    places = {(fewest + m * (most - fewest) // COARSE, k * recompute_regions // COARSE) for m in parts for k in parts}
    return sorted(places, key=lambda place: (place[1], -place[0]))


def _all_copied(captured: Captured, recomputed: frozenset[str] = frozenset()) -> ActivationPlan:
    return ActivationPlan(
        frozenset(one.storage for one in captured.following(ActivationPlan(recomputed=recomputed)).offloadable),
        recomputed,
    )


def _all_again(captured: Captured, layout: ChunkLayout) -> ActivationPlan:
    return ActivationPlan(recomputed=dropped_between(captured.repeatable, _recompute_regions(captured, layout)))


def _needed_nbytes(captured: Captured, activation_plan: ActivationPlan, layout: ChunkLayout) -> int:
    """Of the graph, beside what the other parts of its model hold if they do the same."""
    form = captured.following(activation_plan)
    return needed_nbytes(profile(form, layout).passes, layout) + form.other_graphs_nbytes


MOST_LAYOUTS = 4
"""Of so many of them a graph remembers its stretches: a search goes back and forth between two."""


def _recompute_regions(captured: Captured, layout: ChunkLayout) -> RecomputeRegions | None:
    """Stretches of the forward that run again, such that the graph needs the least."""
    known: list[tuple[ChunkLayout, RecomputeRegions | None]] = captured.__dict__.setdefault("_recompute_regions", [])
    for of, recompute_regions in known:
        if of == layout:
            return recompute_regions
    recompute_regions = leanest(
        captured.repeatable,
        lambda gone: _needed_nbytes(captured, ActivationPlan(recomputed=gone), layout),
        is_part=captured.graph_fraction < 1,
    )
    captured.__dict__["_recompute_regions"] = [*known[-MOST_LAYOUTS + 1 :], (layout, recompute_regions)]
    return recompute_regions
