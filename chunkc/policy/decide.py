"""What stays resident, what is compiled whole, and which plan is asked for: decided here and nowhere else.

A pure state machine that is driven twice: by what happens in training (`compilation`, `graph`, `optim.step`), and by
what a step on fake tensors says will happen (`explaining.dry_run_state`). A `PlannerState` is what a model has come to.
An event is what happens next. `decide` answers with a decision: the situation from then on, and a request for a plan.
Who drives it acts: compiles, moves residents home, makes the plan, runs it.

| event | what is decided |
|---|---|
| `GraphCaptured` | who stays, among those that stay so far and the groups that are new; the first plan |
| `SizesCalled` | with dynamic shapes: who leaves where a call's sizes need more room |
| `PhaseCalled` | beside what others hold: who leaves, whether a whole graph is cut, and the plan |
| `UpdateDue` | who leaves for the optimizer's step, and is due then as well; or the plan |

How many bytes others hold is counted by `live_values`, for both drivers too. An event that does not fit raises
`BudgetError`, and the situation stays what it was. Residents only ever leave: one that came back would move again as
soon as the same room was needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import overload

from chunkc.ir.errors import BudgetError
from chunkc.ir.layout import ChunkLayout
from chunkc.ir.plan import Position
from chunkc.passes.planning.residency import (
    check_minimum,
    choose_replicated,
    choose_resident,
    everything,
    fixed_nbytes,
    remaining_replicated,
    remaining_residents,
)
from chunkc.passes.planning.updates import check_update, remaining_replicated_in_update, remaining_residents_in_update
from chunkc.policy.activation_search import SearchSpace, activation_plans, first_or_quickest, leanest_form
from chunkc.policy.captured_step import Captured, profile
from chunkc.policy.first_fit import first_that_fits
from chunkc.policy.state import (
    Event,
    GraphCaptured,
    PhaseCalled,
    PhaseContext,
    PlannerState,
    SizesCalled,
    StepDecision,
    StepRequest,
    UpdateDecision,
    UpdateDue,
    UpdateRequest,
    transient_in,
)
from chunkc.policy.step_seconds import step_s

EXTERNAL_GRANULES = 256
"""Plans are made for what others hold rounded up to this part of the budget, where that fits: a program that keeps a
few more values each step, such as losses, does not replan every time."""


@overload
def decide(planner_state: PlannerState, event: UpdateDue) -> UpdateDecision: ...


@overload
def decide(planner_state: PlannerState, event: GraphCaptured | SizesCalled | PhaseCalled) -> StepDecision: ...


def decide(planner_state: PlannerState, event: Event) -> StepDecision | UpdateDecision:
    """What follows from an event.

    Raises:
        BudgetError: it does not fit the budget, whoever leaves.
    """
    match event:
        case GraphCaptured():
            return _captured(planner_state, event)
        case SizesCalled():
            return _beside(planner_state, event.captured, PhaseContext(transient=event.transient), 0, exact=True)
        case PhaseCalled():
            return _phase(planner_state, event)
        case UpdateDue():
            return _update(planner_state, event)


def _captured(now: PlannerState, event: GraphCaptured) -> StepDecision:
    """Any group may stay that is new and not cut over ranks; of the others those that stay so far. Any may stand whole
    that is new and cut, where no stage is forced; of the others those that do so far."""
    captured, layout = event.captured, event.layout.with_replicated(())
    num_known = len(now.layout.groups) if now.num_graphs else 0
    new = layout.groups[num_known:]
    allowed = now.resident | (frozenset(group.index for group in new) - layout.cut)
    may_replicate = now.layout.replicated_by_choice.union(group.index for group in new if group.may_replicate)
    all_may_be_resident = len(allowed) == len(layout.groups)
    least = profile(leanest_form(captured, now.activations, layout), layout).all
    check_minimum(least, layout, now.budget_nbytes, 0, all_may_be_resident=all_may_be_resident)
    after = replace(now, layout=layout, num_graphs=now.num_graphs + 1, trained=now.trained | captured.trained)

    # A group with a parameter that gets no gradient here is not updated in this backward, and has its other gradients.
    transient = transient_in(layout, event.context.transient, captured.trained, frozenset(), event.context.transient)

    def decision(context: PhaseContext) -> StepDecision:
        seen = context.applied_to(captured)
        needs = profile(seen, layout).all
        check_minimum(needs, layout, now.budget_nbytes, 0, all_may_be_resident=all_may_be_resident)
        resident, transient = choose_resident(needs, layout, now.budget_nbytes, allowed), frozenset[int]()
        if resident != everything(layout) and (transient := context.transient & allowed):
            spending = replace(layout, transient=transient)
            resident = choose_resident(profile(seen, spending).all, spending, now.budget_nbytes, allowed)
        chosen = choose_replicated(needs, layout, now.budget_nbytes, may_replicate)
        found = replace(after, layout=chosen, resident=resident)
        return StepDecision(found, captured, StepRequest(_spending(found, transient), context=context))

    return _chosen(after, captured, replace(event.context, transient=transient), 0, allowed, decision)


def _phase(now: PlannerState, event: PhaseCalled) -> StepDecision:
    """The first of a graph's forms that fits."""
    return first_that_fits(event.forms, lambda captured: _beside(now, captured, event.context, event.external_nbytes))


