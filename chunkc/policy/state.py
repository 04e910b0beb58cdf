"""Records that go into and come out of `policy.decide`: planner state, events, decisions, and requests for plans."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Set
from dataclasses import dataclass, field, replace

from chunkc.ir.hardware import Hardware
from chunkc.ir.items import KEEP_ALL, ActivationPlan
from chunkc.ir.layout import Chunk, ChunkLayout
from chunkc.ir.plan import Plan
from chunkc.options import Activations
from chunkc.passes.planning.layout import EMPTY_LAYOUT
from chunkc.passes.planning.room import Room, everything
from chunkc.policy.captured_step import Captured

Key = tuple[object, ...]
"""The inputs of a plan, to find it again."""


@dataclass(frozen=True)
class PlannerState:
    """A model's state as far as decisions depend on it.

    Attributes:
        layout: of the parameters of all graphs so far.
        resident: its resident groups.
        num_graphs: compiled so far. Before the first, any group may still become resident.
        trained: parameters that get gradients from these graphs.
        activations: the option (see `chunkc.options`).
        hardware: against which activation plans are timed that all fit; None: the first one is taken.
        num_stages: of an update, to time it (see `chunkc.ir.updates`); the most if there are several optimizers.
    """

    budget_nbytes: int
    layout: ChunkLayout = EMPTY_LAYOUT
    resident: frozenset[int] = frozenset()
    num_graphs: int = 0
    trained: frozenset[str] = frozenset()
    activations: Activations = "keep"
    hardware: Hardware | None = field(default=None, compare=False)
    num_stages: int = 1

    @property
    def can_skip_segmentation(self) -> bool:
        """Whether the next graph may be compiled whole: no earlier graph's plan has evicted a resident group."""
        return self.num_graphs == 0 or self.resident == everything(self.layout)

    def room(self, external_nbytes: int = 0) -> Room:
        """Return the room with the residents so far."""
        return Room.of(self.layout, self.budget_nbytes, external_nbytes, self.resident)

    @property
    def key(self) -> Key:
        """The part that plans depend on."""
        return self.budget_nbytes, self.layout.version, *self.residency, self.activations, self.num_stages

    @property
    def residency(self) -> tuple[frozenset[int], frozenset[int]]:
        """The resident groups, and the groups that are sharded over ranks but replicated on the compute tier."""
        return self.resident, self.layout.replicated_by_choice

    def freed_nbytes(self, net_external_nbytes: int) -> int:
        """Return the bytes of its own values that a backward finds freed.

        By these its net external bytes are below zero (see `live_values`). With a single graph they are 0: only the
        caller can free outputs, and the prediction is for a caller that does not.
        """
        return max(0, -net_external_nbytes) if self.num_graphs > 1 else 0


@dataclass(frozen=True)
class Forms:
    """Forms that a graph can be run in: as it is compiled now, and cut into segments if it is whole now."""

    captured: Captured
    in_segments: Callable[[], Captured] | None = None

    def __iter__(self) -> Iterator[Captured]:
        """Yield the form as it is, then the one in segments."""
        yield self.captured
        if self.in_segments is not None:
            yield self.in_segments()


@dataclass(frozen=True)
class PhaseContext:
    """Plan inputs that vary per call, except external bytes.

    Attributes:
        cold_backward: the backward finds none of its chunks in a slot.
        hooked: parameters with gradients that are returned to autograd.
        left_out: parameters with gradients that nothing reads.
        updates: (group, stages of its update) of the groups that the backward may update, in slots or as residents, in
            order.
        undoable: the groups of `updates` for which the update leaves the gradients as they are; these go home as well.
        kept_inputs: inputs of a backward that the caller keeps: gradients of outputs, and saved values for another
            backward.
        activation_plan: of the forward's saved values; None: yet to be decided.
        transient: resident groups without gradients before and after the phase: there are none, and the updates in the
            backward consume those that it makes. The plan may keep them all the same, where there is room.
        step_fits: of an undecided activation plan: the step of all graphs fits with all saved values kept (see
            `seen_steps`).
        marks_complete: insert a node into the backward where a group's gradients are complete.
    """

    cold_backward: bool = False
    hooked: frozenset[str] = frozenset()
    left_out: frozenset[str] = frozenset()
    updates: tuple[tuple[int, int], ...] = ()
    undoable: frozenset[int] = frozenset()
    kept_inputs: frozenset[str] = frozenset()
    activation_plan: ActivationPlan | None = None
    transient: frozenset[int] = frozenset()
    step_fits: bool = False
    marks_complete: bool = False

    def applied_to(self, captured: Captured) -> Captured:
        """Return the form of a captured graph in this context."""
        form = captured.following(self.activation_plan or KEEP_ALL)
        return form.returning(self.hooked).leaving_out(self.left_out).holding(self.kept_inputs)

    def with_present(self, plan: Plan, present: Collection[Chunk]) -> PhaseContext:
        """Return the context of a backward that finds these chunks in slots; `plan` was made for this context."""
        return replace(self, cold_backward=True) if plan.begins_cold(present) else self


