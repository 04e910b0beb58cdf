"""Decide which groups are resident, whether a graph is compiled whole, and which plan to make: here and nowhere else.

A pure state machine with two drivers: training (`compile`, `session.compiled_step`, `optim.step`), and a step on fake
tensors (`explaining.dry_run`). A `PlannerState` describes a model so far, an event says what happens next. `decide`
answers with a decision: the state from then on, and a request for a plan. The driver acts: it compiles, moves residents
home, makes the plan and runs it.

| event | what is decided |
|---|---|
| `GraphCaptured` | the residents, among those so far and new groups; the first plan |
| `SizesCalled` | with dynamic shapes: the residents to evict where a call's sizes need more room |
| `PhaseCalled` | with the external bytes: the residents to evict, whether a whole graph is cut, and the plan |
| `UpdateDue` | the residents to evict for the optimizer's step, which are due then as well; or the plan |

External bytes are counted by `live_values`, for both drivers. An event that does not fit raises `BudgetError`, and the
state stays what it was. Groups never become resident again: they would move again as soon as the same room was needed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import overload

from chunkc.ir.errors import BudgetError
from chunkc.ir.items import KEEP_ALL, ActivationPlan
from chunkc.ir.layout import ChunkLayout
from chunkc.ir.plan import Position
from chunkc.passes.planning.residency import (
    choose_replicated,
    choose_resident,
    remaining_replicated,
    remaining_residents,
)
from chunkc.passes.planning.room import Room, everything, tightest
from chunkc.passes.planning.updates import smallest_update
from chunkc.policy.activation_search import SearchSpace, activation_plans, first_or_quickest, may_keep
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
"""Plans round external bytes up to the budget divided by this, where that fits: a program that keeps a few more values
each step, such as losses, does not replan every time."""


@overload
def decide(planner_state: PlannerState, event: UpdateDue) -> UpdateDecision: ...


@overload
def decide(planner_state: PlannerState, event: GraphCaptured | SizesCalled | PhaseCalled) -> StepDecision: ...


def decide(planner_state: PlannerState, event: Event) -> StepDecision | UpdateDecision:
    """Return the decision for an event.

    Raises:
        BudgetError: it does not fit the budget, whichever residents are evicted.
    """
    match event:
        case GraphCaptured():
            return _captured(planner_state, event)
        case SizesCalled():
            return _with_external(planner_state, event.captured, PhaseContext(transient=event.transient), 0, exact=True)
        case PhaseCalled():
            return _phase(planner_state, event)
        case UpdateDue():
            return _update(planner_state, event)


def _captured(now: PlannerState, event: GraphCaptured) -> StepDecision:
    """Choose residents and replicated groups for a model with one more graph.

    Residents are chosen among those so far and new groups that are not cut over ranks; replicated groups among those so
    far and new groups that are cut and have no forced ZeRO stage.
    """
    captured, layout = event.captured, event.layout.with_replicated(())
    num_known = len(now.layout.groups) if now.num_graphs else 0
    new = layout.groups[num_known:]
    allowed = now.resident | (frozenset(group.index for group in new) - layout.cut)
    may_replicate = now.layout.replicated_by_choice.union(group.index for group in new if group.may_replicate)
    all_may_be_resident = len(allowed) == len(layout.groups)
    after = replace(now, layout=layout, num_graphs=now.num_graphs + 1, trained=now.trained | captured.trained)

    # A group with a parameter that gets no gradient here is not updated in this backward, and keeps the others'
    # gradients.
    transient = transient_in(layout, event.context.transient, captured.trained, frozenset(), event.context.transient)

    def decision(context: PhaseContext) -> StepDecision:
        form = context.applied_to(captured)
        needs = profile(form, layout).all
        room = Room.of(layout, now.budget_nbytes)
        room.check_minimum(needs, all_may_be_resident=all_may_be_resident)
        resident, transient = choose_resident(needs, room, allowed), frozenset[int]()
        if resident != everything(layout) and (transient := context.transient & allowed):
            with_transient = replace(layout, transient=transient)
            resident = choose_resident(profile(form, with_transient).all, room.of_layout(with_transient), allowed)
        replicated = choose_replicated(needs, room, may_replicate)
        state = replace(after, layout=replicated, resident=resident)
        return StepDecision(state, captured, StepRequest(_with_transient(state, transient), context=context))

    return _choose_activations(after, captured, replace(event.context, transient=transient), 0, allowed, decision)


def _phase(now: PlannerState, event: PhaseCalled) -> StepDecision:
    """Decide for the first of a graph's forms that fits."""
    return first_that_fits(
        event.forms, lambda captured: _with_external(now, captured, event.context, event.external_nbytes)
    )


def _with_external(
    now: PlannerState, captured: Captured, context: PhaseContext, external_nbytes: int, *, exact: bool = False
) -> StepDecision:
    """Decide for a graph with external bytes, evicting residents where needed; `exact`: leave no room for more."""

    def decision(context: PhaseContext) -> StepDecision:
        def needs_of(layout: ChunkLayout) -> Sequence[Position]:
            step = profile(context.applied_to(captured), layout)
            return step.backward if context.cold_backward else step.passes

        room = now.room(external_nbytes)
        layout = remaining_replicated(needs_of(now.layout), room)
        room, transient = room.of_layout(layout), context.transient & now.resident
        if now.resident == everything(layout) and room.fits(tightest(needs_of(layout))):
            transient = frozenset()
        needs = needs_of(with_transient := replace(layout, transient=transient))
        resident = remaining_residents(needs, room.of_layout(with_transient))
        is_same = (resident, layout.replicated_by_choice) == now.residency
        after = now if is_same else replace(now, layout=layout, resident=resident)
        asked = _with_transient(after, transient)
        room_nbytes = external_nbytes if exact else _with_room(asked, needs, external_nbytes)
        return StepDecision(after, captured, StepRequest(asked, room_nbytes, room_nbytes - external_nbytes, context))

    return _choose_activations(now, captured, context, external_nbytes, now.resident, decision)


