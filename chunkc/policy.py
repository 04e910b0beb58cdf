"""What stays resident, what is compiled whole, and which plan is asked for: decided here and nowhere else.

A pure state machine that is driven twice: by what happens in training (`compilation`, `graph`, `optim.update`), and by
what a step on fake tensors says will happen (`explaining.rehearsal`). A `Situation` is what a model has come to. An
event is what happens next. `decide` answers with a decision: the situation from then on, and a request for a plan.
Who drives it acts: compiles, moves residents home, makes the plan, runs it.

| event | what is decided |
|---|---|
| `GraphCaptured` | who stays, among those that stay so far and the groups that are new; the first plan |
| `SizesCalled` | with dynamic shapes: who leaves where a call's sizes need more room |
| `PhaseCalled` | beside what others hold: who leaves, whether a whole graph is cut, and the plan |
| `UpdateDue` | who leaves for the optimizer's step, and is due then as well; or the plan |

How many bytes others hold is counted by `live_values`, for both drivers too. An event that does not fit raises
`BudgetError`, and the situation stays what it was. Residents only ever leave: one that came back would move again as
soon as the same room was needed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import overload

from chunkc.absences import Mixes, absences, first_or_quickest, first_that_fits, leanest_form, step_s
from chunkc.captured import Captured, profile
from chunkc.ir.chunks import ChunkLayout
from chunkc.ir.errors import BudgetError
from chunkc.ir.hardware import Hardware
from chunkc.ir.items import ALL_PRESENT, Absence, ItemId
from chunkc.ir.plan import Plan, Position
from chunkc.options import Activations
from chunkc.passes.layout import EMPTY_LAYOUT
from chunkc.passes.planning import (
    check_minimum,
    choose_resident,
    choose_whole,
    everything,
    fixed_nbytes,
    staying_beside,
    whole_beside,
)
from chunkc.passes.update_planning import check_update, staying_beside_update, whole_beside_update

HELD_GRANULES = 256
"""Plans are made for what others hold rounded up to this part of the budget, where that fits: a program that keeps a
few more values each step, such as losses, does not replan every time."""

Key = tuple[object, ...]
"""What a plan depends on, to find it again."""


@dataclass(frozen=True)
class Situation:
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
    def may_be_whole(self) -> bool:
        """Whether the next graph may be compiled whole: no group has been sent home by an earlier one's plan."""
        return self.num_graphs == 0 or self.resident == everything(self.layout)

    @property
    def key(self) -> Key:
        """What plans depend on."""
        return self.budget_nbytes, self.layout.version, *self.staying, self.activations

    @property
    def staying(self) -> tuple[frozenset[int], frozenset[int]]:
        """Groups that stay on the compute tier, and those that are cut over ranks and stand there whole."""
        return self.resident, self.layout.whole

    def gone_nbytes(self, others_nbytes: int) -> int:
        """How much less than nothing others hold beside a backward, as values of its own are gone (see `live_values`).

        Of a model in one graph it is the caller who lets go of outputs: the prediction is for one who does not.
        """
        return max(0, -others_nbytes) if self.num_graphs > 1 else 0


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
class Around:
    """What of a phase's surroundings its plan depends on, beside the bytes that others hold.

    Attributes:
        cold_backward: the backward finds none of its chunks in a slot.
        hooked: parameters whose gradients are returned to autograd.
        updates: (group, stages of its update) of the groups that the backward may update in slots, in order.
        kept_inputs: inputs of a backward that others keep: gradients of outputs, and saved values for another backward.
        absent: what of the forward's values is absent until the backward; None: that is yet to be decided.
    """

    cold_backward: bool = False
    hooked: frozenset[str] = frozenset()
    updates: tuple[tuple[int, int], ...] = ()
    kept_inputs: frozenset[str] = frozenset()
    absent: Absence | None = None

    def seen_by(self, captured: Captured) -> Captured:
        """The captured graph in these surroundings."""
        return captured.without(self.absent or ALL_PRESENT).returning(self.hooked).holding(self.kept_inputs)

    def finding(self, plan: Plan, present: Collection[ItemId]) -> Around:
        """The surroundings of a backward that finds these chunks in slots, where `plan` was made for these."""
        return replace(self, cold_backward=True) if plan.begins_cold(present) else self


ALONE = Around()


# --- what is asked for ---


