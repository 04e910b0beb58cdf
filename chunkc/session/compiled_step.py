"""A compiled graph: the programs of its phases, its segments, and the plans made for it so far."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from chunkc.distributed.agreement import agree
from chunkc.ir.errors import BudgetError, UnsupportedError
from chunkc.ir.items import KEEP_ALL
from chunkc.ir.plan import Plan
from chunkc.ir.program import BACKWARD, FORWARD
from chunkc.policy.activation_search import leanest_form
from chunkc.policy.captured_step import Captured
from chunkc.policy.decide import decide
from chunkc.policy.needs import ExternalBytes, StepNeeds, needs_of_step, update_needs
from chunkc.policy.plans import step_plan
from chunkc.policy.remedies import explained
from chunkc.policy.state import (
    EMPTY_CONTEXT,
    Forms,
    PhaseCalled,
    PhaseContext,
    SizesCalled,
    StepDecision,
    StepRequest,
)
from chunkc.runtime.execution.executor import Executable, lower
from chunkc.runtime.execution.run import Measurement, Run
from chunkc.runtime.execution.saved import SavedValues, saved_values
from chunkc.runtime.store.shards import leaf_of
from chunkc.session.changes import detect_changes, forget_gradients, gradients_left_to_autograd
from chunkc.session.logs import log_plan
from chunkc.session.rank_phases import Code, PhaseOfRanks, before_layers
from chunkc.session.residency import stay
from chunkc.session.session import Session
from chunkc.torch_private.engine import (
    KEEPS_TANGENTS,
    has_saved_tensor_hooks,
    hooks_of,
    keeps_graph,
    storage_use_count,
    tensor_use_count,
)
from chunkc.tracing.autograd_checks import Asked, NodeHooks, OutputHooks, asked_of
from chunkc.tracing.steps import INPUTS, SizedStep, Steps

ALL_ADDED = Asked({})
"""Of a backward that is yet to come: what `backward()` does."""


def _leave_alone(group: int) -> None:
    """Begin no update of a group with complete gradients: the optimizer's step is not to have them."""


@dataclass(frozen=True)
class PlannedStep:
    """A step under the requested plan, and each phase's instructions."""

    request: StepRequest
    plan: Plan
    phases: Mapping[str, Executable]

    def without_spare(self, request: StepRequest) -> PlannedStep:
        """Return the step under the plan, which was made for an equal request, without what this one has to spare."""
        return replace(self, request=request, plan=self.plan.with_less_external(request.spare_nbytes))


def planned_step(session: Session, captured: Captured, request: StepRequest) -> PlannedStep:
    """Make the requested plan of a step and verify it; parameters need not have moved yet.

    Raises:
        VerificationError: a bug in the planner; nothing has run.
    """
    made = step_plan(captured, request, session.hardware, verified=session.options.verify)
    log_plan(made.plan, made.graphs)
    runs = {name: segment.run for name, segment in captured.segments.items()}
    phases = {name: lower(graph.graph, runs) for name, graph in made.graphs.items()}
    return PlannedStep(request, made.plan, phases)


