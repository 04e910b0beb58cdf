"""What stays, what is cut and which plan is asked for, over graphs made by hand; and that nobody else decides it. The
smallest budget that is known; when it is known of a step of several graphs that all saved values fit.
"""

from __future__ import annotations

import ast
import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from verify_cases import HARDWARE, LAYOUT, NUM_LAYERS, backward_program, captured_step

import chunkc.policy.decide
from chunkc.ir.errors import BudgetError
from chunkc.ir.items import KEEP_ALL, ActivationPlan
from chunkc.ir.layout import Chunk, ChunkLayout, ParamSpec
from chunkc.ir.plan import Position
from chunkc.ir.program import BACKWARD, FORWARD
from chunkc.ir.shards import Shards
from chunkc.passes.planning.layout import EMPTY_LAYOUT, extended
from chunkc.passes.planning.room import Room, everything, fixed_nbytes
from chunkc.policy.captured_step import Captured, profile
from chunkc.policy.decide import EXTERNAL_GRANULES, decide, fits_whole, smallest_budget
from chunkc.policy.first_fit import first_that_fits
from chunkc.policy.graph_fraction import NEARLY_ALL, graph_fraction
from chunkc.policy.needs import Needs, SessionNeeds, StepNeeds
from chunkc.policy.plans import step_plan
from chunkc.policy.seen_steps import SeenForward, SeenSteps, covers_model, keeps_all
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
    minimum = Room.of(LAYOUT, HUGE).check_minimum(profile(CAPTURED, LAYOUT).all, all_may_be_resident=True)
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
    moving = Room.of(gaps, HUGE).check_minimum(needs.all)
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
    minimum = Room.of(LAYOUT, HUGE, 0, EVERYTHING).check_minimum(PASSES)
    now = compiled(minimum + 10)
    found = decide(now, PhaseCalled(Forms(CAPTURED), 10))
    assert found.planner_state is now
    assert found.captured is CAPTURED
    left = decide(now, PhaseCalled(Forms(CAPTURED), 11)).planner_state
    assert left.resident < EVERYTHING
    assert decide(left, PhaseCalled(Forms(CAPTURED), 0)).planner_state is left


def test_a_call_that_fits_nobody_names_the_smallest_budget() -> None:
    minimum = Room.of(LAYOUT, HUGE, 100).check_minimum(PASSES)
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
    tight = compiled(Room.of(LAYOUT, HUGE).check_minimum(PASSES))
    assert decide(tight, PhaseCalled(forms, 0)).captured is CAPTURED
    assert len(calls) == 1


def test_other_sizes_send_residents_home_for_the_update_as_well() -> None:
    least = Room.of(LAYOUT, HUGE, 0, EVERYTHING).check_minimum(profile(CAPTURED, LAYOUT).all)
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
    taken = Room.of(LAYOUT, HUGE).check_minimum(PASSES)
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

