"""What stays, what is cut and which plan is asked for, over graphs made by hand; and that nobody else decides it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from verify_cases import HARDWARE, LAYOUT, NUM_LAYERS, captured_step

import chunkc.policy.decide
from chunkc.ir.errors import BudgetError
from chunkc.ir.layout import Chunk
from chunkc.passes.planning.residency import check_minimum, fixed_nbytes
from chunkc.policy.captured_step import profile
from chunkc.policy.decide import EXTERNAL_GRANULES, decide, fits_whole, smallest_budget
from chunkc.policy.plans import step_plan
from chunkc.policy.state import (
    EMPTY_CONTEXT,
    Forms,
    GraphCaptured,
    PhaseCalled,
    PhaseContext,
    PlannerState,
    SizesCalled,
    StepDecision,
    UpdateDue,
)

HUGE = 1 << 40
EVERYTHING = frozenset(range(NUM_LAYERS))
CAPTURED = captured_step()
PASSES = profile(CAPTURED, LAYOUT).passes


def captured(planner_state: PlannerState) -> StepDecision:
    return decide(planner_state, GraphCaptured(CAPTURED, LAYOUT))


def compiled(budget_nbytes: int = HUGE, resident: frozenset[int] = EVERYTHING) -> PlannerState:
    """The graph was compiled; these groups stay by now."""
    return replace(captured(PlannerState(HUGE)).planner_state, budget_nbytes=budget_nbytes, resident=resident)


def knowing(num_groups: int, resident: frozenset[int]) -> PlannerState:
    """A graph was compiled before, with the layout's first groups."""
    return PlannerState(HUGE, replace(LAYOUT, groups=LAYOUT.groups[:num_groups]), resident, num_graphs=1)


# --- a graph is captured ---


def test_of_the_first_graph_any_group_may_stay() -> None:
    minimum = check_minimum(profile(CAPTURED, LAYOUT).all, LAYOUT, HUGE, 0, all_may_be_resident=True)
    found = captured(PlannerState(HUGE))
    assert found.planner_state.resident == EVERYTHING
    assert (found.planner_state.num_graphs, found.planner_state.trained) == (1, CAPTURED.trained)
    assert found.request.planner_state is found.planner_state
    assert captured(PlannerState(minimum)).planner_state.resident < EVERYTHING
    with pytest.raises(BudgetError) as error:
        captured(PlannerState(minimum - 1))
    assert error.value.minimum_nbytes == minimum == smallest_budget(CAPTURED, LAYOUT)


def test_a_layout_that_was_there_before_the_first_graph_binds_nobody() -> None:
    """`chunkc.place` makes one in which nobody stays."""
    assert captured(PlannerState(HUGE, LAYOUT)).planner_state.resident == EVERYTHING


def test_of_a_later_graph_what_has_left_does_not_come_back() -> None:
    assert captured(knowing(2, frozenset({1}))).planner_state.resident == {1, 2, 3}, "the last two are new"
    assert captured(knowing(NUM_LAYERS, frozenset())).planner_state.resident == frozenset()
    assert captured(knowing(2, frozenset({0, 1}))).planner_state.resident == EVERYTHING


def test_only_where_all_may_stay_the_minimum_is_with_all() -> None:
    gaps = replace(LAYOUT, groups=tuple(replace(group, numel=16 * group.numel) for group in LAYOUT.groups))
    needs = profile(CAPTURED, gaps)
    staying = fixed_nbytes(gaps, EVERYTHING) + max(p.non_model_nbytes for p in needs.all)
    moving = check_minimum(needs.all, gaps, HUGE, 0)
    assert staying < moving
    for resident, minimum in ((EVERYTHING, staying), (frozenset({1}), moving)):
        event = GraphCaptured(CAPTURED, gaps)
        assert decide(PlannerState(minimum, gaps, resident, num_graphs=1), event).planner_state.resident <= resident
        with pytest.raises(BudgetError) as error:
            decide(PlannerState(minimum - 1, gaps, resident, num_graphs=1), event)
        assert error.value.minimum_nbytes == minimum


