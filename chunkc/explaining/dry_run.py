"""A training under a budget, on paper: which graphs are whole, which groups stay, and which plans are asked for.

Graphs are compiled as the first step comes to them, and residents move home for good where a run, or the optimizer's
step, needs their room. What happens is read off a step on fake tensors (`offline`), what follows from it is `policy`'s
to say, as in training.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from chunkc.explaining.live_values import PredictedValues, gone_storages, outputs_of
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
    """One graph, with the layout of its parameters and those of the graphs before it."""

    builder: Builder
    _described: dict[tuple[bool, bool], Captured] = field(default_factory=dict)

    @property
    def layout(self) -> ChunkLayout:
        return self.builder.layout

    @cached_property
    def templates(self) -> Templates | None:
        """For a graph that was traced in symbols."""
        return Templates(self.builder) if input_symbols(self.builder.capture) else None

    def captured(self, budget_nbytes: int, *, can_skip_segmentation: bool) -> Captured:
        """The graph as it is compiled under a budget, at the sizes it was traced at."""
        self.builder.budget_nbytes = budget_nbytes
        if self.templates is not None:
            return self.templates.at(self.templates.traced, can_skip_segmentation=can_skip_segmentation)
        return self.builder.build(self._describe) if can_skip_segmentation else self._describe(False, False)

    def forms(self, captured: Captured, budget_nbytes: int) -> Forms:
        """The graph as it was compiled, and the others that it may become."""
        in_segments = partial(self.captured, budget_nbytes, can_skip_segmentation=False)
        return Forms(captured, in_segments if captured.whole else None)

    def _describe(self, whole: bool, estimated: bool) -> Captured:
        key = whole, estimated
        if key not in self._described:
            self._described[key] = self.builder.described(whole, estimated)
        return self._described[key]

    def expressions(self, captured: Captured) -> tuple[str, ...]:
        """Every moment's bytes in the symbols it was traced in; nothing where there are none."""
        if self.templates is None:
            return ()
        template = self.templates.template(self.templates.traced, captured.whole)
        return tuple(map(str, template.operation_bytes.expressions))


@dataclass(frozen=True)
class Training:
    """What is trained, by which optimizer, where.

    Attributes:
        graphs: the step's.
        home, activations: as in `torch.compile`'s options.
    """

    graphs: Sequence[PredictedGraph]
    step: OfflineStep
    updates: Updates
    home: str
    hardware: Hardware
    activations: Activations = "keep"

    def updated_in_backward(
        self, planner_state: PlannerState, groups: Collection[int], present: Set[str] = frozenset()
    ) -> tuple[tuple[int, int], ...]:
        """(group, stages of its update) of those of the groups that a backward may update.

        Args:
            present: parameters that have gradients before.
        """
        if not self.updates.in_backward:
            return ()
        in_slots, _ = self.updated(planner_state)
        found = {*in_slots, *self._without_gradients(planner_state, present)}
        return tuple((group, self.updates.num_stages) for group in sorted(found) if group in groups)

    def transient(
        self, planner_state: PlannerState, made: Set[str], updates: Collection[tuple[int, int]], present: Set[str]
    ) -> frozenset[int]:
        """Groups that stay and have no gradients before and after a phase of a graph whose backward makes these."""
        free = self._without_gradients(planner_state, present)
        return transient_in(planner_state.layout, free, made, frozenset(), {group for group, _ in updates})

    def expected(self, layout: ChunkLayout) -> PhaseContext:
        """What graphs of a layout will run in, as far as that is known when they are compiled."""
        if not self.updates.in_backward:
            return EMPTY_CONTEXT
        trainable, transient = [group for group in layout.groups if group.trainable], self._to_be_transient(layout)
        in_slots = {group.index for group in trainable} - self.updates.cpu_updated(trainable, self.home, self.hardware)
        updates = tuple((group, self.updates.num_stages) for group in sorted(in_slots | transient))
        return PhaseContext(updates=updates, undoable=self.undoable(updates), transient=transient)

    def undoable(self, updates: Collection[tuple[int, int]]) -> frozenset[int]:
        """The groups of these whose updates can be undone."""
        return frozenset(group for group, _ in updates) if self.updates.undoable else frozenset()

    def _to_be_transient(self, layout: ChunkLayout) -> frozenset[int]:
        """Groups whose gradients backwards will use up where the groups stay."""
        return frozenset(group.index for group in layout.groups if self.updates.consumes(group))

    def _without_gradients(self, planner_state: PlannerState, present: Set[str]) -> frozenset[int]:
        """Groups that stay, and that a backward may update, of which no gradients are there."""
        groups, layout = self._to_be_transient(planner_state.layout) & planner_state.resident, planner_state.layout
        return frozenset(i for i in groups if present.isdisjoint(s.spec.name for s in layout.groups[i].slices))

    def updated(self, planner_state: PlannerState) -> tuple[tuple[int, ...], frozenset[int]]:
        """The groups that move and are trained: those that are updated in slots, and those at home."""
        layout = planner_state.layout
        moving = layout.groups_of(planner_state.trained) - planner_state.resident
        at_home = self.updates.cpu_updated([layout.groups[i] for i in sorted(moving)], self.home, self.hardware)
        return tuple(sorted(moving - at_home)), at_home


@dataclass(frozen=True)
class PredictedRun:
    """One run of a graph's phase.

    Attributes:
        number: which of the forwards this is, or is the backward of.
        request: for the plan to run by.
        freed_nbytes: what others hold is so much less than nothing, as values of its own are gone.
        freed: storages that the backward's program has as held, and that are gone.
    """

    graph: int
    phase: str
    number: int
    request: StepRequest
    freed_nbytes: int = 0
    freed: frozenset[str] = frozenset()


