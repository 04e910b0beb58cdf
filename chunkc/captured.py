"""What compilation made of a graph, and pure functions from it to residents, a plan, a rewritten graph and a verdict.

The backend and `chunkc explain` both come this way: what is explained is what runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from torch import fx, nn

from chunkc.ir.chunks import ChunkLayout
from chunkc.ir.errors import BudgetError, VerificationError
from chunkc.ir.estimates import EstimatedOperator, unknown_operators
from chunkc.ir.hardware import Hardware
from chunkc.ir.plan import Plan, Position
from chunkc.ir.program import BACKWARD, FORWARD, PhaseProgram, SegmentMemory
from chunkc.ir.verify import verify_phase
from chunkc.passes.codegen import CompiledSegment
from chunkc.passes.insert import insert_events
from chunkc.passes.planning import (
    StepProfile,
    check_minimum,
    choose_resident,
    plan_phases,
    staying_beside,
)
from chunkc.passes.profile import positions
from chunkc.passes.update_planning import smallest_tiles, update_positions

ROOM_FOR_LOSS = 3
"""While user code runs between the phases, it may need this many times the outputs' bytes, for a loss."""

LARGEST_NUMBER_NBYTES = 512
"""Of one number: no allocator gives more for it."""

HELD_GRANULES = 256
"""Plans are made for what others hold rounded up to this part of the budget, where that fits."""

Made = TypeVar("Made")


@dataclass(frozen=True)
class Captured:
    """What compilation made of a graph, before any plan."""

    forward: PhaseProgram
    backward: PhaseProgram | None
    segments: Mapping[str, CompiledSegment]
    modules: Mapping[str, nn.Module]
    whole: bool

    @property
    def unknown_operators(self) -> tuple[EstimatedOperator, ...]:
        """Every call of an operator whose inner memory is a guess."""
        return unknown_operators(self.programs.values(), self.memories)

    def returning(self, parameters: frozenset[str]) -> Captured:
        """The same graph, with these parameters' gradients returned to autograd instead of sunk."""
        if not parameters or self.backward is None:
            return self
        return replace(self, backward=self.backward.returning(parameters))

    def with_sizes(self, nbytes: Callable[[int], int], cost_s: Callable[[float], float]) -> Captured:
        """The same graph with `nbytes` of every number of bytes and `cost_s` of every call's seconds."""
        segments = {
            name: CompiledSegment(segment.run, segment.memory.with_sizes(nbytes))
            for name, segment in self.segments.items()
        }
        backward = None if self.backward is None else self.backward.with_sizes(nbytes, cost_s)
        return Captured(self.forward.with_sizes(nbytes, cost_s), backward, segments, self.modules, self.whole)

    def holding(self, tangents: frozenset[str]) -> Captured:
        """The same graph, while the caller keeps these of the backward's tangents."""
        if not tangents or self.backward is None:
            return self
        return replace(self, backward=self.backward.holding(tangents))

    @property
    def tangents(self) -> tuple[str, ...]:
        """The backward's inputs that are gradients of the forward's outputs; the others were saved for it."""
        num_saved = len(self.forward.outputs) - self.forward.num_user_outputs
        return tuple(self.backward.inputs)[num_saved:] if self.backward is not None else ()

    @cached_property
    def memories(self) -> Mapping[str, SegmentMemory]:
        return {name: segment.memory for name, segment in self.segments.items()}

    @property
    def programs(self) -> Mapping[str, PhaseProgram]:
        """The phases there are, by name."""
        return {p.phase: p for p in (self.forward, self.backward) if p is not None}

    @cached_property
    def trained(self) -> frozenset[str]:
        """Parameters whose gradients the backward makes."""
        return frozenset(name for _, _, name in self.backward.gradient_outputs) if self.backward else frozenset()

    @cached_property
    def _output_sizes(self) -> tuple[int, ...]:
        storage_of = self.forward.value_storages()
        storages = {storage_of[value] for value in self.forward.results} - self.forward.held
        return tuple(self.forward.storages[storage] for storage in storages)

    @property
    def output_nbytes(self) -> int:
        """Bytes the caller gets from the forward, inputs that are returned left out."""
        return sum(self._output_sizes)

    @property
    def loss_nbytes(self) -> int:
        """Those of them that are numbers: a loss is there while its backward runs, all else may be gone by then."""
        return sum(nbytes for nbytes in self._output_sizes if nbytes <= LARGEST_NUMBER_NBYTES)

    @property
    def caller_nbytes(self) -> int:
        """Bytes of a forward that its caller still holds when the optimizer steps: inputs and outputs."""
        return self.forward.held_nbytes + self.output_nbytes

    def held_beside_forward(self, live_nbytes: int, given_nbytes: int) -> int:
        """What others hold beside a forward.

        Args:
            live_nbytes: values of earlier calls that are alive, without the storages of this call's inputs. The outputs
                of the call before are the forward's already.
            given_nbytes: of the inputs' storages. An input may be a view of a larger tensor than the one it was traced
                with: all of that is held.
        """
        return max(0, live_nbytes - self.output_nbytes) + max(0, given_nbytes - self.forward.held_nbytes)

    @property
    def saved_nbytes(self) -> int:
        """Bytes saved for the backward alone."""
        return self.between_nbytes - self.caller_nbytes

    @cached_property
    def between_nbytes(self) -> int:
        """Bytes alive between the phases: inputs, outputs and what is saved for the backward."""
        storage_of = self.forward.value_storages()
        kept = self.forward.outputs[self.forward.num_new_buffers :]
        storages = {storage_of[value] for value in kept if value is not None} | self.forward.held
        return sum(self.forward.storages[storage] for storage in storages)