def test_a_graph_may_be_whole_until_a_group_has_left() -> None:
    assert PlannerState(HUGE, LAYOUT).can_skip_segmentation
    assert compiled().can_skip_segmentation
    assert not compiled(resident=EVERYTHING - {2}).can_skip_segmentation
    needs = profile(CAPTURED, LAYOUT)
    staying = fixed_nbytes(LAYOUT, EVERYTHING)
    whole = staying + max(p.non_model_nbytes for p in needs.all)
    assert [fits_whole(LAYOUT, n) for n in (staying - 1, staying)] == [False, True]
    assert [fits_whole(LAYOUT, n, CAPTURED) for n in (whole - 1, whole)] == [False, True]
    part = replace(CAPTURED, graph_fraction=0.25)
    assert part.other_graphs_nbytes > 0
    whole += part.other_graphs_nbytes
    assert [fits_whole(LAYOUT, n, part) for n in (whole - 1, whole)] == [False, True]


# --- it is called ---


def test_who_fits_stays_and_who_does_not_leaves_for_good() -> None:
    minimum = check_minimum(PASSES, LAYOUT, HUGE, 0, EVERYTHING)
    now = compiled(minimum + 10)
    found = decide(now, PhaseCalled(Forms(CAPTURED), 10))
    assert found.planner_state is now
    assert found.captured is CAPTURED
    left = decide(now, PhaseCalled(Forms(CAPTURED), 11)).planner_state
    assert left.resident < EVERYTHING
    assert decide(left, PhaseCalled(Forms(CAPTURED), 0)).planner_state is left


def test_a_call_that_fits_nobody_names_the_smallest_budget() -> None:
    minimum = check_minimum(PASSES, LAYOUT, HUGE, 100)
    with pytest.raises(BudgetError) as error:
        decide(compiled(minimum - 1), PhaseCalled(Forms(CAPTURED), 100))
    assert error.value.minimum_nbytes == minimum
    assert error.value.__context__ is None or error.value.__context__ is not error.value


def test_a_whole_graph_is_cut_where_it_does_not_fit_and_not_before() -> None:
    calls = []

    def in_segments() -> object:
        calls.append(None)
        return CAPTURED

    costly = {name: replace(memory, steps=(replace(memory.steps[0], nbytes=100_000),)) for name, memory in
              CAPTURED.memories.items()}  # fmt: skip
    segments = {name: replace(segment, memory=costly[name]) for name, segment in CAPTURED.segments.items()}
    whole = replace(CAPTURED, segments=segments, whole=True)
    forms = Forms(whole, in_segments)  # type: ignore[arg-type]
    assert decide(compiled(), PhaseCalled(forms, 0)).captured is whole
    assert not calls
    tight = compiled(check_minimum(PASSES, LAYOUT, HUGE, 0))
    assert decide(tight, PhaseCalled(forms, 0)).captured is CAPTURED
    assert len(calls) == 1


def test_other_sizes_send_residents_home_for_the_update_as_well() -> None:
    least = check_minimum(profile(CAPTURED, LAYOUT).all, LAYOUT, HUGE, 0, EVERYTHING)
    assert decide(compiled(least), SizesCalled(CAPTURED)).planner_state.resident == EVERYTHING
    assert decide(compiled(least - 1), SizesCalled(CAPTURED)).planner_state.resident < EVERYTHING


@pytest.mark.parametrize(
    ("held", "room", "planned"),
    [
        (0, HUGE, 0),
        (64, HUGE, 64),  # a whole granule already
        (65, HUGE, 128),
        (65, 127, 65),
    ],
)
def test_a_plan_has_room_for_a_little_more_where_there_is_one(held: int, room: int, planned: int) -> None:
    granule = 64
    budget = granule * EXTERNAL_GRANULES
    taken = check_minimum(PASSES, LAYOUT, HUGE, 0)
    layout = replace(LAYOUT, overhead_nbytes=max(0, budget - taken - room))  # so that `room` is left
    if room == HUGE:
        layout = replace(LAYOUT, overhead_nbytes=budget - taken - 4096)
    now = PlannerState(budget, layout, frozenset(), num_graphs=1, trained=CAPTURED.trained)
    request = decide(now, PhaseCalled(Forms(CAPTURED), held)).request
    assert (request.external_nbytes, request.spare_nbytes) == (planned, planned - held)