@dataclass(frozen=True)
class StepRequest:
    """The plan of a graph's forward and backward.

    Attributes:
        situation: the one it is for.
        held_nbytes: what others hold that there is room for.
        spare_nbytes: the part of it that nobody holds yet.
    """

    situation: Situation
    held_nbytes: int = 0
    spare_nbytes: int = 0
    around: Around = ALONE

    @property
    def key(self) -> Key:
        return *self.situation.key, self.held_nbytes, self.around


@dataclass(frozen=True)
class UpdateRequest:
    """The plan of an optimizer's step that updates these groups in slots, beside `held_nbytes` of others' values, in
    stages (see `chunkc.ir.updates`). `situation`: that of the step, in which fewer groups may stand whole than else."""

    situation: Situation
    groups: tuple[int, ...]
    held_nbytes: int
    num_stages: int

    @property
    def key(self) -> Key:
        return *self.situation.key, self.groups, self.held_nbytes, self.num_stages


# --- events ---


@dataclass(frozen=True)
class GraphCaptured:
    """A graph was compiled to `captured`; `layout` has room for its parameters."""

    captured: Captured
    layout: ChunkLayout


@dataclass(frozen=True)
class SizesCalled:
    """A graph is about to be called with other sizes, at which it is this."""

    captured: Captured


@dataclass(frozen=True)
class PhaseCalled:
    """A forward or a backward is about to run beside `held_nbytes` of others' values."""

    forms: Forms
    held_nbytes: int
    around: Around = ALONE


@dataclass(frozen=True)
class UpdateDue:
    """The optimizer is about to update these groups in slots, beside `held_nbytes` of others' values."""

    groups: tuple[int, ...]
    held_nbytes: int
    num_stages: int = 1


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

    situation: Situation
    captured: Captured
    request: StepRequest


@dataclass(frozen=True)
class UpdateDecision:
    """What follows for an optimizer's step: `request` is for the plan to run by. None: residents have to leave first,
    and more groups are due than were said."""

    situation: Situation
    request: UpdateRequest | None


@overload
def decide(situation: Situation, event: UpdateDue) -> UpdateDecision: ...


@overload
def decide(situation: Situation, event: GraphCaptured | SizesCalled | PhaseCalled) -> StepDecision: ...


def decide(situation: Situation, event: Event) -> StepDecision | UpdateDecision:
    """What follows from an event.

    Raises:
        BudgetError: it does not fit the budget, whoever leaves.
    """
    match event:
        case GraphCaptured():
            return _captured(situation, event)
        case SizesCalled():
            return _beside(situation, event.captured, ALONE, 0, exact=True)
        case PhaseCalled():
            return _phase(situation, event)
        case UpdateDue():
            return _update(situation, event)


def _captured(now: Situation, event: GraphCaptured) -> StepDecision:
    """Any group may stay that is new and not cut over ranks; of the others those that stay so far. Any may stand whole
    that is new and cut, where no stage is forced; of the others those that do so far."""
    captured, layout = event.captured, event.layout.with_whole(())
    num_known = len(now.layout.groups) if now.num_graphs else 0
    new = layout.groups[num_known:]
    allowed = now.resident | (frozenset(group.index for group in new) - layout.cut)
    may_be_whole = now.layout.whole.union(group.index for group in new if group.may_be_whole)
    all_may_stay = len(allowed) == len(layout.groups)
    least = profile(leanest_form(captured, now.activations, layout), layout).all
    check_minimum(least, layout, now.budget_nbytes, 0, all_may_stay=all_may_stay)
    after = replace(now, layout=layout, num_graphs=now.num_graphs + 1, trained=now.trained | captured.trained)

    def decision(around: Around) -> StepDecision:
        needs = profile(around.seen_by(captured), layout).all
        check_minimum(needs, layout, now.budget_nbytes, 0, all_may_stay=all_may_stay)
        resident = choose_resident(needs, layout, now.budget_nbytes, allowed)
        chosen = choose_whole(needs, layout, now.budget_nbytes, may_be_whole)
        found = replace(after, layout=chosen, resident=resident)
        return StepDecision(found, captured, StepRequest(found, around=around))

    return _chosen(after, captured, ALONE, 0, allowed, decision)


def _phase(now: Situation, event: PhaseCalled) -> StepDecision:
    """The first of a graph's forms that fits."""
    return first_that_fits(event.forms, lambda captured: _beside(now, captured, event.around, event.held_nbytes))


