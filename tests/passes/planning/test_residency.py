"""Plans of hand-made and random steps: the minimum is exact, residents fit, every byte is accounted for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from verify_cases import MEMORIES, MODULES, NUM_LAYERS, backward_program, forward_program

from chunkc.ir.errors import BudgetError
from chunkc.ir.hardware import Hardware
from chunkc.ir.layout import STEP_NBYTES, Chunk, ChunkLayout, ParamSpec
from chunkc.ir.links import host_links
from chunkc.ir.plan import Plan, Position, gradients_at
from chunkc.ir.shards import Shards, ZeroStage
from chunkc.ir.verify.resident import resident_data_nbytes
from chunkc.passes.codegen import CompiledSegment
from chunkc.passes.planning.layout import lay_out
from chunkc.passes.planning.residency import (
    choose_replicated,
    choose_resident,
    evenly_spread,
    remaining_replicated,
    remaining_residents,
)
from chunkc.passes.planning.room import Room, fixed_nbytes
from chunkc.passes.planning.step_profile import StepProfile
from chunkc.passes.planning.timeline import plan_phases
from chunkc.passes.planning.updates import update_positions, update_tiles
from chunkc.policy.captured_step import Captured, profile
from chunkc.policy.decide import decide
from chunkc.policy.plans import step_plan, update_plan
from chunkc.policy.state import Forms, GraphCaptured, PhaseCalled, PlannerState, StepDecision, UpdateDue

HUGE = 1 << 40
CHUNK_NBYTES = 4096
HARDWARE = Hardware(1.0, 1.0, host_links(4096.0, 4096.0))


def layout_of(*numels: int, dtype: torch.dtype = torch.float32, trainable: bool = True) -> ChunkLayout:
    """One group per number."""
    specs = [ParamSpec(f"h.{i}.w", (n,), (1,), dtype, trainable) for i, n in enumerate(numels)]
    layout = lay_out(specs, CHUNK_NBYTES)
    assert len(layout.groups) == len(numels)
    return layout


def position(
    phase: str, nbytes: int, read: Chunk | None = None, written: Chunk | None = None, name: str = "call"
) -> Position:
    reads, writes = (frozenset({chunk} - {None}) for chunk in (read, written))
    return Position(name, phase, nbytes, "aten.mm", "h.0", reads, writes, 1.0)  # type: ignore[arg-type]


def step_of(layout: ChunkLayout, activations: Sequence[int], external_nbytes: int = 100) -> StepProfile:
    """A forward and a backward with one call per group, and the update."""
    groups = range(len(layout.groups))
    forward = tuple(position("forward", n, Chunk("param", i), name=f"forward.{i}") for i, n in zip(groups, activations))
    backward = tuple(
        position("backward", n, Chunk("param", i), Chunk("grad", i), name=f"backward.{i}")
        for i, n in reversed(list(zip(groups, activations)))
    )
    update = update_positions(layout, update_tiles(layout, list(groups), 0), external_nbytes)
    return StepProfile(forward, backward, update, sum(activations), 0)


def plan_step(
    step: StepProfile,
    layout: ChunkLayout,
    budget: int,
    resident: frozenset[int] = frozenset(),
    external_nbytes: int = 0,
) -> Plan:
    return plan_phases(
        [("forward", step.forward), ("backward", step.backward)],
        Room.of(layout, budget, external_nbytes, resident),
        hardware=HARDWARE,
        boundary_nbytes=step.boundary_nbytes,
    )


LAYOUT = layout_of(1024, 1024, 1000)
STEP = step_of(LAYOUT, (500, 700, 300))


def test_the_minimum_is_the_fullest_call() -> None:
    fixed = 3 * STEP_NBYTES
    assert fixed_nbytes(LAYOUT, frozenset()) == fixed
    assert Room.of(LAYOUT, HUGE).check_minimum(STEP.forward) == fixed + 700 + 4096
    assert Room.of(LAYOUT, HUGE).check_minimum(STEP.backward) == fixed + 700 + 2 * 4096
    assert Room.of(LAYOUT, HUGE).check_minimum(STEP.all) == fixed + 100 + 4 * 4096, "the update needs states too"
    assert Room.of(LAYOUT, HUGE, 55).check_minimum(STEP.forward) == fixed + 55 + 700 + 4096
    assert Room.of(LAYOUT, HUGE, 55).check_minimum(()) == fixed + 55


def test_the_error_says_what_fills_the_peak() -> None:
    with pytest.raises(BudgetError) as caught:
        Room.of(LAYOUT, 1, 55).check_minimum(STEP.backward)
    error = caught.value
    assert error.moment == "aten.mm (backward.1)"
    assert error.module == "h.0"
    assert sum(nbytes for _, nbytes in error.contents) == error.minimum_nbytes
    sizes = [nbytes for _, nbytes in error.contents]
    assert sizes == sorted(sizes, reverse=True)
    assert {label for label, nbytes in error.contents if nbytes == 4096} == {
        "chunk param:1 (h.1.w)",
        "chunk grad:1 (h.1.w)",
    }


def test_small_parameters_and_step_counters_stay() -> None:
    specs = [ParamSpec("a.bias", (8,), (1,), torch.float32, True), ParamSpec("a.w", (1024,), (1,), torch.float32, True)]
    layout = lay_out(specs, CHUNK_NBYTES)
    assert layout.small_nbytes == 2 * STEP_NBYTES + 32 * 4
    frozen = [ParamSpec("a.bias", (8,), (1,), torch.float32, False)]
    assert lay_out(frozen, CHUNK_NBYTES).small_nbytes == 32
    half = [ParamSpec("a.bias", (8,), (1,), torch.bfloat16, True)]
    assert lay_out(half, CHUNK_NBYTES).small_nbytes == STEP_NBYTES + 8 * (2 + 2 + 10)


def test_everything_stays_where_everything_fits_to_the_byte() -> None:
    everything = frozenset({0, 1, 2})
    needed = fixed_nbytes(LAYOUT, everything) + 700
    assert choose_resident(STEP.all, Room.of(LAYOUT, needed), everything) == everything
    assert choose_resident(STEP.all, Room.of(LAYOUT, needed - 1), everything) != everything


def test_a_larger_budget_keeps_no_less() -> None:
    minimum = Room.of(LAYOUT, HUGE).check_minimum(STEP.all)
    chosen = [choose_resident(STEP.all, Room.of(LAYOUT, b), frozenset({0, 1, 2})) for b in range(minimum, 80_000, 512)]
    assert chosen[0] == frozenset()
    assert {0} in chosen
    assert all(one <= other for one, other in pairwise(chosen)), "a larger budget keeps no less"
    assert chosen[-1] == {0, 1, 2}


def test_residents_leave_room_for_a_chunk_that_comes_and_one_that_goes() -> None:
    """Beyond what each call cannot do without: without it every copy would be waited for."""
    everything = frozenset({0, 1, 2})
    needed = Room.of(LAYOUT, HUGE, 0, frozenset({0})).check_minimum(STEP.all) + 2 * CHUNK_NBYTES
    assert choose_resident(STEP.all, Room.of(LAYOUT, needed), everything) == {0}
    assert 0 not in choose_resident(STEP.all, Room.of(LAYOUT, needed - 1), everything)


def test_residents_make_room_for_what_is_held() -> None:
    everything = frozenset({0, 1, 2})
    minimum = Room.of(LAYOUT, HUGE).check_minimum(STEP.passes)
    for spare in range(0, 120_000, 1024):
        found = remaining_residents(STEP.passes, Room.of(LAYOUT, minimum + spare, spare // 2, everything))
        Room.of(LAYOUT, minimum + spare, spare // 2, found).check_minimum(STEP.passes)
    assert found == everything


def test_an_update_counts_the_staying_gradients_that_are_there() -> None:
    """Of parameters that took no part in the step there are none."""
    plan = plan_step(STEP, LAYOUT, HUGE, frozenset({0, 2}))
    name, nbytes = next(iter(plan.gradients.items()))
    assert {m.gradient_nbytes for m in plan.with_gradients([name]).moments} == {nbytes}
    assert {m.gradient_nbytes for m in plan.with_gradients([]).moments} == {0}


def test_a_staying_gradient_counts_once_it_is_complete() -> None:
    """One that is handed over costs nothing while its call runs (it is an output), one that is copied counts twice."""
    names = [s.spec.name for group in LAYOUT.groups for s in group.slices]
    gradients = {names[0]: 100, names[1]: 10}
    line = [
        replace(position("backward", 0), sunk=((names[0], True),)),
        replace(position("backward", 0), sunk=((names[1], False), ("elsewhere", False))),
        position("backward", 0),
    ]
    all_nbytes = (110, 110)
    assert gradients_at(line, gradients) == [(0, 100), all_nbytes, all_nbytes]
    assert gradients_at([position("update", 0)], gradients) == [all_nbytes]
    added = gradients_at(line, gradients, {names[1]})
    assert added == [(10, 110), all_nbytes, all_nbytes], "added to where it is, without a copy"
    assert gradients_at(line, gradients, names) == [all_nbytes] * 3


def test_what_is_kept_for_the_backward_fits_beside_the_boundary() -> None:
    step = step_of(LAYOUT, (500, 700, 300))
    roomy = plan_step(step, LAYOUT, 1 << 20)
    assert roomy.kept == {Chunk("param", 0), Chunk("param", 1), Chunk("param", 2)}
    fixed = fixed_nbytes(LAYOUT, frozenset())
    for boundary, num_kept in ((0, 2), (700, 1), (5000, 0), (1 << 30, 0)):
        plan = plan_step(replace(step, boundary_nbytes=boundary), LAYOUT, fixed + 700 + 2 * 4096)
        assert len(plan.kept) <= num_kept
        if plan.kept:
            kept = sum(LAYOUT.chunk_nbytes_of(chunk) for chunk in plan.kept)
            assert fixed + boundary + kept <= plan.budget_nbytes
    assert plan.kept == frozenset()


@st.composite
def steps(draw):
    numels = draw(st.lists(st.integers(65, 1024), min_size=1, max_size=5))
    specs = [ParamSpec(f"m{i}.w", (n,), (1,), torch.float32, True) for i, n in enumerate(numels)]
    layout = lay_out(specs, 4 * draw(st.sampled_from([64, 256, 1024])))
    assume(layout.groups)
    activations = draw(st.lists(st.integers(0, 20_000), min_size=5, max_size=5))
    return layout, step_of(layout, activations, draw(st.integers(0, 5000)))


@settings(deadline=None, max_examples=100)
@given(steps(), st.integers(0, 30_000), st.integers(0, 3000))
def test_the_minimum_is_exact_for_every_step(case, more: int, external_nbytes: int) -> None:
    layout, step = case
    calls = step.forward + step.backward
    minimum = Room.of(layout, HUGE, external_nbytes).check_minimum(calls)
    for budget in (minimum, minimum + more):
        plan = plan_step(step, layout, budget, external_nbytes=external_nbytes)
        assert plan.minimum_nbytes == minimum <= plan.predicted_peak_nbytes <= budget
        assert plan.peak.nbytes == plan.predicted_peak_nbytes
    with pytest.raises(BudgetError) as caught:
        Room.of(layout, minimum - 1, external_nbytes).check_minimum(calls)
    assert caught.value.minimum_nbytes == minimum


@settings(deadline=None, max_examples=100)
@given(steps(), st.integers(0, 60_000))
def test_with_the_residents_chosen_there_is_a_plan(case, more: int) -> None:
    layout, step = case
    budget = Room.of(layout, HUGE).check_minimum(step.all) + more
    resident = choose_resident(step.all, Room.of(layout, budget), frozenset(range(len(layout.groups))))
    assert Room.of(layout, budget, 0, resident).check_minimum(step.all) <= budget
    assert plan_step(step, layout, budget, resident).predicted_peak_nbytes <= budget


@pytest.mark.parametrize("numels", [(1024, 1024, 1024), (1024, 300), (65,)])
def test_below_the_minimum_no_choice_of_residents_fits(numels: tuple[int, ...]) -> None:
    layout = layout_of(*numels)
    step = step_of(layout, [50] * len(numels))
    minimum = Room.of(layout, HUGE).check_minimum(step.all, all_may_be_resident=True)
    for size in range(len(numels) + 1):
        for resident in combinations(range(len(numels)), size):
            with pytest.raises(BudgetError):
                Room.of(layout, minimum - 1, 0, frozenset(resident)).check_minimum(step.all)


def test_overhead_and_granules_count_on_the_compute_tier_only() -> None:
    spec = ParamSpec("h.0.w", (1000,), (1,), torch.float32, True, granule_nbytes=512)
    assert (spec.nbytes, spec.gradient_nbytes, spec.optimizer_nbytes) == (4096, 4096, 2 * 4096)
    small = ParamSpec("h.0.b", (3,), (1,), torch.float32, True, granule_nbytes=512)
    layout = lay_out([spec, small], 4096)
    plain = lay_out([replace(spec, granule_nbytes=1), replace(small, granule_nbytes=1)], 4096)
    group = layout.groups[0]
    assert group.nbytes("param") == plain.groups[0].nbytes("param")  # at home
    assert layout.chunk_nbytes_of(Chunk("param", 0, (0, 100))) == 512
    assert plain.chunk_nbytes_of(Chunk("param", 0, (0, 100))) == 400
    assert fixed_nbytes(layout, frozenset()) == 2 * 4 + 4 * 512
    assert fixed_nbytes(replace(layout, overhead_nbytes=99), frozenset()) == 99 + 2 * 4 + 4 * 512


@given(st.sets(st.integers(0, 200)), st.data())
def test_each_beginning_of_an_evenly_spread_order_is_spread(groups: set[int], data: st.DataObject) -> None:
    """Of any half, quarter, ... of the groups in order, as many come first as of any other, give or take one."""
    order = evenly_spread(groups)
    assert sorted(order) == sorted(groups)
    num = data.draw(st.integers(0, len(groups)))
    placed, parts = sorted(groups), 2 ** data.draw(st.integers(0, 3))
    size = 2 ** len(placed).bit_length() // parts
    full = [set(placed[i * size : (i + 1) * size]) for i in range(parts) if (i + 1) * size <= len(placed)]
    counts = [len(set(order[:num]) & part) for part in full]
    assert not counts or max(counts) - min(counts) <= 1


# ---------------------------------------------------------------- groups that stand whole on every rank

HUGE = 1 << 40
SEGMENTS = {name: CompiledSegment(MODULES[name], memory) for name, memory in MEMORIES.items()}
CAPTURED = Captured(forward_program(), backward_program(), SEGMENTS, MODULES, whole=False)
EVERY = frozenset(range(NUM_LAYERS))


def cut(rows: Sequence[int] = (1024,) * NUM_LAYERS, rank: int = 0, stage: ZeroStage | None = None) -> ChunkLayout:
    """Four matrices, cut over three ranks, each in a chunk of its own."""
    specs = [
        ParamSpec(f"h.{i}.w", (n,), (1,), torch.float32, True).part(Shards((n,), 3, rank, stage))
        for i, n in enumerate(rows)
    ]
    return lay_out(specs, 4 * max(rows))


CUT = cut()
NEEDS = profile(CAPTURED, CUT).all
LEAST = Room.of(CUT, HUGE).check_minimum(NEEDS)
MOST = Room.of(CUT.with_replicated(EVERY), HUGE).check_minimum(NEEDS)


def captured(budget_nbytes: int) -> StepDecision:
    return decide(PlannerState(budget_nbytes), GraphCaptured(CAPTURED, CUT))


def test_all_are_whole_as_soon_as_all_fit() -> None:
    assert captured(MOST).planner_state.layout.replicated_by_choice == EVERY
    assert captured(MOST - 1).planner_state.layout.replicated_by_choice < EVERY
    assert captured(LEAST).planner_state.layout.replicated_by_choice == frozenset()
    with pytest.raises(BudgetError) as error:
        captured(LEAST - 1)
    assert error.value.minimum_nbytes == LEAST


@given(st.integers(LEAST, MOST + 9999), st.integers(0, 4000))
def test_what_is_chosen_fits_and_is_verified(budget_nbytes: int, external_nbytes: int) -> None:
    decision = captured(budget_nbytes)
    assert not decision.planner_state.resident, "what ranks share has parts at home"
    step_plan(CAPTURED, decision.request, HARDWARE)
    try:
        remaining = decide(decision.planner_state, PhaseCalled(Forms(CAPTURED), external_nbytes))
    except BudgetError:
        assert LEAST + external_nbytes > budget_nbytes, "it fits where nothing is whole"
        return
    assert remaining.planner_state.layout.replicated_by_choice <= decision.planner_state.layout.replicated_by_choice, (
        "nobody comes back"
    )
    step_plan(CAPTURED, remaining.request, HARDWARE)


def test_a_forced_stage_is_no_choice() -> None:
    for stage in (1, 2, 3):
        layout = cut(stage=stage)  # type: ignore[arg-type]
        assert (
            decide(PlannerState(HUGE), GraphCaptured(CAPTURED, layout)).planner_state.layout.replicated_by_choice
            == frozenset()
        )


def test_what_is_whole_leaves_where_others_hold_more() -> None:
    now = captured(MOST).planner_state
    after = decide(now, PhaseCalled(Forms(CAPTURED), 1000)).planner_state
    assert after.layout.replicated_by_choice < now.layout.replicated_by_choice
    assert after.key != now.key, "a plan for the one is none for the other"
    again = decide(after, PhaseCalled(Forms(CAPTURED), 0)).planner_state
    assert again.layout.replicated_by_choice == after.layout.replicated_by_choice


def test_a_later_graph_takes_room_too() -> None:
    now = replace(captured(MOST).planner_state, budget_nbytes=LEAST)
    assert decide(now, GraphCaptured(CAPTURED, now.layout)).planner_state.layout.replicated_by_choice == frozenset()


def test_for_an_update_what_is_whole_gives_its_room_back_for_a_while() -> None:
    now = captured(MOST).planner_state
    groups = tuple(sorted(EVERY))
    roomy = decide(now, UpdateDue(groups, 0))
    assert roomy.request is not None
    assert roomy.request.planner_state == now
    external_nbytes = now.budget_nbytes - resident_data_nbytes(now.layout, ())
    tight = decide(now, UpdateDue(groups, external_nbytes))
    assert tight.planner_state is now, "afterwards it is as before"
    assert tight.request is not None
    assert tight.request.planner_state.layout.replicated_by_choice < now.layout.replicated_by_choice
    update_plan(tight.request, HARDWARE)


@given(st.lists(st.integers(1, 3000), min_size=NUM_LAYERS, max_size=NUM_LAYERS), st.floats(0, 1))
def test_ranks_choose_alike_whatever_their_parts(rows: list[int], share: float) -> None:
    found = []
    for rank in range(3):
        layout = cut(rows, rank)
        needs = profile(CAPTURED, layout).all
        least = Room.of(layout, HUGE).check_minimum(needs)
        most = Room.of(layout.with_replicated(range(len(layout.groups))), HUGE).check_minimum(needs)
        budget = int(least + share * (most - least))
        every = frozenset(range(len(layout.groups)))
        chosen = choose_replicated(needs, Room.of(layout, budget), every)
        remaining = remaining_replicated(needs, Room.of(layout.with_replicated(every), budget))
        found.append((least, most, chosen.replicated_by_choice, remaining.replicated_by_choice))
    assert len(set(found)) == 1