def test_a_cold_backward_is_asked_for_where_the_forward_left_other_chunks() -> None:
    request = decide(compiled(resident=frozenset()), PhaseCalled(Forms(CAPTURED), 0)).request
    plan = step_plan(CAPTURED, request, HARDWARE).plan
    assert EMPTY_CONTEXT.with_present(plan, plan.kept) == EMPTY_CONTEXT
    assert EMPTY_CONTEXT.with_present(plan, {*plan.kept, Chunk("param", 99)}).cold_backward


def test_plans_are_found_by_what_they_depend_on() -> None:
    """Of a layout, by its version; not by what else a session counts."""
    now = compiled()
    request = decide(now, PhaseCalled(Forms(CAPTURED), 64)).request
    same = decide(replace(now, num_graphs=7), PhaseCalled(Forms(CAPTURED), 64)).request
    assert request.key == same.key
    others = (
        replace(now, layout=replace(LAYOUT, version=LAYOUT.version + 1)),
        replace(now, budget_nbytes=now.budget_nbytes - 1),
        replace(now, resident=EVERYTHING - {0}),
    )
    assert len({decide(other, PhaseCalled(Forms(CAPTURED), 64)).request.key for other in (now, *others)}) == 4
    assert decide(now, PhaseCalled(Forms(CAPTURED), 0)).request.key != request.key


# --- the optimizer steps ---


def test_trained_residents_that_leave_for_an_update_are_due_as_well() -> None:
    alone = fixed_nbytes(LAYOUT, EVERYTHING)
    now = compiled(alone + 1000)
    stays = decide(now, UpdateDue((), 500))
    assert stays.planner_state is now
    assert stays.request is not None
    resident = EVERYTHING - {0}
    now = compiled(fixed_nbytes(LAYOUT, resident) + 1000, resident)
    left = decide(now, UpdateDue((0,), 0))
    assert left.request is None
    assert left.planner_state.resident < resident
    due = tuple(sorted(EVERYTHING - left.planner_state.resident))
    request = decide(left.planner_state, UpdateDue(due, 0)).request
    assert request.groups == due


def test_an_update_that_fits_beside_nobody_is_refused() -> None:
    now = compiled(fixed_nbytes(LAYOUT, frozenset()) + 1, frozenset())
    with pytest.raises(BudgetError) as error:
        decide(now, UpdateDue((0,), 0))
    needed = error.value.minimum_nbytes
    assert decide(replace(now, budget_nbytes=needed), UpdateDue((0,), 0)).request is not None


# --- gradients that the backward uses up ---


def beside(planner_state: PlannerState, transient: frozenset[int]) -> StepDecision:
    return decide(planner_state, PhaseCalled(Forms(CAPTURED), 0, PhaseContext(updates=((0, 1),), transient=transient)))


def test_more_stay_where_gradients_are_spent_and_none_are_where_all_fits() -> None:
    for_all = fixed_nbytes(LAYOUT, EVERYTHING) + max(p.non_model_nbytes for p in PASSES)
    found = decide(PlannerState(for_all), GraphCaptured(CAPTURED, LAYOUT, PhaseContext(transient=EVERYTHING)))
    assert (found.planner_state.resident, found.request.planner_state.layout.transient) == (EVERYTHING, frozenset())
    assert captured(PlannerState(for_all - 1)).planner_state.resident < EVERYTHING
    found = decide(PlannerState(for_all - 1), GraphCaptured(CAPTURED, LAYOUT, PhaseContext(transient=EVERYTHING)))
    assert found.planner_state.resident == found.request.planner_state.layout.transient == EVERYTHING
    assert found.planner_state.layout.transient == frozenset(), "that is each request's"
    after = beside(found.planner_state, EVERYTHING)
    assert (after.planner_state, after.request.planner_state.layout.transient) == (found.planner_state, EVERYTHING)
    step_plan(CAPTURED, after.request, HARDWARE)


