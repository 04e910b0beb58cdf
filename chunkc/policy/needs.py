"""Compute the smallest budget, as far as the graphs compiled so far tell.

Graphs of one model are compiled as the first step comes to them. A later one may need more, on top of the values that
earlier ones have saved, and brings parameters that stay on the compute tier in all of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from chunkc.ir.errors import BudgetError
from chunkc.ir.layout import ChunkLayout
from chunkc.ir.plan import Position
from chunkc.ir.program import BACKWARD, FORWARD
from chunkc.passes.planning.residency import everything, fixed_nbytes, needed_nbytes
from chunkc.passes.planning.updates import smallest_tiles, update_positions
from chunkc.policy.captured_step import Captured, profile
from chunkc.policy.state import PhaseContext


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
        return Needs(
            needed_nbytes(positions, layout.with_replicated(())) + external_nbytes, most_nbytes + external_nbytes
        )

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
        moving = fixed_nbytes(layout.with_replicated(()), frozenset()) + self.moving_nbytes
        if layout.cut:
            return moving
        resident = fixed_nbytes(layout, everything(layout)) + self.all_resident_nbytes
        return min(moving, resident)


def update_needs(captured: Captured, trained: frozenset[str], layout: ChunkLayout) -> Needs:
    """Return the needs of the optimizer's step after a graph, as far as `trained` parameters are known."""
    tiles = smallest_tiles(layout, sorted(layout.groups_of(trained)))
    return Needs.of(update_positions(layout, tiles, captured.caller_nbytes), layout)


def needs_of_step(captured: Captured, trained: frozenset[str], layout: ChunkLayout, external: ExternalBytes) -> Needs:
    """Return the needs of a graph's forward, its backward and the optimizer's step (see `update_needs`)."""
    step = profile(captured, layout)
    forward = Needs.of(step.forward, layout, external.forward_nbytes)
    backward = Needs.of(step.backward, layout, external.backward_nbytes)
    update = update_needs(captured, trained | captured.trained, layout).plus(external.always_nbytes)
    return forward | backward | update


@dataclass(frozen=True)
class ExternalBytes:
    """External bytes during a graph's phases; `always_nbytes` of them also during the optimizer's step."""

    forward_nbytes: int
    backward_nbytes: int
    always_nbytes: int = 0

    @staticmethod
    def of(captured: Captured, live_nbytes: int, given_nbytes: int) -> ExternalBytes:
        """Count them before a graph's forward; arguments as for `Captured.external_in_forward`."""
        forward_nbytes = captured.external_in_forward(live_nbytes, given_nbytes)
        return ExternalBytes(forward_nbytes, forward_nbytes + min(live_nbytes, captured.loss_nbytes))


class StepNeeds:
    """The most that a step has needed so far, in its form and in segments.

    Attributes:
        whole: the step is not cut into segments; in segments it may need less.
    """

    def __init__(self, in_segments: Callable[[], Captured] | None = None) -> None:
        """Begin without needs. `in_segments`: describes a whole step cut into segments."""
        self.most = Needs()
        self.whole = in_segments is not None
        self._in_segments = in_segments
        self._runs: dict[tuple[str, PhaseContext], int] = {}

    def ran(self, phase: str, context: PhaseContext, external_nbytes: int) -> None:
        """Record a run of a phase, with its context and external bytes."""
        self._runs[phase, context] = max(external_nbytes, self._runs.get((phase, context), 0))

    def has_run(self, phase: str) -> bool:
        return any(ran == phase for ran, _ in self._runs)

    def least(self, layout: ChunkLayout) -> Needs:
        """Return the most that the runs need, in the form that takes less: a step is whole only where nothing moves."""
        if self._in_segments is None:
            return self.most
        in_segments, needs = self._in_segments(), Needs()
        for (phase, context), external_nbytes in self._runs.items():
            step = profile(context.applied_to(in_segments), layout)
            needs |= Needs.of(step.forward if phase == FORWARD else step.backward, layout, external_nbytes)
        return Needs(needs.moving_nbytes, min(needs.all_resident_nbytes, self.most.all_resident_nbytes))


class SessionNeeds:
    """A session's needs so far. Those of a step count for as long as the step is alive.

    Attributes:
        more_graphs_may_follow: torch.compile splits the model.
    """

    def __init__(self) -> None:
        self.more_graphs_may_follow = False
        self._steps: weakref.WeakSet[StepNeeds] = weakref.WeakSet()
        self._named_nbytes = 0

    def note(self, step: StepNeeds, needs: Needs) -> None:
        """Add to the needs of a step, which counts from now on."""
        step.most |= needs
        self._steps.add(step)

    def minimum_nbytes(self, layout: ChunkLayout) -> int:
        """Return the smallest budget that works for all steps so far, and no less than an error has named."""
        needs = Needs()
        for step in self._steps:
            needs |= step.least(layout)
        return max(self._named_nbytes, needs.minimum_nbytes(layout) if needs != Needs() else 0)

    def named(
        self,
        error: BudgetError,
        layout: ChunkLayout,
        needs: Needs,
        num_graphs: int,
        trained: Collection[str],
        *,
        begins: bool = False,
    ) -> BudgetError:
        """Return the error to raise: its minimum covers all steps so far, and is no less than an earlier error's.

        Args:
            needs: of the phase that lacks room, cut into segments, with all external bytes.
            num_graphs: compiled so far, including the one that lacks room.
            trained: parameters that get gradients from these graphs.
            begins: a forward lacks room.
        """
        for step in self._steps:
            needs |= Needs(0, step.most.all_resident_nbytes) if step.whole else step.most
        self._named_nbytes = max(self._named_nbytes, error.minimum_nbytes, needs.minimum_nbytes(layout))
        evaluates = not trained and any(spec.trainable for spec in layout.specs().values())
        grown = begins and any(step.has_run(BACKWARD) for step in self._steps)
        covers = ""
        if self.more_graphs_may_follow or num_graphs > 1:
            covers = "the graph compiled so far" if num_graphs == 1 else f"the {num_graphs} graphs compiled so far"
        return error.covering(self._named_nbytes, covers, evaluates=evaluates, grown=grown)
