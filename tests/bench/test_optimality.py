"""The bound on a step's time is one: hand-made steps, whole gaps against parts, and no plan or policy below it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peers import policies
from plans import optimality
from plans import optimality_bound as bound

from chunkc.ir.hardware import Hardware
from chunkc.ir.items import Copy, Item
from chunkc.ir.layout import PARAM, Chunk
from chunkc.ir.links import TO_DEVICE, TO_HOME, host_links
from chunkc.ir.plan import Position
from chunkc.ir.program import FORWARD
from chunkc.ir.simulate import simulate, step_time

GB = 10**9
NO_UPDATE = bound.UpdateWork(0.0, (), (), early=True)


def problem(calls: list[tuple[float, int]], gaps: list[bound.Gap], capacity: int, num_forward: int) -> bound.Problem:
    return bound.Problem(
        tuple(bound.Call(seconds, nbytes) for seconds, nbytes in calls),
        num_forward,
        tuple(gaps),
        NO_UPDATE,
        capacity,
        inward=1.0 * GB,
        outward=1.0 * GB,
    )


def test_two_chunks_that_take_turns() -> None:
    """Each call needs its own gigabyte, and there is room for one: both come in once a step, a second each."""
    gaps = [bound.Gap("a", GB, 1, 0, is_dirty=False), bound.Gap("b", GB, 2, 1, is_dirty=False)]
    found = bound.lower_bound(problem([(0.1, GB), (0.1, GB)], gaps, GB, 1))
    assert found.seconds == pytest.approx(2.0)
    assert found.nbytes == pytest.approx(2 * GB)


def test_what_fits_costs_its_arithmetic_alone() -> None:
    gaps = [bound.Gap("a", GB, 1, 0, is_dirty=True)]
    found = bound.lower_bound(problem([(0.25, GB), (0.5, 0)], gaps, 2 * GB, 1))
    assert found.seconds == pytest.approx(0.75)
    assert found.nbytes == pytest.approx(0.0)


@pytest.mark.parametrize(("making_s", "expected"), [(0.2, 0.4), (5.0, 7.0)])
def test_a_saved_value_is_made_again_where_that_is_cheaper_than_two_copies(making_s: float, expected: float) -> None:
    """A gigabyte that has no room in between: out and back on two links, a second each, one after the other; or the
    call once more."""
    calls = [(making_s, GB), (0.0, 2 * GB), (0.0, 2 * GB), (0.0, GB)]
    gaps = [bound.Gap("saved", GB, 1, 3, is_dirty=True, recomputed=0)]
    found = bound.lower_bound(problem(calls, gaps, 2 * GB, 2), exact=True)
    assert found.seconds == pytest.approx(expected)


def test_a_call_may_run_again_in_less_than_it_took() -> None:
    """PyTorch's early stop, and `SegmentCall.recompute_call`: plans that use them would else be below the bound."""
    calls = (bound.Call(0.5, GB, again_s=0.2), *(bound.Call(0.0, nbytes) for nbytes in (2 * GB, 2 * GB, GB)))
    gaps = [bound.Gap("saved", GB, 1, 3, is_dirty=True, recomputed=0)]
    found = bound.lower_bound(replace(problem([], gaps, 2 * GB, 2), calls=calls), exact=True)
    assert found.seconds == pytest.approx(0.7)


def test_a_step_that_cannot_fit_has_no_bound() -> None:
    assert bound.lower_bound(problem([(0.1, 3 * GB)], [], GB, 1)) == bound.LowerBound(None, None)


