"""Dry-run a training under a budget: decide which graphs are whole, which groups are resident, and which plans to make.

Graphs are compiled as the first step comes to them, and residents are evicted for good where a run, or the optimizer's
step, needs their room. The events are those of a step on fake tensors (`offline`); `policy` decides on them, as in
training.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from chunkc.explaining.live_values import PredictedValues, freed_storages, outputs_of
from chunkc.explaining.offline import OfflineStep
from chunkc.explaining.offline_calls import PhaseCall
from chunkc.explaining.updates import Updates
from chunkc.ir.hardware import Hardware
from chunkc.ir.items import KEEP_ALL, ActivationPlan
from chunkc.ir.layout import ChunkLayout
from chunkc.ir.program import BACKWARD, FORWARD
from chunkc.options import Activations
from chunkc.passes.planning.updates_in_backward import updated_in
from chunkc.policy.captured_step import Captured
from chunkc.policy.decide import decide
from chunkc.policy.plans import backward_positions
from chunkc.policy.seen_steps import SeenSteps
from chunkc.policy.state import (
    EMPTY_CONTEXT,
    Forms,
    GraphCaptured,
    Key,
    PhaseCalled,
    PhaseContext,
    PlannerState,
    StepDecision,
    StepRequest,
    UpdateDue,
    UpdateRequest,
    transient_in,
)
from chunkc.tracing.build import Builder
from chunkc.tracing.dynamic_shapes import Templates, input_symbols


@dataclass
class PredictedGraph:
    """A graph of the step, with the layout of its parameters and those of earlier graphs."""

    builder: Builder
    _described: dict[tuple[bool, bool], Captured] = field(default_factory=dict)

    @property
    def layout(self) -> ChunkLayout:
        return self.builder.layout

    @cached_property
    def templates(self) -> Templates | None:
        """Templates of a graph that was traced with symbols."""
        return Templates(self.builder) if input_symbols(self.builder.capture) else None

    def captured(self, budget_nbytes: int, *, can_skip_segmentation: bool) -> Captured:
        """Describe the graph as it is compiled under a budget, at the sizes it was traced at."""
        self.builder.budget_nbytes = budget_nbytes
        if self.templates is not None:
            return self.templates.at(self.templates.traced, can_skip_segmentation=can_skip_segmentation)
        return self.builder.build(self._describe) if can_skip_segmentation else self._describe(False, False)

    def forms(self, captured: Captured, budget_nbytes: int) -> Forms:
        """Return the graph as it was compiled, and in segments if it may still be cut."""
        in_segments = partial(self.captured, budget_nbytes, can_skip_segmentation=False)
        return Forms(captured, in_segments if captured.whole else None)

    def _describe(self, whole: bool, estimated: bool) -> Captured:
        key = whole, estimated
        if key not in self._described:
            self._described[key] = self.builder.described(whole, estimated)
        return self._described[key]

    def expressions(self, captured: Captured) -> tuple[str, ...]:
        """Return the bytes at each operation in the symbols that the graph was traced with; empty without symbols."""
        if self.templates is None:
            return ()
        template = self.templates.template(self.templates.traced, captured.whole)
        return tuple(map(str, template.operation_bytes.expressions))


@dataclass(frozen=True)
class Training:
    """Inputs of a dry run: a step, its optimizer, and the hardware.

    Attributes:
        graphs: the step's.
        home, activations: as in `torch.compile`'s options.
    """

    graphs: Sequence[PredictedGraph]
    step: OfflineStep
    updates: Updates
    home: str
    hardware: Hardware
    activations: Activations

    def phase_context(
        self,
        planner_state: PlannerState,
        groups: Collection[int],
        made: Set[str] = frozenset(),
        present: Set[str] = frozenset(),
    ) -> PhaseContext:
        """Return the context of a phase of a graph with a backward that may update these groups, in slots or resident.

        Args:
            made: parameters that get gradients in the graph's backward.
            present: parameters that have gradients before it.
        """
        mode, num_stages, layout = self.updates.mode, self.updates.num_stages, planner_state.layout
        if not mode.in_backward:
            return EMPTY_CONTEXT
        resident = mode.consumed(layout.trainable_groups, num_stages) & planner_state.resident
        free = {i for i in resident if present.isdisjoint(s.spec.name for s in layout.groups[i].slices)}
        updated = mode.of_backward(self.updated(planner_state)[0]).union(free).intersection(groups)
        return PhaseContext(
            updates=tuple((group, num_stages) for group in sorted(updated)),
            undoable=updated if mode.undoable else frozenset(),
            transient=transient_in(layout, free, made, frozenset(), updated),
        )

    def expected(self, layout: ChunkLayout) -> PhaseContext:
        """Return the context of calls of a layout's graphs, as far as it is known when they are compiled."""
        updates = self.updates
        return updates.mode.expected(
            layout.trainable_groups, self.hardware, home=self.home, num_stages=updates.num_stages
        )

    def updated(self, planner_state: PlannerState) -> tuple[tuple[int, ...], frozenset[int]]:
        """Divide the trained groups that move into those that are updated in slots, and by the CPU at home."""
        layout = planner_state.layout
        moving = layout.groups_of(planner_state.trained) - planner_state.resident
        by_cpu = self.updates.cpu_updated([layout.groups[i] for i in sorted(moving)], self.home, self.hardware)
        return tuple(sorted(moving - by_cpu)), by_cpu