DECIDING = {"check_minimum", "choose_resident", "choose_replicated", "remaining_residents", "remaining_replicated"}
PLANNING = {"plan_phases", "plan_update", "insert_events", "insert_update_events", "verify_phase"}
COUNTING = {"external_in_forward", "saved_nbytes"}
HOMES = [
    (DECIDING, {"policy.decide", "policy.needs"}),  # `needs` says what an error names, and decides nothing
    ({"begins_cold"}, {"policy.state"}),
    (PLANNING, {"policy.plans"}),
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


# ---------------------------------------------------------------- the smallest budget that is known


def spec(name: str, numel: int) -> ParamSpec:
    return ParamSpec(name, (numel,), (1,), torch.float32, True)


def laid_out(*specs: ParamSpec, before: ChunkLayout = EMPTY_LAYOUT) -> ChunkLayout:
    return extended(before, specs, (), 4096)


TRAINED = {"a.weight"}
WEIGHTS = laid_out(spec("a.weight", 1024), spec("b.weight", 1024), spec("a.bias", 8))


def position(nbytes: int, *groups: int) -> Position:
    chunks = frozenset(Chunk("param", group) for group in groups)
    return Position("forward.0", "forward", nbytes, "aten.mm", "a", chunks, frozenset(), 0.0)


POSITIONS = (position(100, 0), position(50, 0, 1), position(3000))


def refused(nbytes: int) -> BudgetError:
    return BudgetError(minimum_nbytes=nbytes, budget_nbytes=1, moment="aten.mm", module="a", contents=[])


def named(known: SessionNeeds, error: BudgetError, needs: Needs, num_graphs: int) -> BudgetError:
    return known.named(error, PlannerState(1, WEIGHTS, num_graphs=num_graphs, trained=frozenset(TRAINED)), needs)


def never_described() -> Captured:
    raise AssertionError("an error takes no time to describe another form")


@pytest.mark.parametrize("external_nbytes", [0, 1000])
def test_the_minimum_of_one_graph_is_the_planners(external_nbytes: int) -> None:
    known, noted = SessionNeeds(), StepNeeds()
    assert known.minimum_nbytes(WEIGHTS, "keep") == 0
    noted.add(Needs.of(POSITIONS, WEIGHTS).plus(external_nbytes))
    known.note(noted)
    wanted = Room.of(WEIGHTS, 1 << 40, external_nbytes).check_minimum(POSITIONS, all_may_be_resident=True)
    assert known.minimum_nbytes(WEIGHTS, "keep") == wanted
    assert Needs.of(POSITIONS, WEIGHTS, external_nbytes) == Needs.of(POSITIONS, WEIGHTS).plus(external_nbytes)
    assert Needs.of((), WEIGHTS) == Needs()


def test_what_is_cut_over_ranks_moves_in_every_budget() -> None:
    """Where ranks are many, all that one has at home takes less room than a whole chunk."""
    layout = laid_out(replace(spec("a.weight", 64), shards=Shards((1024,), 16, 0)))
    known, noted, positions = SessionNeeds(), StepNeeds(), (position(100, 0),)
    noted.add(Needs.of(positions, layout))
    known.note(noted)
    assert known.minimum_nbytes(layout, "keep") == Room.of(layout, 1 << 40).check_minimum(positions)


def test_what_stays_for_good_counts_in_every_graph() -> None:
    """Also what a later graph has brought."""
    known, noted = SessionNeeds(), StepNeeds()
    noted.add(Needs.of(POSITIONS, WEIGHTS))
    known.note(noted)
    wider = laid_out(spec("c.bias", 8), before=WEIGHTS)
    assert (
        known.minimum_nbytes(wider, "keep") - known.minimum_nbytes(WEIGHTS, "keep") == 8 * 4 * 4 + 4
    )  # with gradient, states, step


def test_an_error_names_all_that_is_known_and_no_less_than_one_before() -> None:
    known, noted = SessionNeeds(), StepNeeds()
    noted.add(Needs.of(POSITIONS, WEIGHTS, 5000))
    known.note(noted)
    most = known.minimum_nbytes(WEIGHTS, "keep")
    first = named(known, refused(10), Needs(), 1)
    assert (first.minimum_nbytes, first.covers) == (most, "")
    second = named(known, refused(most + 7), Needs(), 2)
    assert (second.minimum_nbytes, second.covers) == (most + 7, "the 2 graphs compiled so far")
    third = named(known, refused(most + 1), Needs.of(POSITIONS, WEIGHTS, 2), 2)
    assert third.minimum_nbytes == most + 7 == known.minimum_nbytes(WEIGHTS, "keep")
    fourth = named(known, refused(10), Needs.of(POSITIONS, WEIGHTS, 9000), 2)
    assert fourth.minimum_nbytes == most + 4000


def test_a_first_graph_that_is_a_part_says_so() -> None:
    known = SessionNeeds()
    known.more_graphs_may_follow = True
    assert named(known, refused(10), Needs(), 1).covers == "the graph compiled so far"


def test_a_whole_graph_may_need_less_than_all_its_chunks_at_once() -> None:
    """An error does not name them: cut into segments, the graph would do with fewer."""
    whole, cut = ((position(50, 0, 1),), (position(50, 0), position(50, 1)))
    for is_whole, positions in ((True, whole), (False, cut)):
        known, noted = SessionNeeds(), StepNeeds(None, never_described if is_whole else None)
        noted.add(Needs.of(positions, WEIGHTS))
        known.note(noted)
        error = named(known, refused(1), Needs.of(cut, WEIGHTS), 1)
        assert error.minimum_nbytes == Room.of(WEIGHTS, 1 << 40).check_minimum(cut)


def test_a_whole_step_would_need_less_in_segments() -> None:
    """Each phase beside the most that was held in it, whatever the whole form took."""
    cut = captured_step()
    step = profile(cut, LAYOUT)
    known, noted = SessionNeeds(), StepNeeds(None, lambda: cut)
    noted.add(Needs(1 << 40, 1 << 40))
    known.note(noted)
    for phase, external_nbytes in ((FORWARD, 5), (FORWARD, 0), (BACKWARD, 1000), (BACKWARD, 7)):
        noted.ran(phase, EMPTY_CONTEXT, frozenset(), external_nbytes)
    needs = Needs.of(step.forward, LAYOUT, 5) | Needs.of(step.backward, LAYOUT, 1000)
    assert known.minimum_nbytes(LAYOUT, "keep") == needs.minimum_nbytes(LAYOUT)
    unbounded = StepNeeds(None, lambda: cut)
    unbounded.add(Needs(1 << 40, 1))
    known.note(unbounded)
    unbounded.ran(BACKWARD, EMPTY_CONTEXT, frozenset(), 1000)
    assert unbounded.least(LAYOUT, "keep").all_resident_nbytes == 1, "whole it may need less, too"


def test_a_step_that_is_gone_is_forgotten() -> None:
    known, noted = SessionNeeds(), StepNeeds()
    noted.add(Needs.of(POSITIONS, WEIGHTS))
    known.note(noted)
    del noted
    gc.collect()
    assert known.minimum_nbytes(WEIGHTS, "keep") == 0


def test_a_candidate_that_is_refused_keeps_nothing_once_another_fits() -> None:
    """An error has the frames that it went through, and these have the values of a call."""

    class Values:
        pass

    def call(budget_nbytes: int) -> weakref.ref[Values]:
        values = Values()
        found = first_that_fits((10, 1), lambda needed: needed if needed <= budget_nbytes else refuse(values))
        assert found == 1
        return weakref.ref(values)

    def refuse(values: Values) -> int:
        raise BudgetError(minimum_nbytes=10, budget_nbytes=1, moment="", module="", contents=())

    gc.collect()
    gc.disable()
    try:
        assert call(5)() is None
    finally:
        gc.enable()


# ---------------------------------------------------------------- steps that were seen

NAMES = tuple(LAYOUT.specs())
BACKWARD_PROGRAM = replace(backward_program(), gradient_outputs=tuple((0, "", name) for name in NAMES))
PART = replace(captured_step(), backward=BACKWARD_PROGRAM, graph_fraction=0.25)
MODEL_NBYTES = fixed_nbytes(LAYOUT, everything(LAYOUT))


def seen(names: tuple[str, ...] = NAMES, **changes: object) -> SeenForward:
    found = SeenForward.of(PART, KEEP_ALL, LAYOUT, 0)
    return replace(found, **{"parameters": frozenset(names), "graph_fraction": 1.0, **changes})  # type: ignore[arg-type]


def test_a_forward_is_seen_as_if_it_had_kept_all() -> None:
    most_nbytes = max(position.non_model_nbytes for position in profile(PART, LAYOUT).all)
    assert (seen().most_nbytes, seen().away_nbytes) == (most_nbytes, 0)
    away = ActivationPlan(frozenset(saved.storage for saved in PART.offloadable))
    found = SeenForward.of(PART, away, LAYOUT, 7)
    assert (found.most_nbytes, found.external_nbytes) == (most_nbytes, 7)
    assert found.away_nbytes == sum(saved.nbytes for saved in PART.offloadable)


def test_graphs_cover_a_model_by_the_elements_that_they_train() -> None:
    numel = [LAYOUT.specs()[name].whole_numel for name in NAMES]
    first = numel[0] / sum(numel)
    parts = [seen((NAMES[0],), graph_fraction=first), seen(NAMES[1:])]
    assert covers_model(parts, LAYOUT)
    assert not covers_model(parts[:1], LAYOUT)
    assert not covers_model([*parts[:1], *parts[:1]], LAYOUT)  # the same ones twice


def test_values_that_are_away_count_for_all_later_graphs() -> None:
    forwards = [
        seen(most_nbytes=100, external_nbytes=10, away_nbytes=50),
        seen(most_nbytes=20, external_nbytes=10, away_nbytes=0),
        seen(most_nbytes=100, external_nbytes=20, away_nbytes=1000),
    ]
    needed = MODEL_NBYTES + 100 + 20 + 50
    assert keeps_all(forwards, LAYOUT, needed)
    assert not keeps_all(forwards, LAYOUT, needed - 1)
    assert not keeps_all(forwards[:1], LAYOUT, MODEL_NBYTES + 109)


@pytest.mark.parametrize("external_nbytes", [0, 5])
def test_it_is_known_from_the_second_step_on_and_for_the_same_graph(external_nbytes: int) -> None:
    nearly, other = replace(PART, graph_fraction=0.99), replace(PART)
    budget_nbytes = MODEL_NBYTES + seen().most_nbytes + 5
    steps = SeenSteps()

    def step() -> list[bool]:
        known = [steps.forward_begins(graph, LAYOUT, budget_nbytes) for graph in (other, nearly)]
        steps.forward_ran(nearly, KEEP_ALL, LAYOUT, 0)
        steps.backward_ran(nearly, external_nbytes)
        return known

    assert [step(), step()] == [[False, False], [False, True]]
    external_nbytes = 6  # what a backward found is too much
    assert step() == [False, True]
    assert step() == [False, False]


def test_a_step_over_a_part_of_the_model_says_nothing() -> None:
    steps = SeenSteps()
    for _ in range(2):
        assert not steps.forward_begins(PART, LAYOUT, 1 << 40)
        steps.forward_ran(PART, KEEP_ALL, LAYOUT, 0)
        steps.backward_ran(PART, 0)


# ---------------------------------------------------------------- a captured graph before any plan

WHOLE = captured_step()


def test_the_bytes_of_a_forward_and_of_its_predecessors_outputs_are_its_own() -> None:
    """Input and output take 100 bytes each; the former call's outputs are in the forward's own bytes."""
    assert WHOLE.external_in_forward(0, 0) == 0
    assert WHOLE.external_in_forward(100, 100) == 0
    assert WHOLE.external_in_forward(107, 0) == 7
    assert WHOLE.external_in_forward(0, 4096) == 3996, "the input is a view of a larger tensor"
    assert WHOLE.external_in_forward(107, 103) == 10


def test_a_profile_is_made_once_for_a_layout() -> None:
    captured = replace(WHOLE)
    found = profile(captured, LAYOUT)
    assert profile(captured, LAYOUT) is found
    assert profile(captured, replace(LAYOUT, overhead_nbytes=1)) is found
    assert profile(captured, replace(LAYOUT, groups=(*LAYOUT.groups,))) is found
    assert profile(captured, replace(LAYOUT, transient=EVERYTHING)) is not found
    assert profile(captured, LAYOUT) is found


# ---------------------------------------------------------------- graph fraction


def test_trained_elements_count_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 8, bias=False))
    first, second, last = (layer.weight for layer in model)
    assert graph_fraction([model], [torch.randn(2), first]) == pytest.approx(1 / 4)
    assert graph_fraction([model], [first, second, first, 3]) == pytest.approx(1 / 2)
    last.requires_grad_(False)
    assert graph_fraction([model], [first, last]) == pytest.approx(1 / 2)


def test_nearly_all_is_all_and_so_is_nothing() -> None:
    model = nn.ParameterList(torch.randn(size) for size in (80, 20))
    assert NEARLY_ALL == 0.8
    assert graph_fraction([model], [model[0]]) == 1.0
    assert graph_fraction([model], [model[1]]) == pytest.approx(0.2)
    assert graph_fraction([model], []) == graph_fraction([], [model[1]]) == 1.0