def test_an_update_comes_after_the_backward_unless_it_may_come_early() -> None:
    """Half a gigabyte of states, half of which has room to stay: others come beside the calls, or behind."""
    base = problem([(0.5, 0), (0.5, 0)], [], GB // 4, 1)
    early, late = (
        bound.lower_bound(replace(base, update=bound.UpdateWork(0.2, (GB // 2,), (1,), early=is_early))).seconds
        for is_early in (True, False)
    )
    assert early == pytest.approx(1.2)
    assert late == pytest.approx(1.25)


def test_states_go_home_once_their_gradient_is_complete() -> None:
    """A gigabyte of states without room to stay: on its way in the second call's half second, and a half more. With
    room for half of it, that half has come before, but still has to go; with room for all, it stays."""
    for room, expected in ((0, 1.5), (GB // 2, 1.0), (GB, 1.0)):
        base = problem([(0.5, 0), (0.5, 0)], [], room, 1)
        asked = replace(base, update=bound.UpdateWork(0.0, (GB,), (1,), early=True))
        assert bound.lower_bound(asked).seconds == pytest.approx(expected), room


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Position], dict[Chunk, Item], int]:
    """Calls that read some of a few chunks, and room for those of any one call."""
    num = draw(st.integers(1, 5))
    chunks = [Chunk(PARAM, index) for index in range(num)]
    items = {c: Item(draw(st.integers(1, 9)) * GB, Copy(TO_DEVICE), Copy(TO_HOME)) for c in chunks}
    positions = [
        Position(f"forward.{at}", FORWARD, 0, "op", "", frozenset({chunk}), frozenset(), draw(st.integers(0, 5)) / 2)
        for at, chunk in enumerate(draw(st.lists(st.sampled_from(chunks), min_size=1, max_size=8)))
    ]
    most = max(items[c].nbytes for one in positions for c in one.reads)
    return positions, items, most + draw(st.integers(0, 9)) * GB


@given(steps())
@settings(max_examples=40, deadline=None)
def test_no_policy_is_faster_than_the_bound(step: tuple[list[Position], dict[Chunk, Item], int]) -> None:
    """Parts of gaps bound whole gaps, and these what any policy takes on the simulator."""
    positions, items, capacity = step
    hardware = Hardware(1e12, 1e12, host_links(1.0 * GB, 1.0 * GB))
    gaps = []
    for chunk in items:
        uses = [at for at, one in enumerate(positions) if chunk in one.items]
        pairs = [(a + 1, b) for a, b in pairwise(uses) if b > a + 1]
        gaps += [bound.Gap(str(chunk), items[chunk].nbytes, *pair, is_dirty=False) for pair in pairs]
        if uses and (uses[0] > 0 or uses[-1] + 1 < len(positions)):
            gaps.append(bound.Gap(str(chunk), items[chunk].nbytes, uses[-1] + 1, uses[0], is_dirty=False))
    calls = [(one.cost_s, sum(items[c].nbytes for c in one.items)) for one in positions]
    asked = problem(calls, gaps, capacity, len(positions))
    parts, whole = bound.lower_bound(asked), bound.lower_bound(asked, exact=True)
    assert parts.seconds is not None
    assert whole.seconds is not None
    assert parts.seconds <= whole.seconds + 1e-6
    costs = {one.name: one.cost_s for one in positions}
    for policy in policies.POLICIES:
        planned = policies.phase_plan(policy, FORWARD, positions, items, [capacity] * len(positions))
        assert max(moment.slot_nbytes for moment in planned.moments) <= capacity
        seconds = step_time(simulate([planned], costs, hardware)).total
        assert whole.seconds <= seconds + 1e-6, policy.name


@pytest.mark.second_tier
@pytest.mark.parametrize("overlap", ["none", "backward"])
def test_a_step_that_moves_nothing_is_all_arithmetic(overlap: str) -> None:
    """The update's is in it, whenever it is made: nothing is faster."""
    found = optimality.examine(optimality.Case("vit-base-32", "a100-80g", 2), overlap, exact=False)
    assert found.bytes_moved == 0
    assert found.lower_bound_s == pytest.approx(found.step_time_s, rel=1e-9)
    assert found.lower_bound_bytes == 0


@pytest.mark.slow
def test_a_model_as_explain_plans_it() -> None:
    """No plan, chunkc's or another policy's, of a transformer with half of its model data on the device is faster."""
    found = optimality.examine(optimality.Case("vit-base-32", "rtx2060-6g", 2, "600MiB"), "none", exact=False)
    assert None not in (found.step_time_s, found.lower_bound_s, found.lower_bound_bytes, found.bytes_moved)
    assert found.lower_bound_s <= min([found.step_time_s, *found.baselines.values()])
    assert found.lower_bound_bytes <= found.bytes_moved
    assert found.step_time_s <= min(s for name, s in found.baselines.items() if not name.startswith("chunkc"))