@dataclass(frozen=True)
class PredictedRun:
    """A run of a graph's phase.

    Attributes:
        number: of the forward in the step; a backward has its forward's.
        request: for the plan to run by.
        freed_nbytes: of its own values that are freed already (see `PlannerState.freed_nbytes`).
        freed: storages that the backward's program counts as held, and that are freed already.
    """

    graph: int
    phase: str
    number: int
    request: StepRequest
    freed_nbytes: int = 0
    freed: frozenset[str] = frozenset()


@dataclass(frozen=True)
class DryRun:
    """The planner state that a training reaches under a budget, and its latest step.

    Attributes:
        captured: each graph as it is compiled by then.
        update: of the optimizer's step.
        cpu_updated: groups that the CPU updates at home.
    """

    planner_state: PlannerState
    captured: tuple[Captured, ...]
    runs: tuple[PredictedRun, ...]
    update: UpdateRequest
    cpu_updated: frozenset[int]

    @property
    def budget_nbytes(self) -> int:
        return self.planner_state.budget_nbytes


def run_dry(training: Training, budget_nbytes: int) -> DryRun:
    """Simulate training steps until one changes nothing.

    Raises:
        BudgetError: a step does not fit; its `minimum_nbytes` is that of the first phase that lacked room.
    """
    state = _DryRunState(training, budget_nbytes)
    while True:
        before = state.planner_state, *state.captured
        runs = tuple(state.passes())
        update, by_cpu = state.update()
        if (state.planner_state, *state.captured) == before:
            return DryRun(state.planner_state, tuple(state.captured), runs, update, by_cpu)


