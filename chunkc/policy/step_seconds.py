"""Estimate a step's seconds with the plan that a graph would get: the measure by which the policy compares plans."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from chunkc.ir.hardware import Hardware
from chunkc.ir.layout import GRAD, ChunkLayout
from chunkc.ir.program import BACKWARD, FORWARD
from chunkc.passes.planning.copy_scheduling import TooSlow
from chunkc.passes.planning.room import Room
from chunkc.passes.planning.timeline import passes_s
from chunkc.passes.planning.update_placement import group_update_nbytes
from chunkc.passes.planning.updates_in_backward import updated_in, with_updates
from chunkc.policy.captured_step import Captured, profile


def step_s(
    form: Captured,
    room: Room,
    hardware: Hardware,
    updates: Mapping[int, int],
    most_s: float = math.inf,
    *,
    undoable: Collection[int] = (),
) -> float:
    """Return the seconds of a step with the plan that its graph would get; `inf` may stand for more than `most_s`.

    The optimizer's step is assumed to fetch all groups that move and are not updated in the backward, at the rate of
    the links, and to update groups that have arrived meanwhile.

    Args:
        updates, undoable: groups that the backward may update (see `with_updates`).

    Raises:
        BudgetError: there is no plan.
    """
    layout, resident = room.layout, room.resident
    needs, trained = profile(form, layout), layout.groups_of(form.trained)
    if sum(position.cost_s for position in needs.passes) + update_arithmetic_s(layout, trained, hardware) > most_s:
        return math.inf
    backward = needs.backward
    if updates or layout.transient:
        backward = with_updates(backward, room, updates, undoable=undoable, hardware=hardware)
    update_s = _update_s(layout, trained - updated_in(backward), resident, hardware)
    try:
        seconds = passes_s(
            [(FORWARD, needs.forward), (BACKWARD, backward)],
            room,
            hardware=hardware,
            boundary_nbytes=needs.boundary_nbytes,
            saved=form.offloaded,
            most_s=most_s - update_s,
        )
    except TooSlow:
        return math.inf
    return seconds + update_s


def _update_s(layout: ChunkLayout, groups: frozenset[int], resident: frozenset[int], hardware: Hardware) -> float:
    """Return the seconds to update these groups: residents first, then groups that move.

    The groups that move take at least as long as the busiest link needs to copy them, with gradients and states, to the
    compute tier and home again.
    """
    moving = groups - resident
    moving_s = max(update_arithmetic_s(layout, moving, hardware), _links_s(layout, moving, hardware))
    return update_arithmetic_s(layout, groups & resident, hardware) + moving_s


def update_arithmetic_s(layout: ChunkLayout, groups: Collection[int], hardware: Hardware) -> float:
    """Return the seconds of the update's arithmetic."""
    return sum(group_update_nbytes(layout.groups[index]) for index in groups) / hardware.update_bytes_per_s


def _links_s(layout: ChunkLayout, groups: Collection[int], hardware: Hardware) -> float:
    """Return the seconds for which the update's busiest link is busy."""
    links: dict[str, float] = {}
    for group in (layout.groups[index] for index in groups):
        for kind in group.update_kinds:
            inward, outward = layout.links_of(kind)
            for link in (inward, *(() if kind == GRAD else (outward,))):
                links[link] = links.get(link, 0.0) + hardware.copy_s(link, group.nbytes(kind))
    return max(links.values(), default=0.0)