def _beside(
    now: Situation, captured: Captured, around: Around, held_nbytes: int, *, exact: bool = False
) -> StepDecision:
    """A graph beside what others hold, from which residents may have to leave; `exact`: without room for more."""

    def decision(around: Around) -> StepDecision:
        step = profile(around.seen_by(captured), now.layout)
        needs = step.backward if around.cold_backward else step.passes
        layout = whole_beside(needs, now.layout, now.budget_nbytes, held_nbytes)
        resident, _ = staying_beside(needs, layout, now.budget_nbytes, held_nbytes, now.resident)
        after = now if (resident, layout.whole) == now.staying else replace(now, layout=layout, resident=resident)
        room_nbytes = held_nbytes if exact else _with_room(after, needs, held_nbytes)
        return StepDecision(after, captured, StepRequest(after, room_nbytes, room_nbytes - held_nbytes, around))

    return _chosen(now, captured, around, held_nbytes, now.resident, decision)


def _chosen(
    now: Situation,
    captured: Captured,
    around: Around,
    held_nbytes: int,
    allowed: frozenset[int],
    decision: Callable[[Around], StepDecision],
) -> StepDecision:
    """What may become of the values that a graph saves: the first that fits, or under "auto" the quickest.

    Args:
        allowed: groups that may stay.
        decision: what follows from one; raises `BudgetError` where it does not fit.
    """
    if around.absent is not None:
        return decision(around)
    layout, hardware, mixes = now.layout, now.hardware, None
    if now.activations == "auto" and hardware is not None:
        mixes = Mixes(captured, layout, allowed, now.budget_nbytes, held_nbytes, hardware)

    def seconds(one: StepDecision, most_s: float) -> float:
        assert hardware is not None
        seen, room_nbytes = one.request.around.seen_by(captured), now.budget_nbytes - one.request.held_nbytes
        return step_s(seen, layout, one.situation.resident, hardware, room_nbytes, dict(around.updates), most_s)

    return first_or_quickest(
        absences(captured, now.activations, layout),
        mixes,
        lambda absent: decision(replace(around, absent=absent)),
        seconds,
        lambda one: one.situation.resident,
    )


def _with_room(now: Situation, needs: Sequence[Position], held_nbytes: int) -> int:
    """What others hold, with room for a little more of it where that fits (see `HELD_GRANULES`)."""
    granule = max(1, now.budget_nbytes // HELD_GRANULES)
    wider_nbytes = -(-held_nbytes // granule) * granule
    if wider_nbytes != held_nbytes:
        with suppress(BudgetError):
            check_minimum(needs, now.layout, now.budget_nbytes, wider_nbytes, now.resident)
            return wider_nbytes
    return held_nbytes


def _update(now: Situation, event: UpdateDue) -> UpdateDecision:
    """Trained residents that leave are due as well. What ranks have whole gives its room back for the step where that
    is needed: after it, all of it that is trained is gathered anew."""
    asked = now.budget_nbytes, event.held_nbytes, now.resident, event.num_stages
    layout = whole_beside_update(now.layout, event.groups, now.budget_nbytes, event.held_nbytes, event.num_stages)
    try:
        check_update(layout, event.groups, *asked)
    except BudgetError:
        trained = now.layout.groups_of(now.trained)
        staying = staying_beside_update(now.layout, event.groups, trained, *asked)
        if staying == now.resident:
            raise
        return UpdateDecision(replace(now, resident=staying), None)
    return UpdateDecision(
        now, UpdateRequest(replace(now, layout=layout), event.groups, event.held_nbytes, event.num_stages)
    )


# --- before there is a graph: whole or in segments ---


def fits_whole(layout: ChunkLayout, budget_nbytes: int, captured: Captured | None = None) -> bool:
    """Whether all model data can stay on the compute tier, beside what a graph needs that is compiled whole; without
    one: as far as model data alone tells."""
    if layout.cut:
        return False
    staying_nbytes = fixed_nbytes(layout, everything(layout))
    positions = () if captured is None else profile(captured, layout).all
    most_nbytes = max((position.non_model_nbytes for position in positions), default=0)
    return staying_nbytes + most_nbytes <= budget_nbytes


def smallest_budget(captured: Captured, layout: ChunkLayout) -> int:
    """The smallest budget for a graph by itself, of which any group may stay."""
    try:
        return check_minimum(profile(captured, layout).all, layout.with_whole(()), 0, 0, all_may_stay=not layout.cut)
    except BudgetError as error:
        return error.minimum_nbytes
