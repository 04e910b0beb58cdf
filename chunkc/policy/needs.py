"""Compute the smallest budget, as far as the graphs compiled so far tell.

Graphs of one model are compiled as the first step comes to them. A later one may need more, on top of the values that
earlier ones have saved, and brings parameters that stay on the compute tier in all of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from chunkc.ir.errors import BudgetError
from chunkc.ir.layout import ChunkLayout
from chunkc.ir.plan import Position
from chunkc.ir.program import BACKWARD, FORWARD
from chunkc.options import Activations
from chunkc.passes.planning.room import Room, everything
from chunkc.passes.planning.updates import smallest_update
from chunkc.policy.activation_search import leanest_form
from chunkc.policy.captured_step import Captured, profile
from chunkc.policy.state import PhaseContext, PlannerState


@dataclass(frozen=True)
class Needs:
    """Bytes on the compute tier in addition to the model data that never leaves it.

    Attributes:
        moving_nbytes: if every chunk moves.
        all_resident_nbytes: if all groups are resident.
    """

    moving_nbytes: int = 0
    all_resident_nbytes: int = 0

    @staticmethod
    def of(positions: Sequence[Position], layout: ChunkLayout, external_nbytes: int = 0) -> Needs:
        """Return the needs of positions with external bytes."""
        if not positions:
            return Needs()
        most_nbytes = max(position.non_model_nbytes for position in positions)
        needed_nbytes = Room.of(layout.with_replicated(())).needed_nbytes(positions)
        return Needs(needed_nbytes + external_nbytes, most_nbytes + external_nbytes)

    def plus(self, external_nbytes: int) -> Needs:
        """Return these needs with more external bytes."""
        return Needs(self.moving_nbytes + external_nbytes, self.all_resident_nbytes + external_nbytes)

    def __or__(self, other: Needs) -> Needs:
        return Needs(
            max(self.moving_nbytes, other.moving_nbytes), max(self.all_resident_nbytes, other.all_resident_nbytes)
        )

    def minimum_nbytes(self, layout: ChunkLayout) -> int:
        """Return the smallest budget with room for these needs, with all of a layout's chunks moving or none.

        Chunks that are cut over ranks always move, and are replicated only where a ZeRO stage is forced.
        """
        moving = Room.of(layout.with_replicated(())).taken_nbytes + self.moving_nbytes
        if layout.cut:
            return moving
        resident = Room.of(layout, resident=everything(layout)).taken_nbytes + self.all_resident_nbytes
        return min(moving, resident)


def update_needs(captured: Captured, trained: frozenset[str], layout: ChunkLayout) -> Needs:
    """Return the needs of the optimizer's step after a graph, as far as `trained` parameters are known."""
    return Needs.of(smallest_update(layout, sorted(layout.groups_of(trained)), captured.caller_nbytes), layout)


def needs_of_step(
    captured: Captured, trained: frozenset[str], layout: ChunkLayout, external: ExternalBytes, *, values: float = 1
) -> Needs:
    """Return the needs of a graph's forward, its backward and the optimizer's step (see `update_needs`).

    Args:
        values: times the bytes of each value that they have, as if the batch had another size.
    """
    step = profile(captured, layout)
    forward = Needs.of(_scaled(step.forward, values, layout), layout, int(external.forward_nbytes * values))
    backward = Needs.of(_scaled(step.backward, values, layout), layout, int(external.backward_nbytes * values))
    update = update_needs(captured, trained | captured.trained, layout).plus(int(external.always_nbytes * values))
    return forward | backward | update


def _scaled(positions: Sequence[Position], values: float, layout: ChunkLayout) -> Sequence[Position]:
    """Scale the values of positions, but for the parameters' gradients among them."""
    specs = layout.specs()

    def scaled(at: Position) -> Position:
        gradients = sum(specs[name].gradient_nbytes for name, _ in at.sunk if name in specs)
        others = max(0, at.non_model_nbytes - gradients)
        return replace(at, non_model_nbytes=at.non_model_nbytes - others + int(others * values))

    return positions if values == 1 else [scaled(at) for at in positions]


@dataclass(frozen=True)
class ExternalBytes:
    """External bytes during a graph's phases; `always_nbytes` of them also during the optimizer's step."""

    forward_nbytes: int
    backward_nbytes: int
    always_nbytes: int = 0


