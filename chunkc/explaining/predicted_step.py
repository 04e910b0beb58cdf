"""Predict a training step: describe and lay out its graphs, dry-run it under a budget, and plan it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from chunkc.explaining.cuda_offline import overhead_on
from chunkc.explaining.dry_run import DryRun, PredictedGraph, PredictedRun, Training, run_dry
from chunkc.explaining.memory_timeline import PlannedRun, StepPlans
from chunkc.explaining.offline import OfflineGraph, OfflineStep
from chunkc.explaining.updates import DEFAULT_UPDATES, Updates
from chunkc.ir.errors import BudgetError
from chunkc.ir.explanation import TimedEvent
from chunkc.ir.hardware import Hardware
from chunkc.ir.items import KEEP_ALL
from chunkc.ir.layout import PARAM, Chunk
from chunkc.ir.plan import Plan, Tile
from chunkc.ir.program import BACKWARD, FORWARD
from chunkc.ir.simulate import RESIDENT_UPDATE, simulate
from chunkc.options import Options
from chunkc.passes.planning.layout import EMPTY_LAYOUT, extended
from chunkc.passes.planning.update_seconds import tile_s, traffic_s
from chunkc.policy.captured_step import Captured
from chunkc.policy.decide import decide
from chunkc.policy.plans import StepPlan, step_plan, update_plan
from chunkc.policy.state import Forms, Key, PhaseCalled, StepRequest
from chunkc.tracing.build import Builder

Plans = dict[tuple[int, Key], StepPlan]
"""(graph, key of the request) -> its plan."""


class PredictedStep:
    """A step's graphs, to be planned for any budget.

    Attributes:
        hardware: with the rate of the floating-point dtype that most parameters have.
    """

    def __init__(
        self, step: OfflineStep, options: Options, hardware: Hardware, updates: Updates = DEFAULT_UPDATES
    ) -> None:
        hardware = _training_in(hardware, step.graphs)
        self.step, self.options, self.hardware = step, options, hardware
        self.graphs: list[PredictedGraph] = []
        chunk_nbytes = options.chunk_size if isinstance(options.chunk_size, int) else None
        layout = replace(EMPTY_LAYOUT, overhead_nbytes=overhead_on(hardware), disk_holds=options.on_disk(hardware.kind))
        for graph in step.graphs:
            layout = extended(layout, graph.movable, graph.fixed, chunk_nbytes)
            builder = Builder(
                graph.capture,
                options.codegen,
                layout,
                budget_nbytes=0,
                hardware=hardware,
                can_skip_segmentation=options.can_skip_segmentation,
                compiled=False,
                strict=options.strict,
                graph_fraction=graph.graph_fraction if options.may_leave else 1.0,
            )
            self.graphs.append(PredictedGraph(builder))
        self.layout = layout
        updates = updates.on(hardware, layout)
        self.training = Training(self.graphs, step, updates, options.home, hardware, options.activations)

    def fitting(self, budget_nbytes: int) -> DryRun:
        """Dry-run the training under a budget, or under the smallest one that is no longer refused."""
        while True:
            try:
                return run_dry(self.training, budget_nbytes)
            except BudgetError as error:
                budget_nbytes = error.minimum_nbytes

    def expressions(self, dry_run: DryRun) -> tuple[str, ...]:
        """Return the bytes at each operation in the symbols of the first graph; empty without symbols."""
        return self.graphs[0].expressions(dry_run.captured[0])

    def minimum_nbytes(self, dry_run: DryRun) -> int:
        """Return the smallest budget that works, in whichever form the graphs have there; the dry run's works."""
        return min(self.fitting(1).budget_nbytes, dry_run.budget_nbytes)

    def planned(self, dry_run: DryRun) -> StepPlans:
        """Return the verified plans of a step."""
        several = len(self.step.calls) > 1
        runs: list[PlannedRun] = []
        plans: Plans = {}
        present, gradients = frozenset[Chunk](), set[str]()
        for run in dry_run.runs:
            request = run.request
            captured = dry_run.captured[run.graph].following(request.context.activation_plan or KEEP_ALL)
            if run.phase == FORWARD:
                present = frozenset[Chunk]()
            made = self._plan(dry_run.captured[run.graph], run.graph, request, plans)
            if (
                run.phase == BACKWARD
                and (context := request.context.with_present(made.plan, present)) != request.context
            ):
                present = frozenset()
                event = PhaseCalled(Forms(dry_run.captured[run.graph]), request.in_use_nbytes, context)
                request = decide(dry_run.planner_state, event).request
                made = self._plan(dry_run.captured[run.graph], run.graph, request, plans)
            name = f"{run.phase}.{run.number}" if several else run.phase
            plan = (
                made.plan.with_less_external(request.spare_nbytes)
                .beginning_with(gradients)
                .with_less_external(run.freed_nbytes)
            )
            if several:
                plan = _of_one_run(plan, run, name, captured)
            runs.append(PlannedRun(name, run.phase, captured, plan, made.graphs[run.phase], present, run.freed))
            present = plan.kept if run.phase == FORWARD else frozenset[Chunk]()
            if run.phase == BACKWARD:
                gradients |= captured.trained.difference(*(moment.consumed for moment in plan.moments))
        planner_state = dry_run.planner_state
        return StepPlans(tuple(runs), planner_state.layout, planner_state.resident, *self._update(dry_run))

    def events(self, step: StepPlans) -> tuple[TimedEvent, ...]:
        """Simulate the planned step's events in time."""
        hardware, updates = self.hardware, self.training.updates
        costs = {name: cost_s for run in step.runs for name, cost_s in run.costs_s().items()}
        nbytes = updates.nbytes(step)
        costs |= {name: tile_s(step.layout.groups[tile.group], tile, hardware) for name, tile in step.updates.items()}
        return simulate(
            step.phases,
            costs,
            hardware,
            resident_update_s=traffic_s(nbytes[RESIDENT_UPDATE], hardware),
            checksums_s=updates.checksums_s(step, hardware),
            host_updates=updates.simulated(step.cpu_updated, step.layout, hardware),
            update_nbytes=nbytes,
            replicated={
                group.index: group.trainable for group in step.layout.groups if PARAM in group.replicated_kinds
            },
        )

    def _update(self, dry_run: DryRun) -> tuple[Plan | None, frozenset[int], tuple[Tile, ...]]:
        """Return the plan of the optimizer's step, the groups that the CPU updates, and the other groups' tiles."""
        if all(captured.backward is None for captured in dry_run.captured):
            return None, frozenset(), ()
        made = update_plan(dry_run.update, self.hardware)
        return made.plan, dry_run.cpu_updated, made.tiles

    def _plan(self, captured: Captured, graph: int, request: StepRequest, plans: Plans) -> StepPlan:
        """Make the requested plan of a graph, or return it if it was made before."""
        key = graph, request.key
        if key not in plans:
            plans[key] = step_plan(captured, request, self.hardware)
        return plans[key]


