"""How a training settles under a budget, found on paper: which graphs are whole, which groups stay.

Graphs are compiled as the first step comes to them, and residents move home for good where a run, or the optimizer's
step, needs their room: as the backend, its graphs and the optimizer do it, in their order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from chunkc.build import Builder
from chunkc.captured import Captured, fitting_form, profile, residents_with
from chunkc.explaining.held import Run, runs_of, update_held_nbytes
from chunkc.explaining.offline import OfflineStep
from chunkc.explaining.updates import Updates
from chunkc.ir.chunks import ChunkLayout
from chunkc.ir.errors import BudgetError
from chunkc.ir.hardware import Hardware
from chunkc.ir.plan import Plan, Position, Tile
from chunkc.passes.update_planning import check_update, plan_update, staying_beside_update
from chunkc.templates import Templates, input_symbols


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
class Training:
    """What is trained, by which optimizer, where.

    Attributes:
        stages: the step's graphs.
        home: as in `torch.compile`'s options.
    """

    stages: Sequence[Stage]
    step: OfflineStep
    updates: Updates
    home: str
    hardware: Hardware

    def updated(
        self, captured: Sequence[Captured], layout: ChunkLayout, resident: frozenset[int]
    ) -> tuple[tuple[int, ...], frozenset[int]]:
        """The groups that move and are trained: those that are updated in slots, and those at home."""
        trained = _trained(captured, layout) - resident
        at_home = self.updates.at_home([layout.groups[i] for i in sorted(trained)], self.home, self.hardware)
        return tuple(sorted(trained - at_home)), at_home

    def planned_update(
        self,
        captured: Sequence[Captured],
        layout: ChunkLayout,
        resident: frozenset[int],
        groups: Sequence[int],
        budget_nbytes: int,
    ) -> tuple[Plan, tuple[Tile, ...]]:
        """The update of some groups in slots.

        Raises:
            BudgetError: there is none within the budget.
        """
        return plan_update(
            layout,
            groups,
            budget_nbytes=budget_nbytes,
            resident=resident,
            hardware=self.hardware,
            held_nbytes=update_held_nbytes(self.step, captured),
            num_stages=self.updates.num_stages,
        )


@dataclass(frozen=True)
class Settled:
    """Which graphs are whole and which groups stay, under a budget; and the runs of a step.

    `minimum_nbytes`: the smallest budget for each graph by itself.
    """

    budget_nbytes: int
    captured: tuple[Captured, ...]
    resident: frozenset[int]
    minimum_nbytes: int
    runs: tuple[Run, ...]


def settle(training: Training, budget_nbytes: int) -> Settled:
    """How a training settles: step after step until one changes nothing.

    Raises:
        BudgetError: it does not; its `minimum_nbytes` is for what lacked room first.
    """
    found = _Settling(training, budget_nbytes)
    while True:
        before = (*found.captured, found.resident)
        runs = []
        for run in runs_of(training.step, found.compiled):
            found.run(run)
            runs.append(run)
        found.compiled(len(training.stages) - 1)
        found.update()
        if (*found.captured, found.resident) == before:
            return Settled(budget_nbytes, tuple(found.captured), found.resident, found.minimum_nbytes, tuple(runs))


class _Settling:
    """A training as far as it has come."""

    def __init__(self, training: Training, budget_nbytes: int) -> None:
        self.training, self.budget_nbytes = training, budget_nbytes
        self.captured: list[Captured] = []
        self.resident = frozenset[int]()
        self.minimum_nbytes = 0
        self._passes: dict[int, tuple[Captured, tuple[Position, ...]]] = {}

    @property
    def layout(self) -> ChunkLayout:
        """Of the graphs compiled so far."""
        return self.training.stages[len(self.captured) - 1].layout

    def compiled(self, graph: int) -> Captured:
        """The graph as it is compiled now, after those before it."""
        while len(self.captured) <= graph:
            self._compile(self.training.stages[len(self.captured)])
        return self.captured[graph]

    def _compile(self, stage: Stage) -> None:
        """As the backend does, which chooses what stays among what stayed so far and what is new."""
        num_known = len(self.layout.groups) if self.captured else 0
        captured = stage.captured(self.budget_nbytes, may_be_whole=len(self.resident) == num_known)
        self.resident, minimum = residents_with(captured, stage.layout, self.budget_nbytes, self.resident, num_known)
        self.minimum_nbytes = max(self.minimum_nbytes, minimum)
        self.captured.append(captured)

    def run(self, run: Run) -> None:
        """As a graph does that makes room for its run.

        Raises:
            BudgetError: there is none.
        """
        forms = self._forms(run.graph)
        self.captured[run.graph], self.resident = fitting_form(
            forms, self._needs, self.layout, self.budget_nbytes, run.held_nbytes, self.resident
        )

    def _forms(self, graph: int) -> Iterator[Captured]:
        captured = self.captured[graph]
        yield captured
        if captured.whole:
            yield self.training.stages[graph].captured(self.budget_nbytes, may_be_whole=False)

    def _needs(self, captured: Captured) -> tuple[Position, ...]:
        if id(captured) not in self._passes:
            self._passes[id(captured)] = captured, profile(captured, self.layout).passes
        return self._passes[id(captured)][1]

    def update(self) -> None:
        """As an optimizer does that makes room for its step.

        Raises:
            BudgetError: there is none.
        """
        training, layout = self.training, self.layout
        held, num_stages = update_held_nbytes(training.step, self.captured), training.updates.num_stages
        while True:
            in_slots, _ = training.updated(self.captured, layout, self.resident)
            try:
                check_update(layout, in_slots, self.budget_nbytes, held, self.resident, num_stages)
                return
            except BudgetError:
                trained = _trained(self.captured, layout)
                staying = staying_beside_update(
                    layout, in_slots, trained, self.budget_nbytes, held, self.resident, num_stages
                )
                if staying == self.resident:
                    raise
            self.resident = staying


def _trained(captured: Sequence[Captured], layout: ChunkLayout) -> frozenset[int]:
    """The groups that get gradients."""
    return layout.groups_of(name for graph in captured for name in graph.trained)