@dataclass
class CompiledGraph:
    """A captured graph that runs under its session's budget, and is planned anew when the planner's inputs change."""

    session: Session
    steps: Steps
    captured: Captured
    """At the sizes of the latest call; before any, as it was traced."""

    code: Code | None = None
    """As ranks compare it; None: one process trains the model."""

    is_clean: bool = False
    """Whether tracing has left no garbage: Dynamo's frames keep each other, the first batch and copies of random states
    alive, until the first forward collects them."""

    def __post_init__(self) -> None:
        self.number = self.session.num_graphs
        self.output_hooks = OutputHooks(self._given)
        self._node_hooks = NodeHooks()
        self._noted_update = StepNeeds()
        layout, always_nbytes = self.session.store.layout, self.session.live.constants_nbytes()
        needs = update_needs(self.captured, self.captured.trained, layout).plus(always_nbytes)
        self._noted_update.add(needs)
        self.session.known.note(self._noted_update)
        used = {name for program in self.captured.programs.values() for name in program.parameters.values()}
        self._all_names = frozenset(used | self.captured.trained)
        self._names = sorted(self._all_names)
        self._called_in = threading.get_ident()
        self._groups = layout.groups_of(self._names)

    # --- planning ---

    def admit(self, inputs: Sequence[Any]) -> None:
        """Prepare a call with `inputs`: if its sizes are new and need more room, evict residents for good.

        Raises:
            BudgetError: the call does not fit the budget; nothing has moved.
        """
        with self.session.entered():
            self._admit(inputs)

    def _admit(self, inputs: Sequence[Any]) -> None:
        session, step = self.session, self._step(INPUTS, inputs)
        if self.code is not None:
            return  # ranks decide together when the phase begins
        if step.admitted != session.planner_state.residency:
            try:
                decision = decide(
                    session.planner_state, SizesCalled(step.captured, self._phase_context(frozenset()).transient)
                )
            except BudgetError as error:
                raise self._named(FORWARD, error, step, ExternalBytes(0, 0)) from None
            if session.transport is None:  # ranks evict together, when the forward begins
                stay(session, decision.planner_state)
            step.admitted = session.planner_state.residency

    def _step(self, where: str, arguments: Sequence[Any]) -> SizedStep:
        return self.steps.at(where, arguments, can_skip_segmentation=self.session.planner_state.can_skip_segmentation)

    def _planned(
        self,
        phase: str,
        step: SizedStep,
        external_now: Callable[[], int],
        context: PhaseContext,
        of_both_phases: Callable[[], ExternalBytes] | None = None,
    ) -> PlannedStep:
        """Find or make the verified plan of a phase.

        Args:
            external_now: returns the external bytes of the phase; on several ranks each call is an agreement.
            of_both_phases: returns the external bytes of both phases, for an error; by default both as the phase's.

        Raises:
            BudgetError: none fits the budget, even without residents.
            VerificationError: a bug in the planner; nothing has run.
        """
        session = self.session
        shared = None
        if session.transport is not None and self.code is not None and self._groups:
            title, transport = self._title(phase), session.transport
            shared = PhaseOfRanks(session, transport, title, self._groups, self.code, step, context, external_now)
        if shared is None:
            external_nbytes = external_now()
        else:
            external_now, external_nbytes = shared.max_external_nbytes, shared.max_external_nbytes()
            step = shared.step
        asked = StepRequest(session.planner_state, external_nbytes, context=context)
        found: PlannedStep | None = step.planned.find(asked.key)
        if found is not None:
            return found
        decision = self._decided(phase, step, external_nbytes, external_now, context, of_both_phases)
        stay(session, decision.planner_state)
        step.become(decision.captured)
        request = decision.request
        made: PlannedStep | None = step.plans.find(request.key)
        if made is None:
            made = step.plans.keep(request.key, planned_step(session, step.captured, request))
            if shared is not None:
                agree(shared.transport, {"the plan": str(made.plan)})
        found = made.without_spare(request)
        again = replace(asked, planner_state=session.planner_state, external_nbytes=request.in_use_nbytes)
        return step.planned.keep(again.key, found)

    def _title(self, phase: str) -> str:
        return f"{phase} of what begins with {min(self._names, default='nothing')}"

    def _until_residents_stay(self, phase: str, plan: Callable[[], PlannedStep]) -> PlannedStep:
        """Plan until no resident is evicted.

        A gradient of an evicted resident that the caller keeps is one more external value, which the next plan counts.
        """
        with before_layers(self.session, self._title(phase), self._groups):
            while True:
                before = self.session.planner_state.residency
                planned = plan()
                if self.session.planner_state.residency == before:
                    return planned

    def _decided(
        self,
        phase: str,
        step: SizedStep,
        external_nbytes: int,
        external_now: Callable[[], int],
        context: PhaseContext,
        of_both_phases: Callable[[], ExternalBytes] | None,
    ) -> StepDecision:
        """Decide on a request, again without garbage if the decision evicts residents or cuts the graph.

        Values that only garbage cycles keep are collected before the second decision.
        """
        planner_state = self.session.planner_state
        with suppress(BudgetError):
            decision = decide(planner_state, PhaseCalled(Forms(step.captured), external_nbytes, context))
            if decision.planner_state is planner_state:
                return decision
        gc.collect()
        try:
            return decide(planner_state, PhaseCalled(step.forms, external_now(), context))
        except BudgetError as error:
            known = ExternalBytes(external_now(), external_now()) if of_both_phases is None else of_both_phases()
            raise self._named(phase, error, step, known, context) from None

    def _named(
        self,
        phase: str,
        error: BudgetError,
        step: SizedStep,
        external: ExternalBytes,
        context: PhaseContext = EMPTY_CONTEXT,
    ) -> BudgetError:
        """Return the error to raise: with the smallest budget as far as it is known."""
        planner_state, (*_, in_segments) = self.session.planner_state, step.forms
        form = leanest_form(in_segments, planner_state.activations, planner_state.layout)
        planned_form = context.applied_to(form if context.activation_plan is None else in_segments)
        needs = needs_of_step(planned_form, planner_state.trained, planner_state.layout, external)
        named = self.session.known.named(error, planner_state, needs, begins=phase == FORWARD)
        return explained(named, planned_form, planner_state, external)

    # --- running ---

    def forward(self, arguments: list[Any]) -> list[Any]:
        """Run the forward as AOTAutograd calls it, and empty `arguments`."""
        with self.session.entered(), self._together(), self._timed(FORWARD):
            return self._forward(arguments)

    def _timed(self, phase: str) -> AbstractContextManager[None]:
        return self.session.records.timed(phase, self.session.store.slots.traffic)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Tell other ranks of a failure inside, so that they do not wait; a budget that is too small is so for all."""
        try:
            yield
        except BaseException as error:
            if self.session.transport is not None and not isinstance(error, BudgetError):
                self.session.transport.give_up(error)
            raise

    def _forward(self, arguments: list[Any]) -> list[Any]:
        if not self.is_clean:
            gc.collect()
            self.is_clean = True
        session, step = self.session, self._step(FORWARD, arguments)
        self._called_in = threading.get_ident()
        session.in_backward.enter_forward(self._groups)
        session.store.release_slots()
        detect_changes(session, self._names)
        if session.transport is not None:
            forget_gradients(session)
        inputs = [arguments[position] for position in step.captured.own_memory.inputs]

        def external() -> ExternalBytes:
            return session.live.external_to_forward(step.captured, inputs)

        undecided = None if session.options.activations != "keep" else KEEP_ALL
        is_seen = session.options.activations == "auto" and session.known.more_graphs_may_follow
        layout, budget_nbytes = session.store.layout, session.budget_nbytes
        step_fits = is_seen and session.seen.forward_begins(step.captured, layout, budget_nbytes)

        def plan() -> PlannedStep:
            context = replace(self._phase_context(self._hooked()), activation_plan=undecided, step_fits=step_fits)
            if self._keeps_for_hooks(step, context, lambda: external().forward_nbytes):
                context = replace(context, activation_plan=KEEP_ALL, step_fits=False)
            return self._planned(FORWARD, step, lambda: external().forward_nbytes, context, external)

        planned = self._until_residents_stay(FORWARD, plan)
        self.captured = captured = step.captured
        activation_plan = planned.request.context.activation_plan or KEEP_ALL
        if is_seen:
            session.seen.forward_ran(captured, activation_plan, session.store.layout, planned.request.in_use_nbytes)
        saved = SavedValues(session.saved_room, activation_plan) if activation_plan else None
        own_nbytes = captured.forward.external_nbytes + captured.output_nbytes  # the previous call's outputs
        outputs = self._run(FORWARD, step, planned, arguments, saved, own_nbytes)
        ran = captured.following(activation_plan)
        session.live.forward_ran(ran, inputs, outputs)
        if saved is not None:
            saved.keep(outputs, ran.forward.num_extra)
        if captured.backward is None:
            session.store.release_slots()
        else:
            session.in_backward.leave_forward(self._groups)
        return outputs

    def _keeps_for_hooks(self, step: SizedStep, context: PhaseContext, external_now: Callable[[], int]) -> bool:
        """Whether this forward keeps all that it saves, because there are hooks on saved tensors, and all fits.

        Only under "auto". Otherwise a hook that copies, such as `save_on_cpu`, copies a stand-in, and drops the value
        behind it.
        """
        if self.session.options.activations != "auto" or step.captured.backward is None or not has_saved_tensor_hooks():
            return False
        kept = replace(context, activation_plan=KEEP_ALL)
        with suppress(BudgetError):
            decide(self.session.planner_state, PhaseCalled(step.forms, external_now(), kept))
            return True
        return False

    def _given(self, gradients: Sequence[object]) -> None:
        """Watch gradients of outputs before AOTAutograd may copy them.

        Originals that are alive in the backward are external values.
        """
        with self.session.entered():
            self.session.live.watch(gradients)

    def backward(self, arguments: list[Any]) -> list[Any]:
        """Run the backward, as AOTAutograd calls it.

        Sunk gradients are in `.grad` when it returns, and None is returned for them.

        Gradients that `torch.autograd.grad` asks for are returned instead, in home memory of their own; those that
        `backward(inputs=...)` leaves out are dropped.
        """
        with self.session.entered(), self._together(), self._timed(BACKWARD):
            return self._backward(arguments)

    def _backward(self, arguments: list[Any]) -> list[Any]:
        session, store = self.session, self.session.store
        step = self._step(BACKWARD, arguments)
        assert step.captured.backward is not None
        asked = self._asked()
        hooked_nodes = self._node_hooks.hooked(asked.nodes)
        store.trainers.claim(self._all_names, None if store.tier.device.type == "cpu" else self._called_in)
        session.in_backward.enter_backward(self._groups, is_last=asked.adds_all or not keeps_graph())
        if detect_changes(session, self._names):
            store.release_slots()  # they hold values that the user has replaced
        if not asked.returned:
            return self._backward_as(asked, step, arguments, hooked_nodes)
        gradients_left_to_autograd(session, asked.returned)  # frees room
        with store.gradients_set_aside(asked.returned) as aside_nbytes:
            outputs = self._backward_as(asked, step, arguments, hooked_nodes, aside_nbytes)
            for position, _, name in self._sunk():
                if name in asked.returned:
                    outputs[position] = store.views.parameter(name).grad
        session.live.watch(outputs[position] for position, _, name in self._sunk() if not store.views.is_managed(name))
        return outputs

    def _backward_as(
        self,
        asked: Asked,
        step: SizedStep,
        arguments: list[Any],
        hooked_nodes: frozenset[str],
        aside_nbytes: int = 0,
    ) -> list[Any]:
        """Plan and run a backward; `aside_nbytes`: of gradients on the compute tier that are set aside meanwhile."""
        session, store = self.session, self.session.store
        saved = saved_values(arguments[place] for place in step.captured.offloadable_inputs)
        activation_plan = KEEP_ALL if saved is None else saved.activation_plan
        captured = step.captured.following(activation_plan)

        def external_nbytes() -> int:
            return session.live.external_to_backward(captured, arguments) + aside_nbytes

        def plan() -> PlannedStep:
            kept_inputs = _kept_inputs(captured, arguments)
            context = replace(
                self._phase_context(self._hooked() | hooked_nodes, asked),
                kept_inputs=kept_inputs,
                activation_plan=activation_plan,
            )
            planned = self._planned(BACKWARD, step, external_nbytes, context)
            if (with_present := context.with_present(planned.plan, store.slots.present)) != context:
                store.release_slots()
                planned = self._planned(BACKWARD, step, external_nbytes, with_present)
            return planned

        planned = self._until_residents_stay(BACKWARD, plan)
        session.seen.backward_ran(step.captured, planned.request.in_use_nbytes)
        hooked = planned.request.context.hooked
        gone_nbytes = session.planner_state.freed_nbytes(session.live.net_external_to_backward(captured, arguments))
        session.live.backward_begins(step.captured, arguments)
        if saved is not None:
            arguments += saved.take(again=keeps_graph())
        own_nbytes = captured.between_nbytes + captured.tangent_nbytes
        gradients_complete = session.in_backward.gradients_complete if asked.adds_all else _leave_alone
        outputs = self._run(BACKWARD, step, planned, arguments, saved, own_nbytes, gone_nbytes, gradients_complete)
        if hooked:
            # Autograd will keep these as `.grad`, on the compute tier, until the next phase takes them home.
            session.live.watch(outputs[position] for position, _, name in self._sunk() if name in hooked)
        return outputs

    def _sunk(self) -> tuple[tuple[int, str, str], ...]:
        return self.captured.backward.gradient_outputs if self.captured.backward is not None else ()

    def _phase_context(self, hooked: frozenset[str], asked: Asked = ALL_ADDED) -> PhaseContext:
        """Return the context of a phase that returns the gradients of `hooked`.

        A backward that does not add all gradients to `.grad` updates nothing.
        """
        in_backward = self.session.in_backward
        if not asked.adds_all:
            hooked = hooked - asked.returned - asked.left_out
            return PhaseContext(hooked=hooked, left_out=asked.left_out, marks_complete=in_backward.wanted)
        return in_backward.phase_context(self._groups, {name for _, _, name in self._sunk()}, hooked)

    def _hooked(self) -> frozenset[str]:
        """Return the parameters with gradients that autograd must see: for a hook, or to add to a tensor of several."""
        store = self.session.store
        sunk = [name for _, _, name in self._sunk()]
        hooked = frozenset(name for name in sunk if hooks_of(leaf_of(store.views.parameter(name))))
        return hooked | gradients_left_to_autograd(self.session, sunk)

    def _asked(self) -> Asked:
        """Ask autograd for which parameters the running backward adds, returns or leaves out gradients.

        Raises:
            UnsupportedError: this kind of backward cannot run; nothing has changed.
        """
        self.output_hooks.refuse_graph()
        session = self.session
        asked = asked_of({name: leaf_of(session.store.views.parameter(name)) for _, _, name in self._sunk()})
        if session.transport is not None and not asked.adds_all:
            raise UnsupportedError(
                f"this backward leaves out the gradient of {min(asked.returned | asked.left_out)}, of which ranks have "
                "parts: torch.autograd.grad and backward(inputs=...) do not work through a distributed model; call "
                "backward() and read .grad, or freeze parameters that need no gradient, by "
                "requires_grad_(False) before the forward"
            )
        return asked

    def _run(
        self,
        phase: str,
        step: SizedStep,
        planned: PlannedStep,
        arguments: list[Any],
        saved: SavedValues | None,
        own_nbytes: int,
        gone_nbytes: int = 0,
        gradients_complete: Callable[[int], None] | None = None,
    ) -> list[Any]:
        """Run a phase.

        Args:
            own_nbytes: of the phase's own values as it begins.
            gone_nbytes: of the phase's own values that are freed already: external bytes may be that far below zero.
            gradients_complete: called with each group, once its gradients are complete.
        """
        session = self.session
        request = planned.request
        for due in (FORWARD, BACKWARD) if phase == FORWARD else (BACKWARD,):  # a forward runs where its backward fits
            step.noted.ran(due, request.context, request.planner_state.layout.transient, request.in_use_nbytes)
        session.known.note(step.noted)
        present = session.resident_gradients()
        plan = planned.plan.beginning_with(present).with_less_external(gone_nbytes)
        part = next(part for part in plan.phases if part.phase == phase)
        measurement = Measurement.beginning(session.store, plan.begin_nbytes(phase, present) + own_nbytes)
        tiles = part.tiles
        if phase == BACKWARD:
            consumed = part.consumes - request.context.undoable
            sunk = {name for _, _, name in self._sunk()} - request.context.left_out
            session.store.reserve_gradients(session.store.layout.groups_of(sunk) - consumed)
        update = session.in_backward.updating(tiles.values()) if tiles else None
        run = Run(session.store, measurement, update, gradients_complete, saved)
        outputs = planned.phases[phase](arguments, run)
        session.records.note(phase, plan, measurement)
        return outputs


def _kept_inputs(captured: Captured, arguments: list[Any]) -> frozenset[str]:
    """Return the backward's inputs that outlive it, by name.

    With `retain_graph=True` these are the saved values, which autograd keeps for another backward. Otherwise they are
    the gradients of outputs that the caller keeps, as in `out.backward(g)`; only `arguments` refers to any other.
    """
    assert captured.backward is not None
    if keeps_graph():
        names, chunked = tuple(captured.backward.inputs), captured.backward.parameters
        tensors = [name for name, value in zip(names, arguments) if isinstance(value, torch.Tensor)]
        return frozenset([*tensors, *names[len(arguments) :]]).difference(chunked)
    if KEEPS_TANGENTS:
        return frozenset()  # the program holds them all
    given = dict(zip(captured.backward.inputs, arguments))
    tangents = {name: given[name] for name in captured.tangents}
    return frozenset(name for name, value in tangents.items() if isinstance(value, torch.Tensor) and _is_kept(value))


def _is_kept(given: torch.Tensor) -> bool:
    """Whether a gradient, or another view of its memory, has references besides the backward's arguments."""
    own = 2  # the tensor's reference to its storage, and the one of the object that is asked
    return tensor_use_count(given) > 1 or storage_use_count(given.untyped_storage()) > own
