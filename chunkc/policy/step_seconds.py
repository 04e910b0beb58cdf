"""Estimate a step's seconds with the plan that a graph would get: the measure by which the policy compares plans."""

from __future__ import annotations

import math

from chunkc.ir.hardware import Hardware
from chunkc.ir.layout import ChunkLayout
from chunkc.ir.program import BACKWARD, FORWARD
from chunkc.passes.planning.copy_scheduling import TooSlow
from chunkc.passes.planning.timeline import passes_s
from chunkc.passes.planning.update_seconds import arithmetic_s, update_seconds
from chunkc.passes.planning.updates_in_backward import updated_in
from chunkc.policy.captured_step import Captured, profile
from chunkc.policy.plans import backward_positions
from chunkc.policy.state import StepRequest


def step_s(form: Captured, request: StepRequest, hardware: Hardware, most_s: float = math.inf) -> float:
    """Return the seconds of a step with the requested plan of a graph; `inf` may stand for more than `most_s`.

    The optimizer's step is assumed to fetch all groups that move and are not updated in the backward, at the rate of
    the links, and to update groups that have arrived meanwhile.

    Raises:
        BudgetError: there is no plan.
    """
    planner_state = request.planner_state
    layout, num_stages = planner_state.layout, planner_state.num_stages
    needs, trained = profile(form, layout), layout.groups_of(form.trained)
    if least_s(form, layout, hardware, num_stages) > most_s:
        return math.inf
    backward = backward_positions(form, request, hardware)
    update_s = _update_s(layout, trained - updated_in(backward), planner_state.resident, hardware, num_stages)
    try:
        seconds = passes_s(
            [(FORWARD, needs.forward), (BACKWARD, backward)],
            request.room,
            hardware=hardware,
            boundary_nbytes=needs.boundary_nbytes,
            saved=form.offloaded,
            most_s=most_s - update_s,
        )
    except TooSlow:
        return math.inf
    return seconds + update_s


def least_s(form: Captured, layout: ChunkLayout, hardware: Hardware, num_stages: int) -> float:
    """Return the seconds of a step's arithmetic."""
    trained = [layout.groups[index] for index in layout.groups_of(form.trained)]
    calls_s = sum(position.cost_s for position in profile(form, layout).passes)
    return calls_s + arithmetic_s(trained, hardware, num_stages)


def _update_s(
    layout: ChunkLayout, indices: frozenset[int], resident: frozenset[int], hardware: Hardware, num_stages: int
) -> float:
    """Return the seconds to update these groups: residents first, then groups that move."""
    staying, moving = ([layout.groups[index] for index in part] for part in (indices & resident, indices - resident))
    moving_s = update_seconds(moving, hardware, num_stages, links_of=layout.links_of, latencies=True)
    return arithmetic_s(staying, hardware, num_stages) + moving_s