class StepNeeds:
    """The most that a step has needed so far, in its form and in segments.

    Runs are only noted as they happen: what a step needs at least, with its leanest activation plan, takes a search,
    which is made when a report or an error asks.

    Attributes:
        whole: the step is not cut into segments; in segments it may need less.
    """

    def __init__(self, captured: Captured | None = None, in_segments: Callable[[], Captured] | None = None) -> None:
        """Begin without needs.

        Args:
            captured: the step's graph; None: all needs are added by hand.
            in_segments: describes a whole step cut into segments.
        """
        self.whole = in_segments is not None
        self._added = Needs()
        self._captured, self._in_segments = captured, in_segments
        self._runs: dict[tuple[str, PhaseContext, frozenset[int]], int] = {}

    def add(self, needs: Needs) -> None:
        """Add needs that are no run's of the graph."""
        self._added |= needs

    def ran(self, phase: str, context: PhaseContext, transient: frozenset[int], external_nbytes: int) -> None:
        """Record a run of a phase, with its context, the groups that its plan has as transient, and external bytes."""
        key = phase, replace(context, activation_plan=None), transient
        self._runs[key] = max(external_nbytes, self._runs.get(key, 0))

    def has_run(self, phase: str) -> bool:
        return any(ran == phase for ran, _, _ in self._runs)

    def most(self, layout: ChunkLayout, activations: Activations) -> Needs:
        """Return the most that the runs need, in the step's form."""
        return self._added if self._captured is None else self._added | self._of(self._captured, layout, activations)

    def least(self, layout: ChunkLayout, activations: Activations) -> Needs:
        """Return the most that the runs need, in the form that takes less: a step is whole only where nothing moves."""
        most = self.most(layout, activations)
        if self._in_segments is None:
            return most
        needs = self._of(self._in_segments(), layout, activations)
        return Needs(needs.moving_nbytes, min(needs.all_resident_nbytes, most.all_resident_nbytes))

    def _of(self, captured: Captured, layout: ChunkLayout, activations: Activations) -> Needs:
        """Return the most that the runs need in a form of the graph, with its leanest activation plan."""
        leanest, needs = leanest_form(captured, activations, layout), Needs()
        for (phase, context, transient), external_nbytes in self._runs.items():
            step = profile(context.applied_to(leanest), replace(layout, transient=transient))
            needs |= Needs.of(step.forward if phase == FORWARD else step.backward, layout, external_nbytes)
        return needs


class SessionNeeds:
    """A session's needs so far. Those of a step count for as long as the step is alive.

    Attributes:
        more_graphs_may_follow: torch.compile splits the model.
    """

    def __init__(self) -> None:
        self.more_graphs_may_follow = False
        self._steps: weakref.WeakSet[StepNeeds] = weakref.WeakSet()
        self._named_nbytes = 0

    def note(self, step: StepNeeds) -> None:
        """Let a step count from now on."""
        self._steps.add(step)

    def minimum_nbytes(self, layout: ChunkLayout, activations: Activations) -> int:
        """Return the smallest budget that works for all steps so far, and no less than an error has named."""
        needs = Needs()
        for step in self._steps:
            needs |= step.least(layout, activations)
        return max(self._named_nbytes, needs.minimum_nbytes(layout) if needs != Needs() else 0)

    def named(
        self,
        error: BudgetError,
        planner_state: PlannerState,
        needs: Needs,
        *,
        begins: bool = False,
    ) -> BudgetError:
        """Return the error to raise: its minimum covers all steps so far, and is no less than an earlier error's.

        Args:
            planner_state: with the graph that lacks room.
            needs: of the phase that lacks room, cut into segments, with all external bytes.
            begins: a forward lacks room.
        """
        layout, num_graphs = planner_state.layout, planner_state.num_graphs
        for step in self._steps:
            most = step.most(layout, planner_state.activations)
            needs |= Needs(0, most.all_resident_nbytes) if step.whole else most
        self._named_nbytes = max(self._named_nbytes, error.minimum_nbytes, needs.minimum_nbytes(layout))
        evaluates = not planner_state.trained and any(spec.trainable for spec in layout.specs().values())
        grown = begins and any(step.has_run(BACKWARD) for step in self._steps)
        covers = ""
        if self.more_graphs_may_follow or num_graphs > 1:
            covers = "the graph compiled so far" if num_graphs == 1 else f"the {num_graphs} graphs compiled so far"
        return error.covering(self._named_nbytes, covers, evaluates=evaluates, grown=grown)
