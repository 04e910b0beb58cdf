"""What is said to `policy`, and what it answers: a situation, what happens in it, what follows, what is asked for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Set
from dataclasses import dataclass, field, replace

from chunkc.ir.hardware import Hardware
from chunkc.ir.items import KEEP_ALL, ActivationPlan, ItemId
from chunkc.ir.layout import ChunkLayout
from chunkc.ir.plan import Plan
from chunkc.options import Activations
from chunkc.passes.planning.layout import EMPTY_LAYOUT
from chunkc.passes.planning.residency import everything
from chunkc.policy.captured_step import Captured

Key = tuple[object, ...]
"""What a plan depends on, to find it again."""


@dataclass(frozen=True)
class PlannerState:
    """What a model has come to.

    Attributes:
        layout: of the parameters of all graphs so far.
        resident: its groups that stay on the compute tier.
        num_graphs: that were compiled so far. Before the first, any group may still become resident.
        trained: parameters whose gradients these graphs make.
        activations: what becomes of values that forwards save: see `chunkc.options`.
        hardware: against which ways are timed that fit alike; None: the first one is taken.
    """

    budget_nbytes: int
    layout: ChunkLayout = EMPTY_LAYOUT
    resident: frozenset[int] = frozenset()
    num_graphs: int = 0
    trained: frozenset[str] = frozenset()
    activations: Activations = "keep"
    hardware: Hardware | None = field(default=None, compare=False)

    @property
    def can_skip_segmentation(self) -> bool:
        """Whether the next graph may be compiled whole: no group has been sent home by an earlier one's plan."""
        return self.num_graphs == 0 or self.resident == everything(self.layout)

    @property
    def key(self) -> Key:
        """What plans depend on."""
        return self.budget_nbytes, self.layout.version, *self.residency, self.activations

    @property
    def residency(self) -> tuple[frozenset[int], frozenset[int]]:
        """The resident groups, and the groups that are sharded over ranks but replicated on the compute tier."""
        return self.resident, self.layout.replicated_by_choice

    def freed_nbytes(self, other_graphs_nbytes: int) -> int:
        """How much less than nothing others hold beside a backward, as values of its own are gone (see `live_values`).

        Of a model in one graph it is the caller who lets go of outputs: the prediction is for one who does not.
        """
        return max(0, -other_graphs_nbytes) if self.num_graphs > 1 else 0


@dataclass(frozen=True)
class Forms:
    """A graph as it is compiled now; `in_segments` cuts it, where it is whole."""

    captured: Captured
    in_segments: Callable[[], Captured] | None = None

    def __iter__(self) -> Iterator[Captured]:
        """As it is, and after that in segments."""
        yield self.captured
        if self.in_segments is not None:
            yield self.in_segments()


@dataclass(frozen=True)
class PhaseContext:
    """What of a phase's surroundings its plan depends on, beside the bytes that others hold.

    Attributes:
        cold_backward: the backward finds none of its chunks in a slot.
        hooked: parameters whose gradients are returned to autograd.
        left_out: parameters whose gradients nothing reads.
        updates: (group, stages of its update) of the groups that the backward may update, in slots or where they stay,
            in order.
        undoable: those of `updates` that leave the gradients as they are, so that these go home as well.
        kept_inputs: inputs of a backward that others keep: gradients of outputs, and saved values for another backward.
        activation_plan: what of the forward's values is absent until the backward; None: that is yet to be decided.
        spent: groups that stay, and that have no gradients before and after it: none are there, and what a backward
            makes of them its updates use up. Whether they do, is decided: they need not, where there is room.
    """

    cold_backward: bool = False
    hooked: frozenset[str] = frozenset()
    left_out: frozenset[str] = frozenset()
    updates: tuple[tuple[int, int], ...] = ()
    undoable: frozenset[int] = frozenset()
    kept_inputs: frozenset[str] = frozenset()
    activation_plan: ActivationPlan | None = None
    transient: frozenset[int] = frozenset()

    def applied_to(self, captured: Captured) -> Captured:
        """The captured graph in these surroundings."""
        there = captured.following(self.activation_plan or KEEP_ALL)
        return there.returning(self.hooked).leaving_out(self.left_out).holding(self.kept_inputs)

    def with_present(self, plan: Plan, present: Collection[ItemId]) -> PhaseContext:
        """The surroundings of a backward that finds these chunks in slots, where `plan` was made for these."""
        return replace(self, cold_backward=True) if plan.begins_cold(present) else self


