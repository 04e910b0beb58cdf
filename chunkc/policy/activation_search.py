"""Choose which saved activations to offload or recompute: the leanest plan, or the quickest by a search."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TypeVar

from chunkc.ir.errors import BudgetError
from chunkc.ir.hardware import Hardware
from chunkc.ir.items import KEEP_ALL, ActivationPlan
from chunkc.ir.layout import ChunkLayout
from chunkc.options import Activations
from chunkc.passes.planning.recompute_search import RecomputeRegions, dropped_between, leanest
from chunkc.passes.planning.residency import choose_offloaded, evenly_spread
from chunkc.passes.planning.room import Room, tightest
from chunkc.policy.captured_step import Captured, EarlierSearch, profile
from chunkc.policy.first_fit import first_that_fits
from chunkc.policy.host_memory import HostFull, check_copies
from chunkc.policy.step_seconds import least_s


def leanest_activation_plan(captured: Captured, activations: Activations, layout: ChunkLayout) -> ActivationPlan:
    """Return the activation plan with which a graph needs the fewest bytes."""
    if activations == "keep":
        return KEEP_ALL
    if activations == "offload":
        return _offload_all(captured)
    recompute_all = _recompute_all(captured, layout)
    if activations == "rerun":
        return recompute_all
    plans = (_offload_all(captured), recompute_all, _offload_all(captured, recompute_all.recomputed))
    return min(plans, key=lambda activation_plan: _needed_nbytes(captured, activation_plan, layout))


def leanest_form(captured: Captured, activations: Activations, layout: ChunkLayout) -> Captured:
    """Return the graph with its leanest activation plan."""
    return captured.following(leanest_activation_plan(captured, activations, layout))


def activation_plans(captured: Captured, activations: Activations, layout: ChunkLayout) -> tuple[ActivationPlan, ...]:
    """Return the activation plans to try under any budget, in order; `quickest` searches between them.

    Under "auto" the last one offloads nothing: the host may have no room for copies.
    """
    least = leanest_activation_plan(captured, activations, layout)
    if activations == "auto":
        return tuple(dict.fromkeys((KEEP_ALL, least, _recompute_all(captured, layout))))
    return tuple(dict.fromkeys((KEEP_ALL, least) if activations == "keep" else (least,)))


def may_keep(captured: Captured, room: Room) -> bool:
    """Whether a graph may keep saved values while other graphs of its model are unknown.

    One of several may, if the others, which come later and have only the room that is left, could do the same.
    """
    if captured.graph_fraction == 1:
        return True
    needed_nbytes = room.minimum_nbytes(profile(captured, room.layout).passes)
    return needed_nbytes + captured.other_graphs_nbytes <= room.budget_nbytes


# --- some values offloaded, some recomputed, and residents in the room that this leaves ---


class SearchSpace:
    """A graph's activation plans by two numbers: resident groups, and recompute regions of the forward.

    Of the other values, as many are offloaded as have to be.

    Recomputed regions are spread evenly among the others, so that links and arithmetic are both busy throughout.
    Values of the first regions are offloaded or dropped first: they are away for longest, so that they take the fewest
    seconds for each byte and moment. After the last value that has to go nothing is recomputed.

    Args:
        allowed: groups that may be resident.
        room: without residents.
        hardware: its host's memory has the copies.
        consumed, shadow_copied: see `check_copies`.
        may_keep: whether the graph may keep saved values (see `may_keep`).
        num_stages: of an update in the optimizer's step.

    Attributes:
        recompute_regions: their number, the most that can be recomputed.
    """

    def __init__(
        self,
        captured: Captured,
        room: Room,
        allowed: Collection[int],
        hardware: Hardware,
        *,
        consumed: Collection[int] = (),
        shadow_copied: frozenset[int] = frozenset(),
        may_keep: bool = True,
        num_stages: int = 1,
    ) -> None:
        self.may_keep, self._num_stages = may_keep, num_stages
        self._captured, self._room, self._layout, self._hardware = captured, room, room.layout, hardware
        self._allowed, self._recompute_regions = evenly_spread(allowed), _recompute_regions(captured, room.layout)
        self._budget_nbytes = room.budget_nbytes - room.external_nbytes
        self._consumed, self._shadow_copied = consumed, shadow_copied
        self._least_nbytes_of: dict[frozenset[int], int] = {}
        self.recompute_regions = 0 if self._recompute_regions is None else len(self._recompute_regions.ends) + 1

    @cached_property
    def groups(self) -> tuple[int, int]:
        """The fewest and the most resident groups to ask for.

        With fewer than the first, nothing has to be offloaded or recomputed, and groups that fit stay anyway; more than
        the second never fit.
        """
        kept = tightest(profile(self._captured, self._layout).passes)
        most = self._most_resident(lambda room: self._least_nbytes(room) <= room.left_nbytes)
        fewest = self._most_resident(lambda room: room.with_slack(kept).fits(kept))
        return min(fewest, most), most

    @cached_property
    def enough_s(self) -> float:
        """Seconds of a step that is good enough: those of its arithmetic without recomputing, times `MORE`."""
        return MORE * least_s(self._captured, self._layout, self._hardware, self._num_stages)

    def _most_resident(self, fits: Callable[[Room], bool]) -> int:
        """Return how many groups can be resident, given whether the graph fits in a room."""

        def lacks(num_resident: int) -> bool:
            return not fits(self._room.keeping(frozenset(self._allowed[:num_resident])))

        return max(0, bisect_left(range(len(self._allowed) + 1), True, key=lacks) - 1)

    def at(self, num_resident: int, num_recomputed: int) -> ActivationPlan:
        """Return the activation plan for so many resident groups and recomputed regions, both evenly spread.

        If all regions are recomputed and the host cannot hold the remaining copies, recompute past the last value that
        has to go.
        """
        resident = frozenset(self._allowed[:num_resident])
        offloaded = self._to_offload(self._captured, resident)
        if not num_recomputed:
            return ActivationPlan(offloaded)
        end = 1 + max(map(self._region_of, offloaded), default=-1)
        activation_plan = self._recomputing(num_recomputed, end, resident)
        if num_recomputed < self.recompute_regions or self._fits_host(activation_plan, resident):
            return activation_plan
        ends = range(end, self.recompute_regions)

        def fits_host(end: int) -> bool:
            return self._fits_host(self._recomputing(num_recomputed, end, resident), resident)

        return self._recomputing(num_recomputed, end + bisect_left(ends, True, key=fits_host), resident)

    def _recomputing(self, num_recomputed: int, end: int, resident: frozenset[int]) -> ActivationPlan:
        """Return the activation plan that recomputes regions before `end` only."""
        dropped = self._dropped(num_recomputed, end)
        lean = self._captured.following(ActivationPlan(recomputed=dropped))
        return ActivationPlan(self._to_offload(lean, resident), dropped)

    def _fits_host(self, activation_plan: ActivationPlan, resident: frozenset[int]) -> bool:
        with suppress(HostFull):
            self.check_host(activation_plan, resident)
            return True
        return False

    @property
    def earlier_search(self) -> EarlierSearch | None:
        """The result of an earlier search of this graph in which at least as much was possible, if there is one.

        If its plan takes no longer now, no plan is quicker.
        """
        earlier = self._captured.cache.earlier_search
        if earlier is None or earlier.room_nbytes < self._budget_nbytes or not earlier.allowed >= {*self._allowed}:
            return None
        return earlier if earlier.question == self._question else None

    def remember(self, activation_plan: ActivationPlan, seconds: float) -> None:
        """Keep the quickest plan of this search for later ones."""
        self._captured.cache.earlier_search = EarlierSearch(
            self._question, frozenset(self._allowed), self._budget_nbytes, activation_plan, seconds
        )

    @property
    def _question(self) -> tuple[object, ...]:
        layout, consumed = self._layout, frozenset(self._consumed)
        return (
            self._hardware,
            self._room.budget_nbytes,
            len(layout.groups),
            layout.replicated_by_choice,
            consumed,
            self._shadow_copied,
            self._num_stages,
        )

    def check_host(self, activation_plan: ActivationPlan, resident: frozenset[int]) -> None:
        """Check that the host has room for the copies.

        Raises:
            HostFull: it has not.
        """
        form, sizes = self._captured.following(activation_plan), (self._hardware, self._room.budget_nbytes)
        check_copies(form, self._layout, resident, *sizes, consumed=self._consumed, shadow_copied=self._shadow_copied)

    def _to_offload(self, lean: Captured, resident: frozenset[int]) -> frozenset[str]:
        """Choose the values to offload of a graph that recomputes some others."""
        room = self._room.keeping(resident)
        return choose_offloaded(lean.offloadable, profile(lean, self._layout), self._least_nbytes(room), room)

    def _least_nbytes(self, room: Room) -> int:
        """Return the bytes that the graph needs in addition to a room's residents if it offloads all it can."""
        if room.resident not in self._least_nbytes_of:
            least = profile(self._captured.following(_offload_all(self._captured)), self._layout)
            self._least_nbytes_of[room.resident] = room.needed_nbytes(least.passes)
        return self._least_nbytes_of[room.resident]

    def _region_of(self, storage: str) -> int:
        """Return the region that makes a storage; the forward's inputs belong to the first."""
        repeatable = self._captured.repeatable
        assert repeatable is not None
        assert self._recompute_regions is not None
        return bisect_right(self._recompute_regions.ends, repeatable.first_maker.get(storage, 0))

    @cached_property
    def _dropped_by_region(self) -> dict[int, list[str]]:
        """Region -> the storages that are dropped if it is recomputed."""
        by_region: dict[int, list[str]] = {}
        for storage in dropped_between(self._captured.repeatable, self._recompute_regions):
            by_region.setdefault(self._region_of(storage), []).append(storage)
        return by_region

    def _dropped(self, num_recomputed: int, end: int) -> frozenset[str]:
        """Return the storages dropped by so many recomputed regions, evenly spread, without those from `end` on."""
        count = self.recompute_regions
        chosen = (at for at in range(end) if (at + 1) * num_recomputed // count > at * num_recomputed // count)
        return frozenset(storage for at in chosen for storage in self._dropped_by_region.get(at, ()))


Decided = TypeVar("Decided")


def first_or_quickest(
    plans: Sequence[ActivationPlan],
    space: SearchSpace,
    decision_for: Callable[[ActivationPlan], Decided],
    seconds: Callable[[Decided, float], float],
) -> Decided:
    """Return the decision for the quickest activation plan; if values may not be kept, for the first that fits.

    Args:
        plans: to try in order; one that keeps all values comes first.
        decision_for: raises `BudgetError` for a plan that does not fit, and `HostFull` where the host lacks room.
        seconds: of a decision, exact where they are no more than the given number.

    Raises:
        BudgetError: see `first_that_fits`.
    """

    def timed(activation_plan: ActivationPlan, most_s: float) -> tuple[float, tuple[ActivationPlan, Decided]] | None:
        with suppress(BudgetError, HostFull):
            decision = decision_for(activation_plan)
            return seconds(decision, most_s), (activation_plan, decision)
        return None

    tried = plans if space.may_keep else tuple(filter(None, plans)) or plans
    try:
        first = first_that_fits(tried, decision_for)
    except BudgetError as error:
        if not error.elsewhere or (best := quickest(space, timed)) is None:
            raise
        return best[1][1]  # fewer copies, for which the host has room
    if not space.may_keep or not any(plans):
        return first
    if (earlier := space.earlier_search) is not None:
        repeated = timed(earlier.activation_plan, most_s := earlier.seconds * BARELY_MORE)
        if repeated is not None and repeated[0] <= most_s:
            return repeated[1][1]
    best = quickest(space, timed)
    if best is None or best[0] > space.enough_s:
        rest = [timed(candidate, math.inf if best is None else best[0] * BARELY_MORE) for candidate in plans]
        best = min((fitting for fitting in (*rest, best) if fitting is not None), key=lambda fitting: fitting[0])
    space.remember(best[1][0], best[0])
    return best[1][1]


COARSE, FINE = 2, 16
"""Into how many steps the ranges of groups and of regions are divided, at the beginning of a search and at its end; no
step is smaller than one group or region."""


MORE = 1.005
"""A step that takes this many times the seconds of its arithmetic ends a search: seconds are known no better."""

BARELY_MORE = 1 + 1e-9
"""A plan is slower, or quicker, than another only by more than this factor, which covers the rounding of sums. A plan
that is slower than the quickest so far is not timed further."""


def quickest(
    space: SearchSpace, timed: Callable[[ActivationPlan, float], tuple[float, Decided] | None]
) -> tuple[float, Decided] | None:
    """Search for the activation plan of least seconds; return what `timed` says of it, or None if none fits.

    The search starts at the best of a coarse grid and goes to the quicker neighbour, with half the step whenever no
    neighbour is quicker: first among plans that recompute nothing, then among all. A plan that is good enough ends it.

    Args:
        timed: seconds of a plan, with the decision; None: it does not fit. Where they are more than the given number,
            `inf` will do.
    """
    best_s = math.inf
    plans: dict[tuple[int, int], ActivationPlan] = {}
    results: dict[ActivationPlan, tuple[float, Decided] | None] = {}

    def seconds(point: tuple[int, int]) -> float:
        nonlocal best_s
        activation_plan = plans[point] = plans.get(point) or space.at(*point)
        if activation_plan not in results:
            results[activation_plan] = timed(activation_plan, best_s * BARELY_MORE)
        result = results[activation_plan]
        result_s = math.inf if result is None else result[0]
        best_s = min(best_s, result_s)
        return result_s

    (fewest, most), num_regions = space.groups, space.recompute_regions

    def downhill(at: tuple[int, int], directions: Sequence[tuple[int, int]]) -> tuple[int, int]:
        divisor = 2 * COARSE
        while divisor <= FINE and seconds(at) > space.enough_s:
            groups_step, regions_step = max(1, (most - fewest) // divisor), max(1, num_regions // divisor)
            neighbours = [(at[0] + groups_step * m, at[1] + regions_step * k) for m, k in directions]
            inside = [(m, k) for m, k in neighbours if fewest <= m <= most and 0 <= k <= num_regions]
            nearest = min([at, *inside], key=seconds)
            if seconds(nearest) * BARELY_MORE < seconds(at):
                at = nearest
            else:
                divisor *= 2
        return at

    grid = _grid(fewest, most, num_regions)
    row = [point for point in grid if not point[1]]
    enough = (point for point in row if seconds(point) <= space.enough_s)
    without_recompute = downhill(next(enough, None) or min(row, key=seconds), [(1, 0), (-1, 0)])
    if seconds(without_recompute) <= space.enough_s:
        return results[plans[without_recompute]]
    best = downhill(min(without_recompute, *grid, key=seconds), [(1, 0), (-1, 0), (0, 1), (0, -1)])
    return results[plans[best]]


def _grid(fewest: int, most: int, num_regions: int) -> Sequence[tuple[int, int]]:
    """Return a coarse grid of points, the most resident groups first: the fewer groups move the better."""
    steps = range(COARSE + 1)
    points = {(fewest + m * (most - fewest) // COARSE, k * num_regions // COARSE) for m in steps for k in steps}
    return sorted(points, key=lambda point: (point[1], -point[0]))


def _offload_all(captured: Captured, recomputed: frozenset[str] = frozenset()) -> ActivationPlan:
    form = captured.following(ActivationPlan(recomputed=recomputed))
    return ActivationPlan(frozenset(saved.storage for saved in form.offloadable), recomputed)


def _recompute_all(captured: Captured, layout: ChunkLayout) -> ActivationPlan:
    return ActivationPlan(recomputed=dropped_between(captured.repeatable, _recompute_regions(captured, layout)))


def _needed_nbytes(captured: Captured, activation_plan: ActivationPlan, layout: ChunkLayout) -> int:
    """Return the bytes that a graph needs, with those of the model's other graphs if they follow the same plan."""
    form = captured.following(activation_plan)
    return Room.of(layout).needed_nbytes(profile(form, layout).passes) + form.other_graphs_nbytes


def _recompute_regions(captured: Captured, layout: ChunkLayout) -> RecomputeRegions | None:
    """Return the forward's regions such that the graph needs the fewest bytes with all of them recomputed."""

    def needed_nbytes(dropped: frozenset[str]) -> int:
        return _needed_nbytes(captured, ActivationPlan(recomputed=dropped), layout)

    is_part = captured.graph_fraction < 1
    return captured.cache.regions.find(layout, lambda: leanest(captured.repeatable, needed_nbytes, is_part=is_part))