def _with_transient(now: PlannerState, transient: frozenset[int]) -> PlannerState:
    """Return the state for a request in which the backward consumes these resident groups' gradients."""
    return replace(now, layout=replace(now.layout, transient=transient)) if transient else now


def _choose_activations(
    now: PlannerState,
    captured: Captured,
    context: PhaseContext,
    external_nbytes: int,
    allowed: frozenset[int],
    decision: Callable[[PhaseContext], StepDecision],
) -> StepDecision:
    """Decide with the first activation plan that fits, or under "auto" with the quickest.

    If all values can be kept and all groups can be resident, that is the quickest, without a search.

    Args:
        allowed: groups that may be resident.
        decision: for a context with an activation plan; raises `BudgetError` where it does not fit.
    """
    if context.activation_plan is not None:
        return decision(context)
    step_fits, context = context.step_fits, replace(context, step_fits=False)
    layout, hardware = replace(now.layout, transient=context.transient), now.hardware
    kept: StepDecision | None = None
    keeps = now.activations == "auto" and (step_fits or may_keep(captured, Room.of(layout, now.budget_nbytes)))
    if keeps:
        with suppress(BudgetError):
            kept = decision(replace(context, activation_plan=KEEP_ALL))
            if kept.planner_state.resident == allowed:  # no other plan can be quicker: none is made
                return kept

    def decided(activation_plan: ActivationPlan) -> StepDecision:
        if kept is not None and not activation_plan:
            return kept
        return decision(replace(context, activation_plan=activation_plan))

    plans = activation_plans(captured, now.activations, layout)
    if now.activations != "auto" or hardware is None:
        return first_that_fits(plans, decided)
    if shadow_copied := context.undoable:  # then groups that other graphs train are taken to have them, too
        trained = layout.groups_of(captured.trained)
        shadow_copied |= {group.index for group in layout.trainable_groups} - trained
    space = SearchSpace(
        captured,
        Room.of(layout, now.budget_nbytes, external_nbytes),
        allowed,
        hardware,
        consumed=frozenset(group for group, _ in context.updates) - context.undoable - layout.cut,
        shadow_copied=shadow_copied,
        may_keep=keeps,
        num_stages=now.num_stages,
    )

    def checked(activation_plan: ActivationPlan) -> StepDecision:
        found = decided(activation_plan)
        space.check_host(activation_plan, found.planner_state.resident)
        return found

    def seconds(found: StepDecision, most_s: float) -> float:
        return step_s(found.request.context.applied_to(captured), found.request, hardware, most_s)

    return first_or_quickest(plans, space, checked, seconds)


def _with_room(now: PlannerState, needs: Sequence[Position], external_nbytes: int) -> int:
    """Round external bytes up where that fits (see `EXTERNAL_GRANULES`)."""
    granule = max(1, now.budget_nbytes // EXTERNAL_GRANULES)
    wider_nbytes = -(-external_nbytes // granule) * granule
    if wider_nbytes != external_nbytes and now.room(wider_nbytes).fits(tightest(needs)):
        return wider_nbytes
    return external_nbytes


def _update(now: PlannerState, event: UpdateDue) -> UpdateDecision:
    """Request the optimizer's step, or evict trained residents, which are due as well then.

    Replicated groups give their room back for the step if it is needed: trained ones are gathered anew after it.
    """
    before = now.room().of_layout(replace(now.layout, transient=event.transient))

    def needs(groups: Collection[int]) -> Sequence[Position]:
        return smallest_update(before.layout, sorted(groups), event.external_nbytes, event.num_stages)

    layout = remaining_replicated(needs(event.groups), before)
    try:
        before.of_layout(layout).check_minimum(needs(event.groups))
    except BudgetError:
        trained = now.resident & (now.layout.groups_of(now.trained) - event.transient)
        resident = remaining_residents(needs(trained.union(event.groups)), before)
        if resident == now.resident:
            raise
        return UpdateDecision(replace(now, resident=resident), None)
    return UpdateDecision(
        now,
        UpdateRequest(
            replace(now, layout=layout), event.groups, event.external_nbytes, event.num_stages, event.transient
        ),
    )


# --- before there is a graph: whole or in segments ---


def fits_whole(layout: ChunkLayout, budget_nbytes: int, captured: Captured | None = None) -> bool:
    """Whether all model data can stay on the compute tier, with the bytes of a whole graph.

    Without a graph only model data counts. One of several graphs leaves room for values that the others save.
    """
    if layout.cut:
        return False
    other_graphs_nbytes = 0 if captured is None else captured.other_graphs_nbytes
    room = Room.of(layout, budget_nbytes, other_graphs_nbytes, everything(layout))
    most_nbytes = 0 if captured is None else profile(captured, layout).most_nbytes
    return most_nbytes <= room.left_nbytes


def smallest_budget(captured: Captured, layout: ChunkLayout) -> int:
    """Return the smallest budget for a graph by itself; all of its groups may be resident."""
    room = Room.of(layout.with_replicated(()))
    return room.minimum_nbytes(profile(captured, layout).all, all_may_be_resident=not layout.cut)