EMPTY_CONTEXT = PhaseContext()


def transient_in(
    layout: ChunkLayout, free: Collection[int], made: Set[str], kept: Set[str], updated: Collection[int]
) -> frozenset[int]:
    """Of groups that stay, those that have no gradients before and after a phase of a graph (see
    `PhaseContext.transient`).

    Args:
        free: those without gradients now, that backwards may update.
        made: parameters whose gradients the graph's backward makes; `kept`: those of them that it leaves to autograd.
        updated: groups that this backward may update.
    """
    names = {index: {s.spec.name for s in layout.groups[index].slices} for index in free}
    return frozenset(
        index for index in free if names[index].isdisjoint(made) or (index in updated and names[index] <= made - kept)
    )


# --- what is asked for ---


@dataclass(frozen=True)
class StepRequest:
    """The plan of a graph's forward and backward.

    Attributes:
        situation: the one it is for.
        external_nbytes: what others hold that there is room for.
        spare_nbytes: the part of it that nobody holds yet.
    """

    planner_state: PlannerState
    external_nbytes: int = 0
    spare_nbytes: int = 0
    context: PhaseContext = EMPTY_CONTEXT

    @property
    def key(self) -> Key:
        return *self.planner_state.key, self.external_nbytes, self.context


@dataclass(frozen=True)
class UpdateRequest:
    """The plan of an optimizer's step that updates these groups in slots, beside `external_nbytes` of others' values,
    in stages (see `chunkc.ir.updates`). `planner_state`: that of the step, in which fewer groups may stand whole than
    else. `transient`: as of `UpdateDue`."""

    planner_state: PlannerState
    groups: tuple[int, ...]
    external_nbytes: int
    num_stages: int
    transient: frozenset[int] = frozenset()

    @property
    def key(self) -> Key:
        return *self.planner_state.key, self.groups, self.external_nbytes, self.num_stages, self.transient


# --- events ---


@dataclass(frozen=True)
class GraphCaptured:
    """A graph was compiled to `captured`; `layout` has room for its parameters. `context`: when it will run, as far as
    that is known."""

    captured: Captured
    layout: ChunkLayout
    context: PhaseContext = EMPTY_CONTEXT


@dataclass(frozen=True)
class SizesCalled:
    """A graph is about to be called with other sizes, at which it is this; `transient` as of an `PhaseContext`."""

    captured: Captured
    transient: frozenset[int] = frozenset()


@dataclass(frozen=True)
class PhaseCalled:
    """A forward or a backward is about to run beside `external_nbytes` of others' values."""

    forms: Forms
    external_nbytes: int
    context: PhaseContext = EMPTY_CONTEXT


@dataclass(frozen=True)
class UpdateDue:
    """The optimizer is about to update these groups in slots, beside `external_nbytes` of others' values; of those that
    stay, `transient` have no gradients (any more)."""

    groups: tuple[int, ...]
    external_nbytes: int
    num_stages: int = 1
    transient: frozenset[int] = frozenset()


Event = GraphCaptured | SizesCalled | PhaseCalled | UpdateDue


# --- decisions ---


@dataclass(frozen=True)
class StepDecision:
    """What follows for a graph.

    Attributes:
        situation: from now on. Residents that are in it no more leave for good, before anything else happens.
        captured: the form that the graph has from now on.
        request: for the plan to run by.
    """

    planner_state: PlannerState
    captured: Captured
    request: StepRequest


@dataclass(frozen=True)
class UpdateDecision:
    """What follows for an optimizer's step: `request` is for the plan to run by. None: residents have to leave first,
    and more groups are due than were said."""

    planner_state: PlannerState
    request: UpdateRequest | None
