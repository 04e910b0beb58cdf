"""A compiled graph: the programs of its phases, its segments, and the plans made for it so far."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from chunkc.backward_kinds import GradModes, NodeHooks, accumulators
from chunkc.captured import Captured, fitting_form, plan_step, planned_with_room, profile, rewrite, verify
from chunkc.ir.chunks import ChunkLayout
from chunkc.ir.errors import BudgetError
from chunkc.ir.plan import Plan, Position
from chunkc.ir.program import BACKWARD, FORWARD
from chunkc.known_needs import Held, Needs, NotedNeeds, needs_of_step, update_needs
from chunkc.live_values import storages_nbytes
from chunkc.logs import log_plan
from chunkc.moving import stay
from chunkc.passes.planning import staying_beside
from chunkc.reconcile import gradients_of_several, reconcile
from chunkc.runtime.executor import Executable, Measurement, Run, lower
from chunkc.session import Session
from chunkc.steps import INPUTS, SizedStep, Steps
from chunkc.torch_private.engine import KEEPS_TANGENTS, hooks_of, tensor_use_count


@dataclass(frozen=True)
class PlannedPhase:
    """A phase under one plan: the rewritten graph, and its instructions."""

    graph: fx.GraphModule
    executable: Executable


@dataclass(frozen=True)
class PlannedStep:
    """A step under one plan, beside `held_nbytes` of others' values; `needs`: of each phase, without these."""

    plan: Plan
    phases: Mapping[str, PlannedPhase]
    needs: Mapping[str, Needs]
    held_nbytes: int


@dataclass(frozen=True)
class Around:
    """What of a phase's surroundings its plan depends on, beside the bytes that others hold.

    Attributes:
        cold_backward: the backward finds none of its chunks in a slot.
        hooked: parameters whose gradients are returned to autograd.
        kept_tangents: gradients of outputs that the caller keeps.
    """

    cold_backward: bool = False
    hooked: frozenset[str] = frozenset()
    kept_tangents: frozenset[str] = frozenset()

    def seen_by(self, captured: Captured) -> Captured:
        """The captured graph in these surroundings."""
        return captured.returning(self.hooked).holding(self.kept_tangents)


def planned_step(
    session: Session,
    layout: ChunkLayout,
    resident: frozenset[int],
    captured: Captured,
    held_nbytes: int = 0,
    around: Around = Around(),
) -> PlannedStep:
    """The verified plan of a step with this layout and these residents, whether parameters are there yet or not.

    Raises:
        BudgetError: there is none within the session's budget.
        VerificationError: a bug in the planner; nothing has run.
    """
    captured = around.seen_by(captured)
    plan = plan_step(
        captured,
        layout,
        budget_nbytes=session.budget_nbytes,
        resident=resident,
        hardware=session.hardware,
        held_nbytes=held_nbytes,
        cold_backward=around.cold_backward,
    )
    graphs = rewrite(captured, plan, layout, settling=session.early.wanted)
    if session.options.verify:
        verify(captured, plan, graphs, layout, held_nbytes=held_nbytes)
    log_plan(plan, graphs)
    runs = {name: segment.run for name, segment in captured.segments.items()}
    phases = {name: PlannedPhase(graph, lower(graph.graph, runs)) for name, graph in graphs.items()}
    step = profile(captured, layout)
    needs = {FORWARD: Needs.of(step.forward, layout), BACKWARD: Needs.of(step.backward, layout)}
    return PlannedStep(plan, phases, needs, held_nbytes)