@dataclass(frozen=True)
class DryRun:
    """What a training comes to under a budget, and the latest step: the runs of its graphs, and the optimizer's.

    Attributes:
        captured: each graph as it is compiled by then.
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
    """Train on paper, step after step until one changes nothing.

    Raises:
        BudgetError: a step does not fit; its `minimum_nbytes` is for what lacked room first.
    """
    dry_run_state = _DryRunState(training, budget_nbytes)
    while True:
        before = dry_run_state.planner_state, *dry_run_state.captured
        runs = tuple(dry_run_state.passes())
        update, at_home = dry_run_state.update()
        if (dry_run_state.planner_state, *dry_run_state.captured) == before:
            return DryRun(dry_run_state.planner_state, tuple(dry_run_state.captured), runs, update, at_home)


class _DryRunState:
    """A training as far as it has come."""

    def __init__(self, training: Training, budget_nbytes: int) -> None:
        self.training = training
        self.planner_state = PlannerState(budget_nbytes, activations=training.activations, hardware=training.hardware)
        self.captured: list[Captured] = []
        self._decided: dict[Key, StepDecision] = {}

    def passes(self) -> Iterator[PredictedRun]:
        """The forwards and backwards of a step; graphs are compiled as it comes to them."""
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
                context = self._phase_context(own, in_flight)
                request = self._planned(
                    call.graph, self.values.external_to_forward(own, inputs).forward_nbytes, context
                )
                absent = request.context.activation_plan or KEEP_ALL
                own = self.captured[call.graph].following(absent)
                in_flight.update(groups if own.backward is not None else ())
                yield PredictedRun(call.graph, FORWARD, num_forwards, request)
                self.values.forward_ran(own, inputs, outputs_of(call, own))
                pending.setdefault(call.graph, []).append((num_forwards, call, absent))
                num_forwards += 1
            else:
                number, forward, absent = pending[call.graph].pop()
                in_flight.subtract(self._groups(own))
                beside_nbytes = self.values.external_to_backward(own.following(absent), call.arguments)
                context = replace(self._phase_context(own, in_flight), activation_plan=absent)
                request = self._planned(call.graph, beside_nbytes, context)
                own = self.captured[call.graph].following(absent)
                positions = backward_positions(own, request, self.training.hardware)
                self.updated |= updated_in(positions)
                self.gradients |= own.trained.difference(*(position.consumed for position in positions))
                gone_nbytes = self.planner_state.freed_nbytes(self.values.net_external_to_backward(own, call.arguments))
                gone = gone_storages(forward, own, call.alive)
                yield PredictedRun(call.graph, BACKWARD, number, request, gone_nbytes, gone)
                self.values.backward_begins(own, call.arguments)
        self._compiled(len(self.training.graphs) - 1)

    def _calls(self) -> Iterator[PhaseCall]:
        """The step's; of a single graph only the forward was called, and it runs beside nothing."""
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
        """The graph as it is compiled now, after those before it."""
        while len(self.captured) <= graph:
            paper, now = self.training.graphs[len(self.captured)], self.planner_state
            captured = paper.captured(now.budget_nbytes, can_skip_segmentation=now.can_skip_segmentation)
            context = self.training.expected(paper.layout)
            self.planner_state = decide(now, GraphCaptured(captured, paper.layout, context)).planner_state
            self.captured.append(captured)
            self.values.graph_compiled(captured)
        return self.captured[graph]

    def _groups(self, captured: Captured) -> frozenset[int]:
        """The groups that a graph uses or trains."""
        used = {name for program in captured.programs.values() for name in program.parameters.values()}
        return self.planner_state.layout.groups_of(used | captured.trained)

    def _phase_context(self, captured: Captured, in_flight: Mapping[int, int]) -> PhaseContext:
        """A graph's surroundings: its backward updates what no other is to come for."""
        free = {group for group in self._groups(captured) if in_flight.get(group, 0) == 0}
        updates = self.training.updated_in_backward(self.planner_state, free, self.gradients)
        transient = self.training.transient(self.planner_state, captured.trained, updates, self.gradients)
        return PhaseContext(updates=updates, undoable=self.training.undoable(updates), transient=transient)

    def _planned(self, graph: int, external_nbytes: int, context: PhaseContext) -> StepRequest:
        """What a phase runs by. A step that changes nothing asks again for what the one before it asked for."""
        asked = (
            graph,
            self.captured[graph].whole,
            self.planner_state.num_graphs,
            *self.planner_state.key,
            external_nbytes,
            context,
        )
        if asked not in self._decided:
            forms = self.training.graphs[graph].forms(self.captured[graph], self.planner_state.budget_nbytes)
            self._decided[asked] = decide(self.planner_state, PhaseCalled(forms, external_nbytes, context))
        decision = self._decided[asked]
        self.planner_state, self.captured[graph] = decision.planner_state, decision.captured
        return decision.request

    def update(self) -> tuple[UpdateRequest, frozenset[int]]:
        """The optimizer's step: what is updated in slots, and the groups that the CPU updates at home."""
        if len(self.training.step.calls) > 1:
            self.values.alive = self.training.step.alive
        external_nbytes, num_stages = self.values.external_to_update(), self.training.updates.num_stages
        while True:
            in_slots, at_home = self.training.updated(self.planner_state)
            in_slots = tuple(group for group in in_slots if group not in self.updated)
            transient = self.training.transient(self.planner_state, frozenset(), (), self.gradients)
            decision = decide(self.planner_state, UpdateDue(in_slots, external_nbytes, num_stages, transient))
            self.planner_state = decision.planner_state
            if decision.request is not None:
                return decision.request, at_home
