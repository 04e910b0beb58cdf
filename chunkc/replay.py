"""A training step on paper: its graphs described, laid out and planned in the order in which training comes to them.

What one graph holds while another runs is what was alive in the step on fake tensors (`offline`), counted as a session
counts it when the model trains (`graph`, `session`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import fx

from chunkc.build import Builder
from chunkc.captured import Captured, plan_step, profile, rewrite, verify, with_room
from chunkc.cuda_offline import overhead_on
from chunkc.explain_updates import Updates
from chunkc.held import Run, runs_of, update_held_nbytes
from chunkc.ir.chunks import ChunkLayout
from chunkc.ir.errors import BudgetError
from chunkc.ir.hardware import Hardware
from chunkc.ir.plan import Plan, Position, Tile
from chunkc.ir.program import BACKWARD, FORWARD, UPDATE
from chunkc.moments import PlannedRun, StepPlans
from chunkc.offline import OfflineStep
from chunkc.options import Options
from chunkc.passes.layout import EMPTY_LAYOUT, extended
from chunkc.passes.planning import (
    StepProfile,
    check_minimum,
    choose_resident,
    fixed_nbytes,
    plan_phases,
    update_positions,
    update_tiles,
)
from chunkc.templates import Templates, input_symbols

Plans = dict[tuple[int, int, bool], tuple[Plan, Mapping[str, fx.GraphModule]]]
"""(graph, held bytes, whether cold) -> the plan, and the graphs it makes."""


@dataclass
class Stage:
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

    def captured(self, budget_nbytes: int, *, may_be_whole: bool) -> Captured:
        """The graph as it is compiled under a budget, at the sizes it was traced at."""
        self.builder.budget_nbytes = budget_nbytes
        if self.templates is not None:
            return self.templates.at(self.templates.traced, may_be_whole=may_be_whole)
        return self.builder.build(self._describe) if may_be_whole else self._describe(False, False)

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
        return tuple(map(str, template.moments.expressions))


@dataclass(frozen=True)
class Settled:
    """Which graphs are whole and which groups stay, under a budget.

    `minimum_nbytes`: the smallest budget for each graph by itself.
    """

    budget_nbytes: int
    captured: tuple[Captured, ...]
    resident: frozenset[int]
    minimum_nbytes: int
    runs: tuple[Run, ...]


class Replay:
    """The graphs of a step, to be planned for budgets."""

    def __init__(self, step: OfflineStep, options: Options, hardware: Hardware) -> None:
        self._step, self._options, self._hardware = step, options, hardware
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
            )
            self.stages.append(Stage(builder))
        self.layout = layout

    def fitting(self, budget_nbytes: int) -> Settled:
        """How the graphs settle under a budget, or, where training would refuse it, under the next that it takes."""
        while True:
            try:
                return self.settle(budget_nbytes)
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

    def settle(self, budget_nbytes: int) -> Settled:
        """Compile the graphs one after the other, as `backend` does, and see that every run of a step has its room.

        Raises:
            BudgetError: one has not; its `minimum_nbytes` is for that run.
        """
        captured: list[Captured] = []
        profiles: list[StepProfile] = []
        residents: list[frozenset[int]] = []
        minimum, resident, num_known = 0, frozenset[int](), 0
        for stage in self.stages:
            layout, unplanned = stage.layout, not captured
            everything = frozenset(group.index for group in layout.groups)
            may_be_whole = unplanned or len(resident) == num_known or not layout.groups
            captured.append(stage.captured(budget_nbytes, may_be_whole=may_be_whole))
            profiles.append(profile(captured[-1], layout))
            allowed = everything if unplanned else resident | frozenset(range(num_known, len(layout.groups)))
            all_may_stay = allowed == everything
            found = check_minimum(profiles[-1].all, layout, budget_nbytes, 0, all_may_stay=all_may_stay)
            minimum, num_known = max(minimum, found), len(layout.groups)
            resident = choose_resident(profiles[-1], layout, budget_nbytes, allowed)
            residents.append(resident)
        runs = runs_of(self._step, captured)
        latest = 0
        for run in runs:  # of the first step, in which graphs are compiled as they come
            latest = max(latest, run.graph)
            self._check(profiles[run.graph], self.stages[latest].layout, budget_nbytes, run, residents[latest])
        for run in runs:
            self._check(profiles[run.graph], self.layout, budget_nbytes, run, resident)
        settled = Settled(budget_nbytes, tuple(captured), resident, minimum, runs)
        self._tiles(settled, self._trained(settled))
        return settled

    def _check(
        self, step: StepProfile, layout: ChunkLayout, budget_nbytes: int, run: Run, resident: frozenset[int]
    ) -> None:
        check_minimum(step.forward + step.backward, layout, budget_nbytes, run.held_nbytes, resident)

    def planned(self, settled: Settled, updates: Updates) -> StepPlans:
        """The verified plans of a step.

        Raises:
            BudgetError: there is no room for the optimizer's step.
        """
        several = len(self._step.calls) > 1
        runs: list[PlannedRun] = []
        plans: Plans = {}
        present, gradients = frozenset[str](), set[str]()
        for run in settled.runs:
            captured = settled.captured[run.graph]
            if run.phase == FORWARD:
                present = frozenset()
            plan, graphs = self._plan(settled, run, plans, cold=False)
            if run.phase == BACKWARD and (present != plan.kept or len(plan.phases) < 2):
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
        return StepPlans(tuple(runs), self.layout, settled.resident, *self._update(settled, updates))

    def _update(self, settled: Settled, updates: Updates) -> tuple[Plan | None, frozenset[int], tuple[Tile, ...]]:
        """The plan of the optimizer's step, the groups that the CPU updates at home, and the tiles of the others."""
        if all(captured.backward is None for captured in settled.captured):
            return None, frozenset(), ()
        trained = self._trained(settled)
        at_home = updates.at_home([self.layout.groups[i] for i in trained], self._options.home, self._hardware)
        in_slots = [index for index in trained if index not in at_home]
        tiles, positions = self._tiles(settled, in_slots, updates.num_stages)
        plan = plan_phases(
            [(UPDATE, positions)],
            self.layout,
            budget_nbytes=settled.budget_nbytes,
            resident=settled.resident,
            hardware=self._hardware,
        )
        return plan, at_home, tiles

    def _trained(self, settled: Settled) -> list[int]:
        """The groups that move and are trained."""
        group_of = self.layout.group_of()
        names = {name for captured in settled.captured for name in captured.trained if name in group_of}
        return sorted({group_of[name] for name in names} - settled.resident)

    def _tiles(
        self, settled: Settled, groups: Sequence[int], num_stages: int = 1
    ) -> tuple[tuple[Tile, ...], tuple[Position, ...]]:
        """The update of some groups in slots; in one stage it takes the most room.

        Raises:
            BudgetError: there is no room for it.
        """
        held = update_held_nbytes(self._step, settled.captured)
        fixed = fixed_nbytes(self.layout, settled.resident) + held
        tiles = update_tiles(self.layout, groups, settled.budget_nbytes - fixed, num_stages)
        positions = update_positions(self.layout, tiles, held)
        if positions:
            check_minimum(positions, self.layout, settled.budget_nbytes, 0, settled.resident)
        return tiles, positions

    def _plan(
        self, settled: Settled, run: Run, plans: Plans, *, cold: bool
    ) -> tuple[Plan, Mapping[str, fx.GraphModule]]:
        """A run's plan and rewritten graphs, with room for a little more held where there is such a plan."""
        wider = with_room(run.held_nbytes, settled.budget_nbytes)
        captured = settled.captured[run.graph]
        for held in (wider, run.held_nbytes):
            key = run.graph, held, cold
            if key not in plans:
                try:
                    plan = plan_step(
                        captured,
                        self.layout,
                        budget_nbytes=settled.budget_nbytes,
                        resident=settled.resident,
                        hardware=self._hardware,
                        held_nbytes=held,
                        cold_backward=cold,
                    )
                except BudgetError:
                    if held == run.held_nbytes:
                        raise
                    continue
                rewritten = rewrite(captured, plan, self.layout)
                verify(captured, plan, rewritten, self.layout, held_nbytes=held)
                plans[key] = plan, rewritten
            plan, graphs = plans[key]
            return plan.beside_less(held - run.held_nbytes), graphs
        raise AssertionError("the narrower plan is there or raises")


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