@dataclass
class CompiledGraph:
    """Runs a captured graph under its session's budget, planning anew when what is around it changes."""

    session: Session
    steps: Steps
    captured: Captured
    """At the sizes of the latest call; before any, as it was traced."""

    def __post_init__(self) -> None:
        self._has_run = False
        self.grad_modes = GradModes()
        self._node_hooks = NodeHooks()
        self.session.num_graphs += 1
        self.session.trained |= self.captured.trained
        self._noted_update = NotedNeeds(whole=False)
        layout = self.session.store.layout
        self.session.known.note(self._noted_update, update_needs(self.captured, self.captured.trained, layout))
        used = {name for program in self.captured.programs.values() for name in program.parameters.values()}
        self._names = sorted(used | self.captured.trained)
        self._groups = layout.groups_of(self._names)

    # --- planning ---

    def admit(self, inputs: Sequence[Any]) -> None:
        """Before a call with `inputs`: where its sizes are new and need more room, residents move home for good.

        Raises:
            BudgetError: the call does not fit the budget; nothing has moved.
        """
        with self.session.entered():
            self._admit(inputs)

    def _admit(self, inputs: Sequence[Any]) -> None:
        step = self._step(INPUTS, inputs)
        if step.admitted != self.session.store.resident:
            session, layout = self.session, self.session.store.layout
            positions = profile(step.captured, layout).all
            try:
                resident, _ = staying_beside(positions, layout, session.budget_nbytes, 0, session.store.resident)
            except BudgetError as error:
                raise self._named(error, step, Held(0, 0)) from None
            stay(session, resident)
            step.admitted = session.store.resident

    def _step(self, where: str, arguments: Sequence[Any]) -> SizedStep:
        return self.steps.at(where, arguments, may_be_whole=self.session.all_may_stay())

    def plan(self, step: SizedStep, held_nbytes: int, around: Around = Around()) -> PlannedStep:
        """The verified plan beside `held_nbytes` of others' values.

        Raises:
            BudgetError: there is none within the budget.
            VerificationError: a bug in the planner; nothing has run.
        """
        session = self.session
        layout = session.store.layout
        key = (
            *(session.budget_nbytes, around, session.early.wanted, session.store.resident),
            *(len(layout.groups), len(layout.small), len(session.trained), session.num_restatements),
        )

        def planned(held_nbytes: int) -> PlannedStep:
            if (found := step.plans.find((held_nbytes, *key))) is not None:
                return found
            found = planned_step(session, layout, session.store.resident, step.captured, held_nbytes, around)
            return step.plans.keep((held_nbytes, *key), found)

        found = step.plans.find((held_nbytes, *key))
        if found is None:
            wider, spare_nbytes = planned_with_room(planned, held_nbytes, session.budget_nbytes)
            found = replace(wider, plan=wider.plan.beside_less(spare_nbytes), held_nbytes=held_nbytes)
            step.plans.keep((held_nbytes, *key), found)
        return found

    def _plan_beside(
        self, step: SizedStep, held_nbytes: Callable[[], int], around: Around, held: Callable[[], Held] | None = None
    ) -> PlannedStep:
        """`plan` beside what is held now. Before it refuses, values that only cycles of garbage keep are collected, and
        residents move home for good; a graph that is whole may have to be in segments from then on.

        `held`: what an error knows of both phases, by default that they are beside the same.
        """
        before_nbytes = held_nbytes()
        try:
            return self.plan(step, before_nbytes, around)
        except BudgetError:
            gc.collect()
        if held_nbytes() < before_nbytes:
            with suppress(BudgetError):
                return self.plan(step, held_nbytes(), around)
        try:
            self._make_room(step, held_nbytes(), around)
        except BudgetError as error:
            known = Held(held_nbytes(), held_nbytes()) if held is None else held()
            raise self._named(error, step, known, around) from None
        return self.plan(step, held_nbytes(), around)

    def _named(self, error: BudgetError, step: SizedStep, held: Held, around: Around = Around()) -> BudgetError:
        """The error to raise, with all that is known of the smallest budget."""
        session, (*_, in_segments) = self.session, step.forms
        needs = needs_of_step(around.seen_by(in_segments), session.trained, session.store.layout, held)
        return session.known.named(error, session.store.layout, needs, session.num_graphs)

    def _make_room(self, step: SizedStep, held_nbytes: int, around: Around) -> None:
        session, layout = self.session, self.session.store.layout

        def needs(captured: Captured) -> Sequence[Position]:
            return profile(around.seen_by(captured), layout).passes

        captured, resident = fitting_form(
            step.forms, needs, layout, session.budget_nbytes, held_nbytes, session.store.resident
        )
        stay(session, resident)
        step.become(captured)

    # --- running ---

    def forward(self, arguments: list[Any]) -> list[Any]:
        """The forward as AOTAutograd calls it: `arguments` is emptied."""
        with self.session.entered():
            return self._forward(arguments)

    def _forward(self, arguments: list[Any]) -> list[Any]:
        if not self._has_run:  # Dynamo's frames keep each other, the first batch and copies of random states alive
            self._has_run = True
            gc.collect()
        session, step = self.session, self._step(FORWARD, arguments)
        session.early.enter_forward(session, self._groups)
        session.store.release_slots()
        reconcile(session, self._names)
        inputs = [arguments[position] for position in step.positions.inputs]
        given_nbytes = storages_nbytes(inputs)

        def held() -> Held:
            return Held.around(step.captured, session.live.nbytes(leaving_out=inputs), given_nbytes)

        around = Around(hooked=self._hooked())
        planned = self._plan_beside(step, lambda: held().forward_nbytes, around, held)
        self.captured = captured = step.captured
        at = step.positions
        outputs = self._run(FORWARD, step, planned, arguments)
        session.live.watch(inputs)
        session.live.watch(outputs[position] for position in at.user_outputs)
        if at.saved:  # saved values live and die together: one stands for all
            session.live.watch([outputs[at.saved[0]]], captured.saved_nbytes)
        session.update_held_nbytes = captured.caller_nbytes
        if captured.backward is None:
            session.store.release_slots()
        else:
            session.early.leave_forward(self._groups)
        return outputs

    def backward(self, arguments: list[Any]) -> list[Any]:
        """The backward as AOTAutograd calls it: sunk gradients are in `.grad` when it returns, None stands for them."""
        with self.session.entered():
            return self._backward(arguments)

    def _backward(self, arguments: list[Any]) -> list[Any]:
        session, store = self.session, self.session.store
        step = self._step(BACKWARD, arguments)
        assert step.captured.backward is not None
        hooked = self._hooked() | self._hooked_nodes()
        session.early.enter_backward(session, self._groups)
        if reconcile(session, self._names):
            store.release_slots()  # what was kept there is not what the user has
        around = Around(hooked=hooked, kept_tangents=_kept_tangents(step.captured, arguments))

        def others_nbytes() -> int:
            return session.live.nbytes() - step.captured.between_nbytes

        def held_nbytes() -> int:
            return max(0, others_nbytes())

        planned = self._plan_beside(step, held_nbytes, around)
        if planned.plan.begins_cold(store.present):
            store.release_slots()
            planned = self._plan_beside(step, held_nbytes, replace(around, cold_backward=True))
        # Of a model in one graph it is the caller who lets go of outputs: the prediction is for one who does not.
        gone_nbytes = max(0, -others_nbytes()) if session.num_graphs > 1 else 0
        session.live.watch(arguments[-len(step.captured.tangents) :])  # in this run the program counts them
        outputs = self._run(BACKWARD, step, planned, arguments, gone_nbytes=gone_nbytes)
        if around.hooked:
            # Autograd will keep these as `.grad`, on the compute tier, until the next backward takes them home.
            session.live.watch(outputs[position] for position, _, name in self._sunk() if name in around.hooked)
        return outputs

    def _sunk(self) -> tuple[tuple[int, str, str], ...]:
        return self.captured.backward.gradient_outputs if self.captured.backward is not None else ()

    def _hooked(self) -> frozenset[str]:
        """Parameters whose gradients autograd must see: a hook wants them, or they add to a tensor of several."""
        store = self.session.store
        sunk = [name for _, _, name in self._sunk()]
        hooked = frozenset(name for name in sunk if hooks_of(store.parameter(name)))
        return hooked | gradients_of_several(self.session, sunk)

    def _hooked_nodes(self) -> frozenset[str]:
        """Of the backward that runs now: parameters whose gradients a hook of the node behind them wants.

        Raises:
            UnsupportedError: this kind of backward cannot run; nothing has changed.
        """
        self.grad_modes.refuse_graph()
        store = self.session.store
        return self._node_hooks.hooked(accumulators({name: store.parameter(name) for _, _, name in self._sunk()}))

    def _run(
        self, phase: str, step: SizedStep, planned: PlannedStep, arguments: list[Any], *, gone_nbytes: int = 0
    ) -> list[Any]:
        """Run a phase; `gone_nbytes`: what others hold is so much less than nothing, as values of its own are gone."""
        session = self.session
        session.known.note(step.noted, planned.needs[phase].beside(planned.held_nbytes))
        measurement = Measurement()
        session.store.tier.lap_peak_nbytes()
        plan = planned.plan.beginning_with(session.staying_gradients()).beside_less(gone_nbytes)
        run = Run(session.store, measurement, settled=partial(session.early.settled, session))
        outputs = planned.phases[phase].executable(arguments, run)
        session.record(phase, plan, measurement)
        return outputs


def _kept_tangents(captured: Captured, arguments: list[Any]) -> frozenset[str]:
    """Gradients of outputs that stay with whoever gave them, as in `out.backward(g)`: autograd lets go of its own,
    so that those have one reference, the one that `arguments` owns."""
    assert captured.backward is not None
    if KEEPS_TANGENTS:
        return frozenset()  # the program holds them all
    given = dict(zip(captured.backward.inputs, arguments))
    tangents = {name: given[name] for name in captured.tangents}
    return frozenset(
        name for name, value in tangents.items() if isinstance(value, torch.Tensor) and tensor_use_count(value) > 1
    )
