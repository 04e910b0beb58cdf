"""Run one step of an optimizer: find what is due, plan the updates in slots, and make all updates.

Updates in slots are planned, verified and run like any other phase. Whatever may fail for want of memory fails before
anything is updated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from chunkc.distributed.agreement import rendezvous
from chunkc.ir.errors import BudgetError
from chunkc.ir.plan import Tile, tiles_by_group
from chunkc.ir.program import UPDATE
from chunkc.kernels.formats import GradScale
from chunkc.optim.group_updates import slot_update, spans_of, update_tile
from chunkc.optim.memory_checks import aliased_by_gradients, check_in_place, check_memory
from chunkc.optim.over_ranks import begin_step, order_of_norms, ranks_of_norms
from chunkc.optim.rule import TileUpdate
from chunkc.optim.stepping import SteppingOptimizer
from chunkc.optim.update_scheduler import SessionUpdates, UpdateScheduler
from chunkc.optim.update_task import Task, UpdateTask, Where
from chunkc.policy.decide import decide
from chunkc.policy.needs import Needs
from chunkc.policy.plans import UpdatePlan, update_plan
from chunkc.policy.state import UpdateDue, UpdateRequest
from chunkc.runtime.execution.executor import Executable, Measurement, Run, lower
from chunkc.runtime.store.consumed_gradients import gradient_of
from chunkc.session.changes import detect_changes, gradients_left_to_autograd
from chunkc.session.residency import stay
from chunkc.session.session import Session, managing


@dataclass(frozen=True)
class Due:
    """The parameters that a step changes: those with a gradient.

    Attributes:
        chunked: those at home, by session and chunk group.
        in_place: the others.
        changing: all.
        aliased: those with a gradient that is their own memory.
    """

    chunked: dict[Session, dict[int, list[Task]]]
    in_place: list[Task]
    changing: list[torch.Tensor]
    aliased: list[Task]


def due_of(optimizer: SteppingOptimizer) -> Due:
    """Find what the optimizer's step changes.

    Raises:
        OptionsError, UnsupportedError: a parameter has a dtype that no update takes, or it or its gradient lies in
            memory in a way that no update can follow.
    """
    due = Due({}, [], [], [])
    tasks: list[Task] = []
    checked: set[torch.dtype] = set()
    for session, task in optimizer.tasks():
        parameter = task.parameter
        if parameter.grad is None:
            continue
        check_memory(optimizer, parameter, parameter.grad)
        if parameter.dtype not in checked:  # it may have been frozen when the optimizer was made
            optimizer.check_dtype(parameter)
            checked.add(parameter.dtype)
        tasks.append(task)
        if session is not None and session.store.views.is_managed(task.name):
            by_group = due.chunked.setdefault(session, {})
            by_group.setdefault(session.store.views.group_index(task.name), []).append(task)
        else:
            if gradient_of(parameter) is not None:
                check_in_place(optimizer, parameter, parameter.grad)
            due.in_place.append(task)
    due.changing.extend(task.parameter for task in tasks)
    aliased = set(map(id, aliased_by_gradients(optimizer, due.changing)))
    due.aliased.extend(task for task in tasks if id(task.parameter) in aliased)
    return due


@dataclass(frozen=True)
class PreparedUpdate:
    """Updates in slots that are sure to have their memory at home and in the budget; nothing is changed yet."""

    session: Session
    planned: UpdatePlan
    executable: Executable

    def run(self, updates: Mapping[int, TileUpdate]) -> None:
        """Update the groups, tile by tile, each inside the budget.

        Raises:
            HomeError, StreamError: a copy failed.
        """
        store = self.session.store
        store.release_slots()
        store.replicated.keep(self.planned.request.planner_state.layout.replicated)

        def update(tile: Tile) -> None:
            update_tile(store, updates[tile.group], tile)

        present = self.session.resident_gradients()
        plan = self.planned.plan.with_gradients(present)
        measurement = Measurement.beginning(store, plan.begin_nbytes(UPDATE, present))
        self.executable([], Run(store, measurement, update))
        self.session.records.note(UPDATE, plan, measurement)


class ResidentsLeft(Exception):
    """Residents have moved home to make room for an update: they are updated where they are now."""


def prepare_updates(session: Session, groups: Iterable[int], *, num_stages: int = 1) -> PreparedUpdate:
    """Plan the update of groups in slots, in stages (see `chunkc.ir.updates`).

    Raises:
        BudgetError: the slots of one tile do not fit with what the caller holds.
        HomeError: there is no room at home for the states.
        ResidentsLeft: there is room now.
    """
    in_order = tuple(sorted(groups))
    for group in in_order:
        session.store.reserve_states(group)
    session.live.watch(session.store.gradients.take_home())
    planner_state, external_nbytes = session.planner_state, session.live.external_to_update()
    transient = session.in_backward.transient(frozenset(), frozenset(), ())
    asked = UpdateRequest(planner_state, in_order, external_nbytes, num_stages, transient)
    prepared = session.update_plans.find(asked.key)
    if prepared is None:
        try:
            decision = decide(planner_state, UpdateDue(in_order, external_nbytes, num_stages, transient))
        except BudgetError as error:
            raise session.known.named(error, planner_state, Needs()) from None
        if decision.request is None:
            stay(session, decision.planner_state)
            raise ResidentsLeft
        planned = update_plan(decision.request, session.hardware, verified=session.options.verify)
        prepared = session.update_plans.keep(decision.request.key, (planned, lower(planned.graph, {})))
    return PreparedUpdate(session, *prepared)


@dataclass(frozen=True)
class SessionStep:
    """A session's part of a step.

    Attributes:
        session_updates: the optimizer's, in this session: those of the backward, and all at home.
        updates: at home, and in slots.
        in_slots: the plan of those in slots; None: there are none.
    """

    session_updates: SessionUpdates
    updates: Sequence[UpdateTask]
    in_slots: PreparedUpdate | None

    @property
    def at_home(self) -> list[UpdateTask]:
        """The updates by the CPU, at home."""
        return [update for update in self.updates if update.where is Where.HOME]


def take_over_changes(parameters: Sequence[torch.Tensor]) -> None:
    """Take over what the user has changed of parameters at home (see `chunkc.session.changes`)."""
    names: dict[Session, list[str]] = {}
    for parameter in parameters:
        if (home := managing(parameter)) is not None:
            names.setdefault(home[0], []).append(home[1])
    for session, of_session in names.items():
        session.store.trainers.claim(frozenset(of_session))
        detect_changes(session, of_session)
        gradients_left_to_autograd(session, of_session)


def prepare_step(scheduler: UpdateScheduler) -> tuple[Due, list[SessionStep]]:
    """Find and plan the updates of a step, once residents have moved home that had to make room for it.

    Raises:
        BudgetError, HomeError, OptionsError, UnsupportedError, DistributedError: see `ChunkedOptimizer.step`.
    """
    optimizer = scheduler.optimizer
    begin_step(optimizer)
    with rendezvous(ranks_of_norms(optimizer)) as compare:
        due, prepared = _prepared(scheduler)
        compare(lambda: order_of_norms(optimizer, prepared))
    return due, prepared


def _prepared(scheduler: UpdateScheduler) -> tuple[Due, list[SessionStep]]:
    while True:
        due = due_of(scheduler.optimizer)
        scheduler.collect(due.chunked, due.in_place)
        try:
            return due, [_prepare(scheduler.in_session(session), tasks) for session, tasks in due.chunked.items()]
        except ResidentsLeft:
            continue


def _prepare(session_updates: SessionUpdates, by_group: Mapping[int, list[Task]]) -> SessionStep:
    """Prepare a session's part. What the backward began counts: where a group is updated does not depend on when."""
    optimizer, session, store = session_updates.optimizer, session_updates.session, session_updates.session.store
    groups, num_stages, begun = (
        store.layout.groups,
        optimizer.rule.num_stages,
        session_updates.begun.keys() - store.resident,
    )
    session.unfreeze({task.name for index in by_group if not groups[index].trainable for task in by_group[index]})
    optimizer.lay_out([task.parameter for tasks in by_group.values() for task in tasks])
    groups, indices = store.layout.groups, sorted({*by_group, *begun})
    home = optimizer.overlap.at_home(
        [groups[index] for index in indices], session.hardware, home=session.options.home, num_stages=num_stages
    )
    session_updates.prepare(indices, home)
    by_group = dict(sorted(by_group.items()))
    for index in by_group:
        store.updates.wait(index)
        session.keepers.keep(optimizer, index, [task.name for task in by_group[index]])
    for index in sorted(home - begun):
        store.reserve_states(index)
    in_slots = [index for index in by_group if index not in home]
    planned = prepare_updates(session, in_slots, num_stages=num_stages) if in_slots else None
    updates = [
        UpdateTask.of(session, index, tasks, Where.HOME if index in home else Where.SLOTS)
        for index, tasks in by_group.items()
    ]
    return SessionStep(session_updates, updates, planned)


def update_chunks(part: SessionStep, scale: GradScale) -> None:
    """Begin the CPU's updates of a session's groups, and run the device's; `wait_after_step` is left to the caller.

    The CPU begins when all that was computed before the step has arrived at home.
    """
    optimizer, session, at_home = part.session_updates.optimizer, part.session_updates.session, part.at_home
    store, updates = session.store, {update.group: update for update in part.updates}
    for update in part.updates:
        update.spans = spans_of(optimizer, session, update)
    if at_home:
        store.release_slots()
        for update in at_home:
            store.gradients.collect(update.group)
        part.session_updates.update_at_home(at_home, scale, store.tier.mark())
    if part.in_slots is not None:
        tiles_of = tiles_by_group(part.in_slots.planned.tiles)
        part.in_slots.run({i: slot_update(optimizer, store, updates[i], tiles_of[i], scale) for i in tiles_of})
