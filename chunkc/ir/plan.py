"""Represent a plan: the chunks that move before each call, and the bytes in use at every moment."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from chunkc.ir.items import MovedId
from chunkc.ir.layout import GRAD, Chunk
from chunkc.ir.program import UPDATE

PREFETCH, WAIT, EVICT, WRITE_BACK = "prefetch", "wait", "evict", "write_back"
"""Kinds of events."""


@dataclass(frozen=True)
class Event:
    """An action on an item between two calls.

    prefetch: take a slot and start to fill it from home (a gradient chunk is only read when it holds gradients).
    wait: hold the computation until the item's copy on that link is done.
    write_back: start to copy the slot home.
    evict: give the slot back.

    The slot of a saved storage is its own memory; in the backward, the memory that it comes back to.

    Attributes:
        link: queue of the copy (see `chunkc.ir.links`); empty if there is none.
    """

    kind: str
    item: MovedId
    nbytes: int
    link: str = ""

    def __str__(self) -> str:
        return f"{self.kind}({self.item}, {self.link})" if self.link else f"{self.kind}({self.item})"


def chunks_after(stops: Iterable[Sequence[Event]], present: Iterable[Chunk] = ()) -> frozenset[Chunk]:
    """Return the chunks that have a slot after these stops, of a phase that begins with those `present`."""
    chunks = set(present)
    for event in (event for stop in stops for event in stop):
        if event.kind == PREFETCH and isinstance(event.item, Chunk):
            chunks.add(event.item)
        elif event.kind == EVICT and isinstance(event.item, Chunk):
            chunks.remove(event.item)
    return frozenset(chunks)


@dataclass(frozen=True)
class Tile:
    """Elements `begin` to `end` of a chunk group: the range of one optimizer update.

    Attributes:
        stage, num_stages: index of this stage of the update, and their number (see `chunkc.ir.updates`).
    """

    group: int
    begin: int
    end: int
    stage: int = 0
    num_stages: int = 1

    def __str__(self) -> str:
        return f"{self.group}[{self.begin}:{self.end}]" + (f".{self.stage}" if self.num_stages > 1 else "")


def tiles_by_group(tiles: Iterable[Tile]) -> dict[int, list[Tile]]:
    """Return tiles in their order, by chunk group."""
    groups: dict[int, list[Tile]] = {}
    for tile in tiles:
        groups.setdefault(tile.group, []).append(tile)
    return groups


@dataclass(frozen=True)
class Position:
    """Scheduler's description of one call.

    Attributes:
        non_model_nbytes: activations, temporaries and held inputs at the call's own peak.
        op, module: the operation at that peak and the user's module it belongs to.
        reads, writes: items that must be in slots during the call; written ones become dirty.
        cost_s: estimated seconds of arithmetic, to place copies against; of an update also those of its own copies, if
            these take longer.
        sunk: (parameter, whether the gradient may stay in the call's own storage) for each complete gradient that the
            call yields.
        left_nbytes: activations and held inputs once the call is over.
        tile: range of the update, if this is no call but a part of an update that belongs to a backward.
        keeps_gradients: whether that update leaves gradients as they are, for home.
        waiting: (group, bytes) of gradients on the compute tier meanwhile that a later update consumes, if the group is
            resident.
        consumed: parameters of the gradients, on the compute tier, that this update consumes.
    """

    name: str
    phase: str
    non_model_nbytes: int
    op: str
    module: str
    reads: frozenset[Chunk]
    writes: frozenset[Chunk]
    cost_s: float
    sunk: tuple[tuple[str, bool], ...] = ()
    left_nbytes: int = 0
    tile: Tile | None = None
    keeps_gradients: bool = False
    waiting: tuple[tuple[int, int], ...] = ()
    consumed: tuple[str, ...] = ()

    def waiting_nbytes(self, resident: Collection[int]) -> int:
        """Return the bytes of gradients of these residents that wait for their update."""
        return sum(nbytes for group, nbytes in self.waiting if group in resident) if self.waiting else 0

    @cached_property
    def items(self) -> frozenset[Chunk]:
        return self.reads | self.writes

    def with_less(self, non_model_nbytes: int, left_nbytes: int) -> Position:
        """Return the call with fewer bytes alive, at its peak and once it is over."""
        if not (non_model_nbytes or left_nbytes):
            return self
        non_model_nbytes, left_nbytes = self.non_model_nbytes - non_model_nbytes, self.left_nbytes - left_nbytes
        return replace(self, non_model_nbytes=non_model_nbytes, left_nbytes=left_nbytes)


@dataclass(frozen=True)
class Moment:
    """Predicted bytes on the compute tier at one position, by kind.

    Attributes:
        parameter_nbytes, gradient_nbytes, state_nbytes: resident model data. Gradients count from the moment they are
            complete.
        other_nbytes: external bytes (values of other calls that are still held), and the layout's overhead.
        non_model_nbytes: activations, temporaries and held inputs.
        slot_nbytes: chunks, present or on their way, and saved storages on their way.
        sunk, consumed: gradients that it yields, and that it consumes, as of a `Position`.
    """

    name: str
    phase: str
    op: str
    module: str
    parameter_nbytes: int
    gradient_nbytes: int
    state_nbytes: int
    other_nbytes: int
    non_model_nbytes: int
    slot_nbytes: int
    sunk: tuple[tuple[str, bool], ...] = ()
    consumed: tuple[str, ...] = ()

    @property
    def resident_nbytes(self) -> int:
        """Bytes that neither move nor belong to the phase."""
        return self.parameter_nbytes + self.gradient_nbytes + self.state_nbytes + self.other_nbytes

    @property
    def nbytes(self) -> int:
        return self.resident_nbytes + self.non_model_nbytes + self.slot_nbytes


def gradients_at(
    line: Sequence[Position | Moment], gradients: Mapping[str, int], present: Collection[str] = ()
) -> list[tuple[int, int]]:
    """Return the bytes of resident gradients (parameter -> bytes) while each position runs, and once it is over.

    They are the gradients `present` from the beginning, those complete before the position and not consumed, and copies
    that the position makes of its own. In the optimizer's step all are there. Adding to a gradient that is there takes
    no copy.
    """
    nbytes_at, complete = [], sum(nbytes for name, nbytes in gradients.items() if name in present)
    for position in line:
        if position.phase == UPDATE:
            complete = sum(gradients.values())
        own = [(gradients[name], kept) for name, kept in position.sunk if name in gradients and name not in present]
        during = complete + sum(nbytes for nbytes, handed_over in own if not handed_over)
        complete += sum(nbytes for nbytes, _ in own) - sum(gradients.get(name, 0) for name in position.consumed)
        nbytes_at.append((during, complete))
    return nbytes_at


@dataclass(frozen=True)
class PhasePlan:
    """Events before each call, and (last entry) after the last one.

    Attributes:
        tiles: of a backward, the moments that are updates, with their tiles (see
            `passes.planning.updates_in_backward`).
    """

    phase: str
    stops: tuple[tuple[Event, ...], ...]
    moments: tuple[Moment, ...]
    tiles: Mapping[int, Tile] = field(default_factory=dict)

    @property
    def updated(self) -> frozenset[int]:
        """Groups that a backward updates."""
        return frozenset(tile.group for tile in self.tiles.values())

    @property
    def consumes(self) -> frozenset[int]:
        """Updated groups that send no gradients home, unless updates keep them."""
        leaving = {event.item for stop in self.stops for event in stop if event.kind == WRITE_BACK}
        return frozenset(group for group in self.updated if Chunk(GRAD, group) not in leaving)

    def last_copies(self) -> dict[int, tuple[int, int]]:
        """Return group -> (stop, place in it) of the last event that starts a copy of one of its chunks, either way."""
        last: dict[int, tuple[int, int]] = {}
        for at, stop in enumerate(self.stops):
            for place, event in enumerate(stop):
                if event.kind in (PREFETCH, WRITE_BACK) and isinstance(event.item, Chunk):
                    last[event.item.group] = (at, place)
        return last


@dataclass(frozen=True)
class Plan:
    """A plan for one step, or for the part of it that one graph covers.

    Attributes:
        budget_nbytes: the limit it keeps to.
        minimum_nbytes: the smallest budget for which there is a plan.
        resident: groups with parameters, gradients and states that never leave the compute tier.
        phases: forward, then backward if there is one; or the optimizer's update.
        kept: items left in their slots from the forward to the backward.
        gradients: bytes of every resident gradient, by parameter. The moments are those of a step that begins without
            gradients, after the optimizer has made its states; see `beginning_with`.
    """

    budget_nbytes: int
    minimum_nbytes: int
    resident: frozenset[int]
    phases: tuple[PhasePlan, ...]
    kept: frozenset[Chunk]
    gradients: Mapping[str, int] = field(default_factory=dict)

    def beginning_with(self, present: Collection[str]) -> Plan:
        """Return the plan of a step that begins with the gradients of these parameters.

        They are an earlier step's, or other graphs'.
        """
        if not present:
            return self
        nbytes = iter(gradients_at(self.moments, self.gradients, present))
        return self._with_moments(lambda moment: replace(moment, gradient_nbytes=next(nbytes)[0]))

    def with_gradients(self, present: Collection[str]) -> Plan:
        """Return the plan of an optimizer's step in which, of residents, only these parameters have a gradient."""
        nbytes = sum(nbytes for name, nbytes in self.gradients.items() if name in present)
        return self._with_moments(lambda moment: replace(moment, gradient_nbytes=nbytes))

    def begin_nbytes(self, phase: str, present: Collection[str]) -> int:
        """Return the bytes on the compute tier as a phase begins, without its own values and slots.

        Args:
            present: parameters with a gradient there now. The first moment counts gradients that it makes, too.
        """
        first = next((moment for part in self.phases if part.phase == phase for moment in part.moments), None)
        if first is None:
            return 0
        gradient_nbytes = sum(nbytes for name, nbytes in self.gradients.items() if name in present)
        return first.resident_nbytes - first.gradient_nbytes + gradient_nbytes

    def with_less_external(self, nbytes: int) -> Plan:
        """Return the plan with `nbytes` fewer external bytes than it was made for."""
        if not nbytes:
            return self
        plan = self._with_moments(lambda moment: replace(moment, other_nbytes=moment.other_nbytes - nbytes))
        return replace(plan, minimum_nbytes=self.minimum_nbytes - nbytes)

    def _with_moments(self, changed: Callable[[Moment], Moment]) -> Plan:
        """Return the plan with each moment, in order, as changed."""
        phases = tuple(replace(phase, moments=tuple(map(changed, phase.moments))) for phase in self.phases)
        return replace(self, phases=phases)

    def begins_cold(self, present: Collection[Chunk]) -> bool:
        """Whether this plan cannot run a backward that begins with these chunks in slots: its forward left others."""
        return present != self.kept or len(self.phases) < 2

    @property
    def moments(self) -> tuple[Moment, ...]:
        return tuple(moment for phase in self.phases for moment in phase.moments)

    @property
    def peak(self) -> Moment | None:
        """The fullest moment; None if nothing is computed, as in the backward of an addition alone."""
        return max(self.moments, key=lambda moment: moment.nbytes, default=None)

    @property
    def predicted_peak_nbytes(self) -> int:
        return max((moment.nbytes for moment in self.moments), default=0)

    def __str__(self) -> str:
        lines = [
            f"plan: budget {self.budget_nbytes:,} bytes, minimum {self.minimum_nbytes:,}, "
            f"predicted peak {self.predicted_peak_nbytes:,}",
            f"resident groups: {sorted(self.resident) or 'none'}; kept for the backward: {sorted(self.kept) or 'none'}",
        ]
        for phase in self.phases:
            for stop, moment in zip(phase.stops, phase.moments):
                lines += [f"    {event}" for event in stop]
                lines.append(
                    f"{moment.name:<16} {moment.nbytes:>15,} = {moment.resident_nbytes:,} resident "
                    f"+ {moment.non_model_nbytes:,} non-model + {moment.slot_nbytes:,} slots   "
                    f"{moment.op} {moment.module}".rstrip()
                )
            lines += [f"    {event}" for event in phase.stops[-1]]
        return "\n".join(lines) + "\n"
