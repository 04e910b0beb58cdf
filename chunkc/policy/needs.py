"""The smallest budget, as far as the graphs compiled so far tell.

Graphs of one model are compiled as the first step comes to them. A later one may need more beside what earlier ones
have saved, and brings parameters that stay on the compute tier in all of them.
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
    """Bytes on the compute tier beside the model data that stays there for good.

    Attributes:
        moving_nbytes: where every chunk moves.
        all_resident_nbytes: where none does.
    """

    moving_nbytes: int = 0
    all_resident_nbytes: int = 0

    @staticmethod
    def of(positions: Sequence[Position], layout: ChunkLayout, external_nbytes: int = 0) -> Needs:
        """Of positions beside `external_nbytes` of others' values."""
        if not positions:
            return Needs()
        most_nbytes = max(position.non_model_nbytes for position in positions)
        return Needs(
            needed_nbytes(positions, layout.with_replicated(())) + external_nbytes, most_nbytes + external_nbytes
        )

    def plus(self, external_nbytes: int) -> Needs:
        return Needs(self.moving_nbytes + external_nbytes, self.all_resident_nbytes + external_nbytes)

    def __or__(self, other: Needs) -> Needs:
        return Needs(
            max(self.moving_nbytes, other.moving_nbytes), max(self.all_resident_nbytes, other.all_resident_nbytes)
        )

    def minimum_nbytes(self, layout: ChunkLayout) -> int:
        """The smallest budget with room for this, with all of a layout's chunks moving or none.

        Those that are cut over ranks always move, and are whole nowhere but where a stage is forced.
        """
        moving = fixed_nbytes(layout.with_replicated(()), frozenset()) + self.moving_nbytes
        if layout.cut:
            return moving
        staying = fixed_nbytes(layout, everything(layout)) + self.all_resident_nbytes
        return min(moving, staying)


def update_needs(captured: Captured, trained: frozenset[str], layout: ChunkLayout) -> Needs:
    """Of the optimizer's step after a graph's forward and backward, as far as `trained` parameters are known."""
    tiles = smallest_tiles(layout, sorted(layout.groups_of(trained)))
    return Needs.of(update_positions(layout, tiles, captured.caller_nbytes), layout)


def needs_of_step(captured: Captured, trained: frozenset[str], layout: ChunkLayout, held: ExternalBytes) -> Needs:
    """Of a graph's forward, its backward and the optimizer's step, as `update_needs`."""
    step = profile(captured, layout)
    passes = Needs.of(step.forward, layout, held.forward_nbytes) | Needs.of(step.backward, layout, held.backward_nbytes)
    return passes | update_needs(captured, trained | captured.trained, layout).plus(held.always_nbytes)


@dataclass(frozen=True)
class ExternalBytes:
    """What others hold beside a graph's phases; `always_nbytes` of it beside the optimizer's step, too."""

    forward_nbytes: int
    backward_nbytes: int
    always_nbytes: int = 0

    @staticmethod
    def of(captured: Captured, live_nbytes: int, given_nbytes: int) -> ExternalBytes:
        """Of a graph that is about to run its forward; arguments as for `Captured.external_in_forward`."""
        forward_nbytes = captured.external_in_forward(live_nbytes, given_nbytes)
        return ExternalBytes(forward_nbytes, forward_nbytes + min(live_nbytes, captured.loss_nbytes))


class StepNeeds:
    """The most that a step has needed so far in the form that it has, and what it would have needed in segments.

    Attributes:
        whole: the step is not cut into segments, and may need less so.
    """

    def __init__(self, in_segments: Callable[[], Captured] | None = None) -> None:
        """`in_segments`: of a step that is whole: describes it cut into segments."""
        self.most = Needs()
        self.whole = in_segments is not None
        self._in_segments = in_segments
        self._runs: dict[tuple[str, PhaseContext], int] = {}

    def ran(self, phase: str, context: PhaseContext, external_nbytes: int) -> None:
        """A phase has run in these surroundings, beside so many bytes of others' values."""
        self._runs[phase, context] = max(external_nbytes, self._runs.get((phase, context), 0))

    def has_run(self, phase: str) -> bool:
        return any(ran == phase for ran, _ in self._runs)

    def least(self, layout: ChunkLayout) -> Needs:
        """The most that the runs need in whichever form takes less: a step is whole only where nothing moves."""
        if self._in_segments is None:
            return self.most
        cut, needs = self._in_segments(), Needs()
        for (phase, context), external_nbytes in self._runs.items():
            step = profile(context.applied_to(cut), layout)
            needs |= Needs.of(step.forward if phase == FORWARD else step.backward, layout, external_nbytes)
        return Needs(needs.moving_nbytes, min(needs.all_resident_nbytes, self.most.all_resident_nbytes))


class SessionNeeds:
    """What is known of a session's needs. Those of a step are known as long as it is there.

    Attributes:
        more_graphs_may_follow: torch.compile splits the model: other graphs may follow.
    """

    def __init__(self) -> None:
        self.more_graphs_may_follow = False
        self._noted: weakref.WeakSet[StepNeeds] = weakref.WeakSet()
        self._named_nbytes = 0

    def note(self, noted: StepNeeds, needs: Needs) -> None:
        noted.most |= needs
        self._noted.add(noted)

    def minimum_nbytes(self, layout: ChunkLayout) -> int:
        """The smallest budget that works for all that is known, and no less than an error has named."""
        known = Needs()
        for noted in self._noted:
            known |= noted.least(layout)
        return max(self._named_nbytes, known.minimum_nbytes(layout) if known != Needs() else 0)

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
        """The error to raise: its minimum is that of all that is known, and no less than an earlier one's.

        Args:
            needs: of what lacks room, cut into segments, beside all that is held.
            num_graphs: that were compiled so far, with the one that lacks room.
            trained: parameters whose gradients these make.
            begins: it is a forward that lacks room.
        """
        for noted in self._noted:
            needs |= Needs(0, noted.most.all_resident_nbytes) if noted.whole else noted.most
        self._named_nbytes = max(self._named_nbytes, error.minimum_nbytes, needs.minimum_nbytes(layout))
        evaluates = not trained and any(spec.trainable for spec in layout.specs().values())
        grown = begins and any(noted.has_run(BACKWARD) for noted in self._noted)
        covers = ""
        if self.more_graphs_may_follow or num_graphs > 1:
            covers = "the graph compiled so far" if num_graphs == 1 else f"the {num_graphs} graphs compiled so far"
        return error.covering(self._named_nbytes, covers, evaluates=evaluates, grown=grown)