def _beside(
    now: PlannerState, captured: Captured, context: PhaseContext, external_nbytes: int, *, exact: bool = False
) -> StepDecision:
    """A graph beside what others hold, from which residents may have to leave; `exact`: without room for more."""

    def decision(context: PhaseContext) -> StepDecision:
        def needs_of(layout: ChunkLayout) -> Sequence[Position]:
            step = profile(context.applied_to(captured), layout)
            return step.backward if context.cold_backward else step.passes

        layout = remaining_replicated(needs_of(now.layout), now.layout, now.budget_nbytes, external_nbytes)
        transient = context.transient & now.resident
        if now.resident == everything(layout) and _all_stay(needs_of(layout), layout, now, external_nbytes):
            transient = frozenset()
        needs = needs_of(spending := replace(layout, transient=transient))
        resident, _ = remaining_residents(needs, spending, now.budget_nbytes, external_nbytes, now.resident)
        is_same = (resident, layout.replicated_by_choice) == now.residency
        after = now if is_same else replace(now, layout=layout, resident=resident)
        asked = _spending(after, transient)
        room_nbytes = external_nbytes if exact else _with_room(asked, needs, external_nbytes)
        return StepDecision(after, captured, StepRequest(asked, room_nbytes, room_nbytes - external_nbytes, context))

    return _chosen(now, captured, context, external_nbytes, now.resident, decision)


def _spending(now: PlannerState, transient: frozenset[int]) -> PlannerState:
    """The situation of a request whose backward uses up these groups' gradients where they stay."""
    return replace(now, layout=replace(now.layout, transient=transient)) if transient else now


def _all_stay(needs: Sequence[Position], layout: ChunkLayout, now: PlannerState, external_nbytes: int) -> bool:
    """Whether there is room for all residents, with those of their gradients that the layout says."""
    with suppress(BudgetError):
        check_minimum(needs, layout, now.budget_nbytes, external_nbytes, now.resident)
        return True
    return False


def _chosen(
    now: PlannerState,
    captured: Captured,
    context: PhaseContext,
    external_nbytes: int,
    allowed: frozenset[int],
    decision: Callable[[PhaseContext], StepDecision],
) -> StepDecision:
    """What may become of the values that a graph saves: the first that fits, or under "auto" the quickest.

    Args:
        allowed: groups that may stay.
        decision: what follows from one; raises `BudgetError` where it does not fit.
    """
    if context.activation_plan is not None:
        return decision(context)
    layout, hardware, mixes = replace(now.layout, transient=context.transient), now.hardware, None
    if now.activations == "auto" and hardware is not None:
        sizes, with_shadow_copies = (now.budget_nbytes, external_nbytes), bool(context.undoable)
        consumed = frozenset(group for group, _ in context.updates) - context.undoable - layout.cut
        mixes = SearchSpace(
            captured, layout, allowed, *sizes, hardware, consumed=consumed, with_shadow_copies=with_shadow_copies
        )

    def seconds(one: StepDecision, most_s: float) -> float:
        assert hardware is not None
        seen, room_nbytes = one.request.context.applied_to(captured), now.budget_nbytes - one.request.external_nbytes
        planned, resident = one.request.planner_state.layout, one.planner_state.resident
        updates, undoable = dict(context.updates), context.undoable
        return step_s(seen, planned, resident, hardware, room_nbytes, updates, most_s, undoable=undoable)

    return first_or_quickest(
        activation_plans(captured, now.activations, layout),
        mixes,
        lambda absent: decision(replace(context, activation_plan=absent)),
        seconds,
        lambda one: one.planner_state.resident,
    )


def _with_room(now: PlannerState, needs: Sequence[Position], external_nbytes: int) -> int:
    """What others hold, with room for a little more of it where that fits (see `EXTERNAL_GRANULES`)."""
    granule = max(1, now.budget_nbytes // EXTERNAL_GRANULES)
    wider_nbytes = -(-external_nbytes // granule) * granule
    if wider_nbytes != external_nbytes and _all_stay(needs, now.layout, now, wider_nbytes):
        return wider_nbytes
    return external_nbytes


def _update(now: PlannerState, event: UpdateDue) -> UpdateDecision:
    """Trained residents that leave are due as well. What ranks have whole gives its room back for the step where that
    is needed: after it, all of it that is trained is gathered anew."""
    asked = now.budget_nbytes, event.external_nbytes, now.resident, event.num_stages
    before = replace(now.layout, transient=event.transient)
    layout = remaining_replicated_in_update(
        before, event.groups, now.budget_nbytes, event.external_nbytes, event.num_stages
    )
    try:
        check_update(layout, event.groups, *asked)
    except BudgetError:
        trained = now.layout.groups_of(now.trained) - event.transient
        staying = remaining_residents_in_update(before, event.groups, trained, *asked)
        if staying == now.resident:
            raise
        return UpdateDecision(replace(now, resident=staying), None)
    return UpdateDecision(
        now,
        UpdateRequest(
            replace(now, layout=layout), event.groups, event.external_nbytes, event.num_stages, event.transient
        ),
    )


# --- before there is a graph: whole or in segments ---


def fits_whole(layout: ChunkLayout, budget_nbytes: int, captured: Captured | None = None) -> bool:
    """Whether all model data can stay on the compute tier, beside what a graph needs that is compiled whole; without
    one: as far as model data alone tells. A part of a model leaves room for what others save."""
    if layout.cut:
        return False
    all_resident_nbytes = fixed_nbytes(layout, everything(layout))
    positions = () if captured is None else profile(captured, layout).all
    most_nbytes = max((position.non_model_nbytes for position in positions), default=0)
    other_graphs_nbytes = 0 if captured is None else captured.other_graphs_nbytes
    return all_resident_nbytes + most_nbytes + other_graphs_nbytes <= budget_nbytes


def smallest_budget(captured: Captured, layout: ChunkLayout) -> int:
    """The smallest budget for a graph by itself, of which any group may stay."""
    try:
        return check_minimum(
            profile(captured, layout).all, layout.with_replicated(()), 0, 0, all_may_be_resident=not layout.cut
        )
    except BudgetError as error:
        return error.minimum_nbytes