class _DryRunState:
    """The state of a dry run between phases."""

    def __init__(self, training: Training, budget_nbytes: int) -> None:
        self.training = training
        self.planner_state = PlannerState(
            budget_nbytes,
            activations=training.activations,
            hardware=training.hardware,
            num_stages=training.updates.num_stages,
        )
        self.captured: list[Captured] = []
        self._decided: dict[Key, StepDecision] = {}
        self._is_seen = len(training.graphs) > 1 and training.activations == "auto"
        self._seen = SeenSteps()

    def passes(self) -> Iterator[PredictedRun]:
        """Run the forwards and backwards of a step, compiling graphs as it comes to them."""
        is_on_gpu = self.training.hardware.kind != "cpu"
        self.values = PredictedValues(self.training.step.storage_nbytes, is_on_gpu=is_on_gpu)
        for captured in self.captured:
            self.values.graph_compiled(captured)
        self.updated: set[int] = set()
        self.gradients: set[str] = set()
        in_flight: Counter[int] = Counter()  # forwards of this step that use a group and are without their backward
        pending: dict[int, list[tuple[int, PhaseCall, ActivationPlan]]] = {}
        num_forwards = 0
        for call in self._calls():
            own = self._compiled(call.graph)
            self.values.alive = call.alive
            if call.phase == FORWARD:
                inputs = [call.arguments[position] for position in own.own_memory.inputs]
                groups = self._groups(own)
                context = replace(self._phase_context(own, in_flight), step_fits=self._step_fits(own))
                request = self._planned(
                    call.graph, self.values.external_to_forward(own, inputs).forward_nbytes, context
                )
                activation_plan = request.context.activation_plan or KEEP_ALL
                own, layout = self.captured[call.graph], self.planner_state.layout
                if self._is_seen:
                    self._seen.forward_ran(own, activation_plan, layout, request.in_use_nbytes)
                own = own.following(activation_plan)
                in_flight.update(groups if own.backward is not None else ())
                yield PredictedRun(call.graph, FORWARD, num_forwards, request)
                self.values.forward_ran(own, inputs, outputs_of(call, own))
                pending.setdefault(call.graph, []).append((num_forwards, call, activation_plan))
                num_forwards += 1
            else:
                number, forward, activation_plan = pending[call.graph].pop()
                in_flight.subtract(self._groups(own))
                external_nbytes = self.values.external_to_backward(own.following(activation_plan), call.arguments)
                context = replace(self._phase_context(own, in_flight), activation_plan=activation_plan)
                request = self._planned(call.graph, external_nbytes, context)
                self._seen.backward_ran(self.captured[call.graph], request.in_use_nbytes)
                own = self.captured[call.graph].following(activation_plan)
                positions = backward_positions(own, request, self.training.hardware)
                self.updated |= updated_in(positions)
                self.gradients |= own.trained.difference(*(position.consumed for position in positions))
                freed_nbytes = self.planner_state.freed_nbytes(
                    self.values.net_external_to_backward(own, call.arguments)
                )
                freed = freed_storages(forward, own, call.alive)
                yield PredictedRun(call.graph, BACKWARD, number, request, freed_nbytes, freed)
                self.values.backward_begins(own, call.arguments)
        self._compiled(len(self.training.graphs) - 1)

    def _calls(self) -> Iterator[PhaseCall]:
        """Yield the step's calls; of a single graph only the forward was called, and all its storages are unknown."""
        calls = self.training.step.calls
        if len(calls) != 1:
            yield from calls
            return
        unknown = replace(
            calls[0], arguments=(None,) * len(calls[0].arguments), outputs=(None,) * len(calls[0].outputs)
        )
        yield unknown
        if self.captured[0].backward is not None:
            yield replace(unknown, phase=BACKWARD, arguments=(None,) * len(self.captured[0].tangents))

    def _compiled(self, graph: int) -> Captured:
        """Return the graph as it is compiled now; compile it, and all before it, if they are not."""
        while len(self.captured) <= graph:
            predicted, now = self.training.graphs[len(self.captured)], self.planner_state
            captured = predicted.captured(now.budget_nbytes, can_skip_segmentation=now.can_skip_segmentation)
            context = self.training.expected(predicted.layout)
            self.planner_state = decide(now, GraphCaptured(captured, predicted.layout, context)).planner_state
            self.captured.append(captured)
            self.values.graph_compiled(captured)
        return self.captured[graph]

    def _groups(self, captured: Captured) -> frozenset[int]:
        """Return the groups that a graph uses or trains."""
        used = {name for program in captured.programs.values() for name in program.parameters.values()}
        return self.planner_state.layout.groups_of(used | captured.trained)

    def _phase_context(self, captured: Captured, in_flight: Mapping[int, int]) -> PhaseContext:
        """Return the context of a graph's call: its backward may update groups of which no other is pending."""
        free = {group for group in self._groups(captured) if in_flight.get(group, 0) == 0}
        return self.training.phase_context(self.planner_state, free, captured.trained, self.gradients)

    def _step_fits(self, captured: Captured) -> bool:
        """Whether the step is known to fit with all saved values kept: never a graph's first one."""
        layout, budget_nbytes = self.planner_state.layout, self.planner_state.budget_nbytes
        return self._is_seen and self._seen.forward_begins(captured, layout, budget_nbytes)

    def _planned(self, graph: int, external_nbytes: int, context: PhaseContext) -> StepRequest:
        """Decide for a phase, and return its request.

        Decisions are remembered: a step that changes nothing asks for the same ones again.
        """
        request = StepRequest(self.planner_state, external_nbytes, context=context)
        asked = graph, self.captured[graph].whole, self.planner_state.num_graphs, *request.key
        if asked not in self._decided:
            forms = self.training.graphs[graph].forms(self.captured[graph], self.planner_state.budget_nbytes)
            self._decided[asked] = decide(self.planner_state, PhaseCalled(forms, external_nbytes, context))
        decision = self._decided[asked]
        self.planner_state, self.captured[graph] = decision.planner_state, decision.captured
        return decision.request

    def update(self) -> tuple[UpdateRequest, frozenset[int]]:
        """Decide for the optimizer's step; return its request, and the groups that the CPU updates at home."""
        if len(self.training.step.calls) > 1:
            self.values.alive = self.training.step.alive
        external_nbytes, num_stages = self.values.external_to_update(), self.training.updates.num_stages
        while True:
            in_slots, by_cpu = self.training.updated(self.planner_state)
            in_slots = tuple(group for group in in_slots if group not in self.updated)
            transient = self.training.phase_context(self.planner_state, (), present=self.gradients).transient
            decision = decide(self.planner_state, UpdateDue(in_slots, external_nbytes, num_stages, transient))
            self.planner_state = decision.planner_state
            if decision.request is not None:
                return decision.request, by_cpu
