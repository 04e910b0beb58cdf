"""The search for the quickest way in which values may be absent."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from verify_cases import HARDWARE, LAYOUT, NUM_LAYERS, captured_step

from chunkc.ir.items import ActivationPlan
from chunkc.passes.planning.recompute_search import RecomputeRegions
from chunkc.passes.planning.residency import SLACK_CHUNKS, evenly_spread, fixed_nbytes, needed_nbytes
from chunkc.policy import activation_search as activation_plans
from chunkc.policy.activation_search import SearchSpace, first_or_quickest, may_keep, quickest
from chunkc.policy.captured_step import profile

CAPTURED = captured_step()


@pytest.mark.parametrize("seed", range(50))
def test_giving_up_slow_ways_changes_nothing_but_the_work(seed: int) -> None:
    """However few ways are timed to the end, the search goes the same steps and finds the same one."""
    rng = random.Random(seed)
    ways = {(m, k): ActivationPlan(frozenset({str((m, k))})) for m in range(3, 20) for k in range(17)}
    known = {absent: rng.choice([None, *map(float, range(1, 9))]) for absent in ways.values()}
    mixes: Any = SimpleNamespace(
        groups=(3, 19), recompute_regions=16, at=lambda *place: ways[place], enough_s=-math.inf
    )
    tried: list[list[ActivationPlan]] = [[], []]
    num_given_up = 0

    def patient(absent: ActivationPlan, most_s: float) -> tuple[float, ActivationPlan] | None:
        tried[0].append(absent)
        seconds = known[absent]
        return None if seconds is None else (seconds, absent)

    def impatient(absent: ActivationPlan, most_s: float) -> tuple[float, ActivationPlan] | None:
        nonlocal num_given_up
        tried[1].append(absent)
        seconds = known[absent]
        if seconds is not None and seconds > most_s:
            num_given_up += 1
            return math.inf, absent
        return None if seconds is None else (seconds, absent)

    assert quickest(mixes, impatient) == quickest(mixes, patient)
    assert tried[0] == tried[1]
    assert num_given_up


@pytest.mark.parametrize(("enough_s", "num_tried"), [(7.0, 1), (6.0, 2), (4.0, 7)])
def test_a_way_that_is_good_enough_ends_the_search(enough_s: float, num_tried: int) -> None:
    """The more groups stay beside which nothing runs again, up to 13, the quicker; what runs again is never quick."""

    def at(m: int, k: int) -> ActivationPlan:
        return ActivationPlan(frozenset({str(m)}), frozenset({str(k)} if k else ()))

    mixes: Any = SimpleNamespace(groups=(3, 19), recompute_regions=16, at=at, enough_s=enough_s)
    tried: list[ActivationPlan] = []

    def timed(absent: ActivationPlan, most_s: float) -> tuple[float, ActivationPlan]:
        tried.append(absent)
        return (9.0 if absent.recomputed else 4 + abs(13 - int(*absent.offloaded)) / 2), absent

    found = quickest(mixes, timed)
    assert found[0] <= enough_s
    assert len(tried) == num_tried


def test_what_rounding_makes_quicker_is_no_step() -> None:
    """All ways take as long but for the last digit: none but the first ones and their neighbours are tried."""
    tried: list[tuple[int, int]] = []

    def timed(absent: ActivationPlan, most_s: float) -> tuple[float, ActivationPlan]:
        (place,) = absent.offloaded
        tried.append((int(place.partition(",")[0]), int(place.partition(",")[2])))
        return 1.0 + 1e-14 * abs(700 - tried[-1][0]), absent

    mixes: Any = SimpleNamespace(
        groups=(0, 999), recompute_regions=0, at=lambda m, k: ActivationPlan(frozenset({f"{m},{k}"})), enough_s=0.0
    )
    assert quickest(mixes, timed) is not None
    assert len(tried) == 3 + 2 * 3


def test_stretches_are_looked_for_once_for_each_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[object] = []
    monkeypatch.setattr(
        activation_plans, "leanest", lambda *asked, **kind: (searched.append((asked, kind)), RecomputeRegions((1,)))[1]
    )
    captured, spending = replace(CAPTURED), replace(LAYOUT, transient=frozenset({0}))
    for layout in (LAYOUT, spending, LAYOUT, replace(spending)):
        assert activation_plans._recompute_regions(captured, layout) == RecomputeRegions((1,))
    assert len(searched) == 2
    for chunk_nbytes in range(1, 9):
        activation_plans._recompute_regions(captured, replace(LAYOUT, chunk_nbytes=chunk_nbytes))
    assert len(captured.cache.regions) == activation_plans.MOST_LAYOUTS


def test_a_part_of_a_model_keeps_values_only_where_the_others_could_too() -> None:
    part = replace(CAPTURED, graph_fraction=0.25)
    assert CAPTURED.other_graphs_nbytes == 0
    assert part.other_graphs_nbytes == 3 * part.saved_nbytes > 0
    kept = fixed_nbytes(LAYOUT, frozenset()) + needed_nbytes(profile(CAPTURED, LAYOUT).passes, LAYOUT)
    assert may_keep(part, LAYOUT, kept + part.other_graphs_nbytes)
    assert not may_keep(part, LAYOUT, kept + part.other_graphs_nbytes - 1)
    assert may_keep(CAPTURED, LAYOUT, 0)


def test_where_values_may_not_stay_nothing_is_searched_for() -> None:
    """Of the ways, the first one that fits in which something is absent."""
    ways = ActivationPlan(), ActivationPlan(frozenset({"a"})), ActivationPlan(recomputed=frozenset({"b"}))
    mixes: Any = SimpleNamespace(may_keep=False, check_host=lambda absent, resident: None)

    def seconds(found: ActivationPlan, most_s: float) -> float:
        raise AssertionError("nobody asks how long it takes")

    def decided(absent: ActivationPlan) -> ActivationPlan:
        return absent

    assert first_or_quickest(ways, mixes, decided, seconds, lambda found: frozenset()) == ways[1]
    assert first_or_quickest(ways[:1], mixes, decided, seconds, lambda found: frozenset()) == ways[0]


@pytest.mark.parametrize("staying", range(NUM_LAYERS + 1))
def test_only_numbers_of_groups_that_make_a_difference_are_asked_for(staying: int) -> None:
    """Nothing may leave this graph: at most as many stay as have room, at least those beside which copies have."""
    groups = evenly_spread(range(NUM_LAYERS))
    beside = frozenset(groups[:staying])
    needed = fixed_nbytes(LAYOUT, beside) + needed_nbytes(profile(CAPTURED, LAYOUT).passes, LAYOUT, beside)
    slack = SLACK_CHUNKS * LAYOUT.groups[0].numel * 4

    def found(budget_nbytes: int, external_nbytes: int = 0) -> tuple[int, int]:
        return SearchSpace(CAPTURED, LAYOUT, groups, budget_nbytes, external_nbytes, HARDWARE).groups

    assert found(needed + slack) == found(needed + slack + 9, 9)
    assert found(needed + slack)[0] == staying
    assert found(needed) == (max(0, staying - 1), staying)
    assert found(needed - 1)[1] == max(0, staying - 1)