EMPTY_CONTEXT = PhaseContext()


def transient_in(
    layout: ChunkLayout, free: Collection[int], made: Set[str], kept: Set[str], updated: Collection[int]
) -> frozenset[int]:
    """Return the resident groups without gradients before and after a phase (see `PhaseContext.transient`).

    Args:
        free: residents without gradients now, which backwards may update.
        made: parameters that get gradients in the graph's backward; `kept`: those left to autograd.
        updated: groups that this backward may update.
    """
    names = {index: {s.spec.name for s in layout.groups[index].slices} for index in free}
    return frozenset(
        index for index in free if names[index].isdisjoint(made) or (index in updated and names[index] <= made - kept)
    )


# --- requests ---


@dataclass(frozen=True)
class StepRequest:
    """A request for the plan of a graph's forward and backward.

    Attributes:
        external_nbytes: external bytes that the plan leaves room for.
        spare_nbytes: the part of it that is not in use yet.
    """

    planner_state: PlannerState
    external_nbytes: int = 0
    spare_nbytes: int = 0
    context: PhaseContext = EMPTY_CONTEXT

    @property
    def in_use_nbytes(self) -> int:
        """External bytes without those to spare."""
        return self.external_nbytes - self.spare_nbytes

    @property
    def room(self) -> Room:
        """Room for the plan."""
        return self.planner_state.room(self.external_nbytes)

    @property
    def key(self) -> Key:
        return *self.planner_state.key, self.external_nbytes, self.context


@dataclass(frozen=True)
class UpdateRequest:
    """A request for the plan of an optimizer's step that updates these groups in slots.

    Attributes:
        planner_state: of the step: fewer groups may be replicated than otherwise.
        num_stages: see `chunkc.ir.updates`.
        transient: as of `UpdateDue`.
    """

    planner_state: PlannerState
    groups: tuple[int, ...]
    external_nbytes: int
    num_stages: int
    transient: frozenset[int] = frozenset()

    @property
    def room(self) -> Room:
        """Room for the plan."""
        return self.planner_state.room(self.external_nbytes)

    @property
    def key(self) -> Key:
        return *self.planner_state.key, self.groups, self.external_nbytes, self.num_stages, self.transient


# --- events ---


@dataclass(frozen=True)
class GraphCaptured:
    """A graph was compiled.

    Attributes:
        captured: the compiled graph.
        layout: with room for its parameters.
        context: of its calls, as far as it is known.
    """

    captured: Captured
    layout: ChunkLayout
    context: PhaseContext = EMPTY_CONTEXT


@dataclass(frozen=True)
class SizesCalled:
    """A graph is about to be called with other sizes.

    Attributes:
        captured: its form for these sizes.
        transient: as of `PhaseContext`.
    """

    captured: Captured
    transient: frozenset[int] = frozenset()


@dataclass(frozen=True)
class PhaseCalled:
    """A forward or a backward is about to run."""

    forms: Forms
    external_nbytes: int
    context: PhaseContext = EMPTY_CONTEXT


@dataclass(frozen=True)
class UpdateDue:
    """The optimizer is about to update groups in slots.

    Attributes:
        groups: those to update.
        transient: resident groups that have no gradients, or none any more.
    """

    groups: tuple[int, ...]
    external_nbytes: int
    num_stages: int = 1
    transient: frozenset[int] = frozenset()


Event = GraphCaptured | SizesCalled | PhaseCalled | UpdateDue


# --- decisions ---


@dataclass(frozen=True)
class StepDecision:
    """A decision for a graph.

    Attributes:
        planner_state: from now on. Residents that it has no more are evicted for good, before anything else happens.
        captured: the graph's form from now on.
        request: for the plan to run by.
    """

    planner_state: PlannerState
    captured: Captured
    request: StepRequest


@dataclass(frozen=True)
class UpdateDecision:
    """A decision for an optimizer's step.

    Attributes:
        planner_state: from now on.
        request: for the plan to run by; None: residents have to be evicted first, and are due in addition to the
            event's groups.
    """

    planner_state: PlannerState
    request: UpdateRequest | None