def _of_one_run(plan: Plan, run: PredictedRun, name: str, captured: Captured) -> Plan:
    """Return the phase of a graph's plan that is the run's, with calls named after it and without freed storages."""
    freed_nbytes = sum(captured.forward.storages[storage] for storage in run.freed)
    (phase,) = (phase for phase in plan.phases if phase.phase == run.phase)
    moments = tuple(
        replace(
            moment,
            name=moment.name if at in phase.tiles else f"{name}.{moment.name.removeprefix(f'{run.phase}.')}",
            other_nbytes=moment.other_nbytes + freed_nbytes,
            non_model_nbytes=moment.non_model_nbytes - freed_nbytes,
        )
        for at, moment in enumerate(phase.moments)
    )
    return replace(plan, phases=(replace(phase, moments=moments),))


def _training_in(machine: Hardware, graphs: Sequence[OfflineGraph]) -> Hardware:
    """Return the machine with the rate of the floating-point dtype that most parameters have."""
    sizes: dict[torch.dtype, int] = {}
    specs = {spec.name: spec for graph in graphs for spec in (*graph.movable, *graph.fixed)}
    for spec in (spec for spec in specs.values() if spec.dtype.is_floating_point):
        sizes[spec.dtype] = sizes.get(spec.dtype, 0) + spec.numel
    return machine.training_in(max(sizes, key=lambda dtype: sizes[dtype])) if sizes else machine
