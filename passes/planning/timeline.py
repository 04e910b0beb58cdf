"""Plan consecutive phases as one line of positions, scheduled as a whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from chunkc.ir.hardware import Hardware
from chunkc.ir.items import Copy, Item, SavedStorage
from chunkc.ir.layout import GRAD, PARAM, Chunk
from chunkc.ir.plan import Moment, PhasePlan, Plan, Position, chunks_after, gradients_at
from chunkc.ir.program import BACKWARD, FORWARD
from chunkc.passes.planning.eviction import Schedule, schedule
from chunkc.passes.planning.offload import Saved, copies
from chunkc.passes.planning.residency import ResidentData, chunk_items, moving_only
from chunkc.passes.planning.room import Room

BETWEEN = "between"


@dataclass(frozen=True)
class _Line:
    """Consecutive phases as one scheduled line of positions; `spans`: phase, begin, end."""

    positions: list[Position]
    spans: list[tuple[str, int, int]]
    minimum_nbytes: int
    schedule: Schedule

    @staticmethod
    def of(
        phases: Sequence[tuple[str, Sequence[Position]]],
        room: Room,
        hardware: Hardware,
        boundary_nbytes: int,
        saved: Sequence[Saved],
        most_s: float = math.inf,
    ) -> _Line:
        """Lay out and schedule the phases; see `plan_phases`, and for `most_s` `schedule`."""
        layout, resident = room.layout, room.resident
        line: list[Position] = []
        spans, barriers = [], []
        for name, phase in phases:
            if line:
                barriers.append(len(line))
                line.append(_between(boundary_nbytes))
            barriers.append(len(line))
            spans.append((name, len(line), len(line) + len(phase)))
            line += [moving_only(position, resident) for position in phase]
        calls = [position for position in line if position.phase != BETWEEN and position.tile is None]
        updates = [position for position in line if position.tile is not None and not position.keeps_gradients]
        consumed = {Chunk(GRAD, position.tile.group) for position in updates if position.tile is not None}
        minimum = room.check_minimum(calls)
        capacity = [max(0, room.free(position)) for position in line]
        items = chunk_items(layout, line, resident)
        ways = [Copy(link) for link in layout.links_of(PARAM)]
        items |= {SavedStorage(storage.storage): Item(storage.nbytes, *ways) for storage in saved}
        calls_of = {name: [at for at in range(begin, end) if line[at].tile is None] for name, begin, end in spans}
        offloads = copies(saved, calls_of.get(FORWARD), calls_of[BACKWARD]) if saved else []
        scheduled = schedule(line, items, capacity, hardware, barriers, offloads, consumed, most_s)
        return _Line(line, spans, minimum, scheduled)


def passes_s(
    phases: Sequence[tuple[str, Sequence[Position]]],
    room: Room,
    *,
    hardware: Hardware,
    boundary_nbytes: int = 0,
    saved: Sequence[Saved] = (),
    most_s: float = math.inf,
) -> float:
    """Return the seconds of the phases under the plan of `plan_phases`.

    Raises:
        BudgetError: there is no plan.
        TooSlow: they take more than `most_s`.
    """
    return _Line.of(phases, room, hardware, boundary_nbytes, saved, most_s).schedule.seconds


def plan_phases(
    phases: Sequence[tuple[str, Sequence[Position]]],
    room: Room,
    *,
    hardware: Hardware,
    boundary_nbytes: int = 0,
    saved: Sequence[Saved] = (),
) -> Plan:
    """Plan consecutive phases; chunks may stay in their slots from one to the next.

    Args:
        room: its external bytes are of values of earlier calls still in flight.
        boundary_nbytes: non-model bytes while user code runs between the phases.
        saved: storages that are at home between the forward and the backward.

    Raises:
        BudgetError: no plan fits; its `minimum_nbytes` holds for these residents.
    """
    planned, layout = _Line.of(phases, room, hardware, boundary_nbytes, saved), room.layout
    line, spans, stops = planned.positions, planned.spans, planned.schedule.stops()
    resident_data = ResidentData.of(layout, room.resident)
    sunk, group_of = {name for position in line for name, _ in position.sunk}, layout.group_of()
    resident_gradients = {
        name: nbytes
        for name, nbytes in resident_data.gradients.items()
        if name in sunk or group_of.get(name) not in layout.transient
    }
    gradients = [nbytes for nbytes, _ in gradients_at(line, resident_gradients)]
    phase_plans, kept = [], frozenset[Chunk]()
    for index, (name, begin, end) in enumerate(spans):
        moments = tuple(
            Moment(
                name=line[at].name,
                phase=name,
                op=line[at].op,
                module=line[at].module,
                parameter_nbytes=resident_data.parameter_nbytes,
                gradient_nbytes=gradients[at],
                state_nbytes=resident_data.state_nbytes,
                other_nbytes=room.external_nbytes + layout.overhead_nbytes,
                non_model_nbytes=line[at].non_model_nbytes,
                slot_nbytes=planned.schedule.occupancy[at],
                sunk=line[at].sunk,
                consumed=line[at].consumed,
            )
            for at in range(begin, end)
        )
        # The stop before "between", and the one after it, both belong to the end of the earlier phase.
        tail = stops[end]
        tiles = {at: tile for at, position in enumerate(line[begin:end]) if (tile := position.tile) is not None}
        phase_plans.append(PhasePlan(name, (*stops[begin:end], tail), moments, tiles))
        if index + 1 < len(spans):
            kept = chunks_after(stops[: end + 1])
    minimum_nbytes, resident = planned.minimum_nbytes, room.resident
    return Plan(room.budget_nbytes, minimum_nbytes, resident, tuple(phase_plans), kept, resident_gradients)


def _between(non_model_nbytes: int) -> Position:
    """Represent user code between phases as a call that needs no chunk: the room it leaves is for slots."""
    return Position(BETWEEN, BETWEEN, non_model_nbytes, "user code", "", frozenset(), frozenset(), 0.0)