def planned_with_room(planned: Callable[[int], Made], held_nbytes: int, budget_nbytes: int) -> tuple[Made, int]:
    """What is planned beside others' values, with room for a little more of them where there is such a plan: who keeps
    a little more at every step, such as losses, does not wait for a new plan each time.

    Args:
        planned: a plan, or what is made of one, beside so many bytes.

    Returns:
        What is planned, and the bytes it has room for beyond `held_nbytes`.

    Raises:
        BudgetError: nothing fits beside `held_nbytes`.
    """
    granule = max(1, budget_nbytes // HELD_GRANULES)
    wider_nbytes = -(-held_nbytes // granule) * granule
    if wider_nbytes != held_nbytes:
        with suppress(BudgetError):
            return planned(wider_nbytes), wider_nbytes - held_nbytes
    return planned(held_nbytes), 0


def profile(captured: Captured, layout: ChunkLayout) -> StepProfile:
    """Positions of every phase. In the forward, the previous call's outputs are still the caller's."""
    group_of = layout.group_of()
    memories = captured.memories
    forward: tuple[Position, ...] = tuple(
        replace(position, non_model_nbytes=position.non_model_nbytes + captured.output_nbytes)
        for position in positions(captured.forward, memories, group_of=group_of)
    )
    if captured.backward is None:
        return StepProfile(forward, (), (), 0)
    backward = positions(captured.backward, memories, group_of=group_of)
    trained = sorted(layout.groups_of(p for c in captured.backward.calls for _, p in c.gradients))
    update = update_positions(layout, smallest_tiles(layout, trained), captured.caller_nbytes)
    boundary_nbytes = captured.between_nbytes + ROOM_FOR_LOSS * captured.output_nbytes
    return StepProfile(forward, backward, update, boundary_nbytes)


def residents_with(
    captured: Captured, layout: ChunkLayout, budget_nbytes: int, resident: frozenset[int], num_known: int
) -> tuple[frozenset[int], int]:
    """The groups that stay once a graph is compiled, and the smallest budget for the graph by itself.

    Args:
        resident: of the layout's first `num_known` groups, those that stay so far; later ones are new, and any may.

    Raises:
        BudgetError: there is no plan within the budget.
    """
    needs = profile(captured, layout).all
    allowed = resident | frozenset(range(num_known, len(layout.groups)))
    all_may_stay = len(allowed) == len(layout.groups)
    minimum = check_minimum(needs, layout, budget_nbytes, 0, all_may_stay=all_may_stay)
    return choose_resident(needs, layout, budget_nbytes, allowed), minimum


def fitting_form(
    forms: Iterable[Captured],
    needs: Callable[[Captured], Sequence[Position]],
    layout: ChunkLayout,
    budget_nbytes: int,
    held_nbytes: int,
    resident: frozenset[int],
) -> tuple[Captured, frozenset[int]]:
    """The first of a graph's forms that fits beside `held_nbytes`, and those residents that may stay then.

    Args:
        needs: the positions of a form.

    Raises:
        BudgetError: none fits even where no group stays; of the form that needs the least.
    """
    refused: list[BudgetError] = []
    for captured in forms:
        try:
            return captured, staying_beside(needs(captured), layout, budget_nbytes, held_nbytes, resident)[0]
        except BudgetError as error:
            refused.append(error)
    try:
        raise min(refused, key=lambda error: error.minimum_nbytes)
    finally:
        refused.clear()  # an error keeps this frame, and would keep itself


def plan_step(
    captured: Captured,
    layout: ChunkLayout,
    *,
    budget_nbytes: int,
    resident: frozenset[int],
    hardware: Hardware,
    held_nbytes: int = 0,
    cold_backward: bool = False,
) -> Plan:
    """The plan of forward and backward; with `cold_backward` of the backward alone, which finds no chunk in a slot.

    Raises:
        BudgetError: there is none within the budget.
    """
    step = profile(captured, layout)
    phases = [] if cold_backward else [(FORWARD, step.forward)]
    if captured.backward is not None:  # which may have nothing to compute, as that of an addition alone
        phases.append((BACKWARD, step.backward))
    return plan_phases(
        phases,
        layout,
        budget_nbytes=budget_nbytes,
        resident=resident,
        hardware=hardware,
        held_nbytes=held_nbytes,
        boundary_nbytes=step.boundary_nbytes,
    )


def rewrite(
    captured: Captured, plan: Plan, layout: ChunkLayout, *, settling: bool = False
) -> dict[str, fx.GraphModule]:
    """Phase -> its graph with the plan's chunk nodes; with `settling`, the backward says when groups are settled."""
    return {
        phase.phase: insert_events(
            captured.programs[phase.phase],
            phase,
            captured.modules,
            group_of=layout.group_of(),
            resident=plan.resident,
            layout=layout if settling and phase.phase == BACKWARD else None,
        )
        for phase in plan.phases
    }


def verify(
    captured: Captured, plan: Plan, graphs: Mapping[str, fx.GraphModule], layout: ChunkLayout, *, held_nbytes: int = 0
) -> None:
    """Check the rewritten graphs, independently of how they came about.

    Raises:
        VerificationError: a bug in the planner; nothing has run.
    """
    present: frozenset[str] = frozenset()
    for phase in plan.phases:
        program = captured.programs[phase.phase]
        elsewhere = program.held - set(program.inputs.values())  # held by the caller, not passed in
        extra = sum(program.storages[storage] for storage in elsewhere)
        extra += captured.output_nbytes if phase.phase == FORWARD else 0
        kept = plan.kept if phase is not plan.phases[-1] else frozenset[str]()
        violations = verify_phase(
            graphs[phase.phase].graph,
            layout=layout,
            memories=captured.memories,
            resident=plan.resident,
            held_nbytes=held_nbytes + extra,
            budget_nbytes=plan.budget_nbytes,
            present=present,
            kept=kept,
            gradients={name for call in program.calls for _, name in call.gradients},
        )
        if violations:
            raise VerificationError(violations)
        present = kept
