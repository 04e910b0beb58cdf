"""Make a requested plan, insert its events into the graphs, and verify them.

Training and `chunkc explain` both do it here, so that the explained plan is the one that runs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import fx

from chunkc.ir.errors import VerificationError
from chunkc.ir.hardware import Hardware
from chunkc.ir.layout import Chunk, ChunkLayout
from chunkc.ir.plan import Plan, Position, Tile
from chunkc.ir.program import BACKWARD, FORWARD
from chunkc.ir.verify.recompute import RecomputeSpec, verify_recompute
from chunkc.ir.verify.verifier import verify_phase
from chunkc.passes.planning.timeline import plan_phases
from chunkc.passes.planning.updates import plan_update
from chunkc.passes.planning.updates_in_backward import with_updates
from chunkc.passes.rewrite.insert import insert_events, insert_update_events
from chunkc.policy.captured_step import Captured, profile
from chunkc.policy.state import StepRequest, UpdateRequest
from chunkc.utils.garbage import no_automatic_collection


@dataclass(frozen=True)
class StepPlan:
    """The plan of a step, and its phases' graphs with the plan's chunk nodes."""

    plan: Plan
    graphs: Mapping[str, fx.GraphModule]


@dataclass(frozen=True)
class UpdatePlan:
    """The plan of an optimizer's step with a moment for each of its tiles, and the graph that it makes."""

    request: UpdateRequest
    plan: Plan
    tiles: tuple[Tile, ...]
    graph: fx.Graph


@no_automatic_collection()
def step_plan(captured: Captured, request: StepRequest, hardware: Hardware, *, verified: bool = True) -> StepPlan:
    """Make the plan of a captured graph.

    Raises:
        VerificationError: a bug in the planner; nothing has run.
    """
    source, captured, layout = captured, request.context.applied_to(captured), request.planner_state.layout
    step = profile(captured, layout)
    phases = [] if request.context.cold_backward else [(FORWARD, step.forward)]
    if captured.backward is not None:  # also where it computes nothing, as that of an addition
        phases.append((BACKWARD, backward_positions(captured, request, hardware)))
    plan = plan_phases(
        phases, request.room, hardware=hardware, boundary_nbytes=step.boundary_nbytes, saved=captured.offloaded
    )
    graphs = rewrite(captured, plan, layout, marks_complete=request.context.marks_complete)
    if verified:
        undoable = request.context.undoable
        verify(
            captured, plan, graphs, layout, external_nbytes=request.external_nbytes, source=source, undoable=undoable
        )
    return StepPlan(plan, graphs)


def backward_positions(captured: Captured, request: StepRequest, hardware: Hardware) -> tuple[Position, ...]:
    """Return the positions of the backward, with its updates in slots between the calls."""
    backward, context = profile(captured, request.planner_state.layout).backward, request.context
    return with_updates(backward, request.room, dict(context.updates), undoable=context.undoable, hardware=hardware)


def rewrite(
    captured: Captured, plan: Plan, layout: ChunkLayout, *, marks_complete: bool = False
) -> dict[str, fx.GraphModule]:
    """Insert the plan's chunk nodes into each phase's graph; `marks_complete`: see `PhaseContext`."""
    return {
        phase.phase: insert_events(
            captured.programs[phase.phase],
            phase,
            captured.modules,
            group_of=layout.group_of(),
            resident=plan.resident,
            layout=layout if marks_complete and phase.phase == BACKWARD else None,
        )
        for phase in plan.phases
    }


def verify(
    captured: Captured,
    plan: Plan,
    graphs: Mapping[str, fx.GraphModule],
    layout: ChunkLayout,
    *,
    source: Captured,
    external_nbytes: int = 0,
    undoable: Collection[int] = (),
) -> None:
    """Check the rewritten graphs, independently of how they were made.

    Args:
        source: the graph that keeps all saved values.
        undoable: groups with updates that leave their gradients to be written home.

    Raises:
        VerificationError: a bug in the planner; nothing has run.
    """
    present: frozenset[Chunk] = frozenset()
    dropped = RecomputeSpec(captured.forward.remade, captured.extra, captured.forward.copied.keys())
    if violations := verify_recompute(graphs, source.programs, source.modules, dropped):
        raise VerificationError(violations)
    for phase in plan.phases:
        program = captured.programs[phase.phase]
        elsewhere = program.held - set(program.inputs.values())  # held by the caller, not passed in
        extra = sum(program.storages[storage] for storage in elsewhere)
        extra += captured.output_nbytes if phase.phase == FORWARD else 0
        kept = plan.kept if phase is not plan.phases[-1] else frozenset[Chunk]()
        violations = verify_phase(
            graphs[phase.phase].graph,
            layout=layout,
            memories=captured.memories,
            resident=plan.resident,
            external_nbytes=external_nbytes + extra,
            budget_nbytes=plan.budget_nbytes,
            present=present,
            kept=kept,
            gradients={name for call in program.calls for _, name in call.gradients},
            offloaded=program.copied.keys(),
            updates=phase.updated,
            undoable=undoable,
        )
        if violations:
            raise VerificationError(violations)
        present = kept


@no_automatic_collection()
def update_plan(request: UpdateRequest, hardware: Hardware, *, verified: bool = True) -> UpdatePlan:
    """Make the plan of an optimizer's step.

    Raises:
        VerificationError: a bug in the planner; nothing has run.
    """
    planner_state = request.planner_state
    plan, tiles = plan_update(request.room, request.groups, hardware=hardware, num_stages=request.num_stages)
    graph = insert_update_events(plan.phases[0], tiles)
    if verified:
        violations = verify_phase(
            graph,
            layout=planner_state.layout,
            memories={},
            resident=planner_state.resident,
            external_nbytes=request.external_nbytes,
            budget_nbytes=planner_state.budget_nbytes,
            updates=request.groups,
        )
        if violations:
            raise VerificationError(violations)
    return UpdatePlan(request, plan, tiles, graph)