def test_residents_gradients_are_spent_wherever_something_moves() -> None:
    """Also where all residents have room for them: what moves can use it."""
    rest = EVERYTHING - {0}
    after = beside(compiled(HUGE, rest), rest)
    assert (after.planner_state.resident, after.request.planner_state.layout.transient) == (rest, rest)
    assert beside(compiled(), EVERYTHING).request.planner_state.layout.transient == frozenset()
    later = decide(knowing(2, frozenset({1})), GraphCaptured(CAPTURED, LAYOUT, PhaseContext(transient=EVERYTHING)))
    assert (later.planner_state.resident, later.request.planner_state.layout.transient) == (rest, rest)


def test_whose_gradients_are_not_spent_any_more_makes_somebody_leave_for_good() -> None:
    for_all = fixed_nbytes(LAYOUT, EVERYTHING) + max(p.non_model_nbytes for p in PASSES)
    now = decide(
        PlannerState(for_all - 1), GraphCaptured(CAPTURED, LAYOUT, PhaseContext(transient=EVERYTHING))
    ).planner_state
    left = beside(now, frozenset())
    assert left.planner_state.resident < EVERYTHING
    assert left.request.planner_state.layout.transient == frozenset()
    back = beside(left.planner_state, EVERYTHING)
    assert back.planner_state.resident == left.planner_state.resident


def test_a_step_counts_no_gradients_that_were_used_up() -> None:
    needed = fixed_nbytes(replace(LAYOUT, transient=EVERYTHING), EVERYTHING) + LAYOUT.groups[0].slices[0].spec.nbytes
    now = compiled(needed, EVERYTHING - {0})
    found = decide(now, UpdateDue((0,), 0, transient=EVERYTHING - {0}))
    assert found.planner_state is now
    assert found.request.planner_state.layout.transient == EVERYTHING - {0}
    assert decide(now, UpdateDue((0,), 0)).planner_state.resident < now.resident


# --- nowhere else ---

DECIDING = {"check_minimum", "choose_resident", "remaining_residents", "remaining_residents_in_update", "check_update"}
PLANNING = {"plan_phases", "plan_update", "insert_events", "insert_update_events", "verify_phase"}
COUNTING = {"external_in_forward", "saved_nbytes"}
HOMES = [
    (DECIDING, {"policy.decide", "policy.needs"}),  # `needs` says what an error names, and decides nothing
    ({"begins_cold"}, {"policy.state"}),
    (PLANNING, {"policy.plans", "policy.step_seconds"}),  # `step_seconds` times plans for `policy`, and hands out none
    (COUNTING, {"policy.live_values", "policy.captured_step", "policy.needs"}),
]
"""Who may use which functions, above the rooms where they are defined."""


def used(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)


def foreign_decisions(source: str, module: str) -> set[str]:
    """What a module uses of functions that decide, plan or count, and may not."""
    names = set(used(source))
    return {name for functions, homes in HOMES if module not in homes for name in functions & names}


PACKAGE = Path(chunkc.policy.decide.__file__).parents[1]
ABOVE = {
    path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", "."): path
    for folder in (".", "policy", "tracing", "distributed", "session", "optim", "explaining")
    for path in sorted((PACKAGE / folder).glob("*.py"))
}


@pytest.mark.parametrize("module", ABOVE)
def test_nobody_else_decides(module: str) -> None:
    """Neither the backend nor `explain` has a decision of its own: both ask `policy`, `plans` and `live_values`."""
    assert not foreign_decisions(ABOVE[module].read_text(), module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("session.compiled_step", "from chunkc.passes.planning.residency import remaining_residents"),
        ("explaining.predicted_step", "from chunkc.passes import planning\nplanning.plan_phases()"),
        ("optim.step", "def own(plan):\n    return plan.begins_cold(())"),
        ("explaining.dry_run", "def own(captured):\n    return captured.external_in_forward(1, 2)"),
    ],
)
def test_a_decision_of_ones_own_would_be_seen(module: str, source: str) -> None:
    assert foreign_decisions(source, module)


def test_both_ask_the_same_one() -> None:
    asking = {module for module, path in ABOVE.items() if "decide" in set(used(path.read_text()))}
    own = {"policy.decide"}
    assert asking - own == {
        "compile", "session.compiled_step", "optim.step", "explaining.dry_run", "explaining.predicted_step"
    }  # fmt: skip
