"""A training step on paper: its graphs described, laid out and planned in the order in which training comes to them.

What one graph holds while another runs is what was alive in the step on fake tensors (`offline`), counted as a session
counts it when the model trains (`graph`, `session`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import fx

from chunkc.build import Builder
from chunkc.captured import Captured, plan_step, planned_with_room, rewrite, verify
from chunkc.explaining.cuda_offline import overhead_on
from chunkc.explaining.held import Run
from chunkc.explaining.moments import PlannedRun, StepPlans
from chunkc.explaining.offline import OfflineStep
from chunkc.explaining.settling import Settled, Stage, Training, settle
from chunkc.explaining.updates import Updates
from chunkc.ir.errors import BudgetError
from chunkc.ir.hardware import Hardware
from chunkc.ir.plan import Plan, Tile
from chunkc.ir.program import BACKWARD, FORWARD
from chunkc.options import Options
from chunkc.passes.layout import EMPTY_LAYOUT, extended

Plans = dict[tuple[int, int, bool], tuple[Plan, Mapping[str, fx.GraphModule]]]
"""(graph, held bytes, whether cold) -> the plan, and the graphs it makes."""


class Replay:
    """The graphs of a step, to be planned for budgets."""

    def __init__(self, step: OfflineStep, options: Options, hardware: Hardware, updates: Updates) -> None:
        self._step, self._hardware = step, hardware
        self.stages: list[Stage] = []
        chunk_nbytes = options.chunk_size if isinstance(options.chunk_size, int) else None
        layout = replace(EMPTY_LAYOUT, overhead_nbytes=overhead_on(hardware))
        for graph in step.graphs:
            layout = extended(layout, graph.movable, graph.fixed, chunk_nbytes)
            builder = Builder(
                graph.capture,
                options.codegen,
                layout,
                budget_nbytes=0,
                hardware=hardware,
                may_be_whole=options.whole_graph == "auto",
                compiled=False,
                strict=options.strict,
            )
            self.stages.append(Stage(builder))
        self.layout = layout
        self.training = Training(self.stages, step, updates, options.home, hardware)

    def fitting(self, budget_nbytes: int) -> Settled:
        """How the graphs settle under a budget, or, where training would refuse it, under the next that it takes."""
        while True:
            try:
                return settle(self.training, budget_nbytes)
            except BudgetError as error:
                budget_nbytes = error.minimum_nbytes

    def expressions(self, settled: Settled) -> tuple[str, ...]:
        """Every moment's bytes in the symbols of a graph that was traced so; nothing where there are none."""
        return self.stages[0].expressions(settled.captured[0])

    def minimum_nbytes(self, settled: Settled) -> int:
        """The smallest budget that works, if it works as settled."""
        if len(self._step.calls) == 1:
            return min(settled.minimum_nbytes, settled.budget_nbytes)
        return min(self.fitting(1).budget_nbytes, settled.budget_nbytes)

    def planned(self, settled: Settled) -> StepPlans:
        """The verified plans of a step."""
        several = len(self._step.calls) > 1
        runs: list[PlannedRun] = []
        plans: Plans = {}
        present, gradients = frozenset[str](), set[str]()
        for run in settled.runs:
            captured = settled.captured[run.graph]
            if run.phase == FORWARD:
                present = frozenset()
            plan, graphs = self._plan(settled, run, plans, cold=False)
            if run.phase == BACKWARD and plan.begins_cold(present):
                present = frozenset()
                plan, graphs = self._plan(settled, run, plans, cold=True)
            name = f"{run.phase}.{run.number}" if several else run.phase
            graph = graphs[run.phase]
            plan = plan.beginning_with(gradients).beside_less(run.held_nbytes - run.others_nbytes)
            if several:
                plan = _of_one_run(plan, run, name, captured)
            runs.append(PlannedRun(name, run.phase, captured, plan, graph, present, run.gone))
            present = plan.kept if run.phase == FORWARD else frozenset()
            gradients |= captured.trained if run.phase == BACKWARD else frozenset()
        return StepPlans(tuple(runs), self.layout, settled.resident, *self._update(settled))

    def _update(self, settled: Settled) -> tuple[Plan | None, frozenset[int], tuple[Tile, ...]]:
        """The plan of the optimizer's step, the groups that the CPU updates at home, and the tiles of the others."""
        if all(captured.backward is None for captured in settled.captured):
            return None, frozenset(), ()
        captured, layout, resident, budget = settled.captured, self.layout, settled.resident, settled.budget_nbytes
        in_slots, at_home = self.training.updated(captured, layout, resident)
        plan, tiles = self.training.planned_update(captured, layout, resident, in_slots, budget)
        return plan, at_home, tiles

    def _plan(
        self, settled: Settled, run: Run, plans: Plans, *, cold: bool
    ) -> tuple[Plan, Mapping[str, fx.GraphModule]]:
        """A run's plan and rewritten graphs, with room for a little more held where there is such a plan."""
        captured = settled.captured[run.graph]

        def planned(held_nbytes: int) -> tuple[Plan, Mapping[str, fx.GraphModule]]:
            key = run.graph, held_nbytes, cold
            if key not in plans:
                plan = plan_step(
                    captured,
                    self.layout,
                    budget_nbytes=settled.budget_nbytes,
                    resident=settled.resident,
                    hardware=self._hardware,
                    held_nbytes=held_nbytes,
                    cold_backward=cold,
                )
                graphs = rewrite(captured, plan, self.layout)
                verify(captured, plan, graphs, self.layout, held_nbytes=held_nbytes)
                plans[key] = plan, graphs
            return plans[key]

        (plan, graphs), spare_nbytes = planned_with_room(planned, run.held_nbytes, settled.budget_nbytes)
        return plan.beside_less(spare_nbytes), graphs


def _of_one_run(plan: Plan, run: Run, name: str, captured: Captured) -> Plan:
    """The part of a graph's plan that is one run's, with calls named after it, and without what is gone by then."""
    gone_nbytes = sum(captured.forward.storages[storage] for storage in run.gone)
    (phase,) = (phase for phase in plan.phases if phase.phase == run.phase)
    moments = tuple(
        replace(
            moment,
            name=f"{name}{moment.name.removeprefix(run.phase)}",
            other_nbytes=moment.other_nbytes + gone_nbytes,
            non_model_nbytes=moment.non_model_nbytes - gone_nbytes,
        )
        for moment in phase.moments
    )
    return replace(plan, phases=(replace(phase, moments=moments),))
