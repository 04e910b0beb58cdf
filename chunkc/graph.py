"""A compiled graph: the programs of its phases, its segments, and the plans made for it so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from chunkc.ir.chunks import ChunkLayout
from chunkc.ir.errors import UnsupportedError, VerificationError
from chunkc.ir.plan import Plan, Position
from chunkc.ir.program import BACKWARD, FORWARD, PhaseProgram
from chunkc.ir.verify import verify_phase
from chunkc.passes.codegen import CompiledSegment
from chunkc.passes.insert import insert_events
from chunkc.passes.planning import StepProfile, fixed_nbytes, plan_phases, update_positions, update_tiles
from chunkc.passes.profile import positions
from chunkc.runtime.executor import Executable, Measurement, Run, lower
from chunkc.session import Session

ROOM_FOR_LOSS = 3
"""While user code runs between the phases, it may need this many times the outputs' bytes, for a loss."""


@dataclass(frozen=True)
class PlannedPhase:
    """A phase under one plan: the rewritten graph, and its instructions."""

    graph: fx.GraphModule
    executable: Executable


@dataclass(frozen=True)
class PlannedStep:
    plan: Plan
    phases: Mapping[str, PlannedPhase]


@dataclass(frozen=True)
class Captured:
    """What compilation made of a graph, before any plan."""

    forward: PhaseProgram
    backward: PhaseProgram | None
    segments: Mapping[str, CompiledSegment]
    modules: Mapping[str, nn.Module]
    whole: bool

    def returning(self, parameters: frozenset[str]) -> Captured:
        """The same graph, with these parameters' gradients returned to autograd instead of sunk."""
        if not parameters or self.backward is None:
            return self
        return replace(self, backward=self.backward.returning(parameters))

    @cached_property
    def output_nbytes(self) -> int:
        """Bytes the caller gets from the forward, inputs that are returned left out."""
        storage_of = self.forward.value_storages()
        values = self.forward.outputs[: self.forward.num_user_outputs]
        storages = {storage_of[v] for v in values if v is not None} - self.forward.held
        return sum(self.forward.storages[storage] for storage in storages)

    @cached_property
    def between_nbytes(self) -> int:
        """Bytes alive between the phases: inputs, outputs and what is saved for the backward."""
        storage_of = self.forward.value_storages()
        storages = {storage_of[v] for v in self.forward.outputs if v is not None} | self.forward.held
        return sum(self.forward.storages[storage] for storage in storages)


def profile(captured: Captured, layout: ChunkLayout) -> StepProfile:
    """Positions of every phase. In the forward, the previous call's outputs are still the caller's."""
    group_of = layout.group_of()
    memories = {name: segment.memory for name, segment in captured.segments.items()}
    forward = tuple(
        _with_more(position, captured.output_nbytes)
        for position in positions(captured.forward, memories, group_of=group_of)
    )
    if captured.backward is None:
        return StepProfile(forward, (), (), 0)
    backward = positions(captured.backward, memories, group_of=group_of)
    held_nbytes = captured.forward.held_nbytes + captured.output_nbytes
    trained = sorted({group_of[p] for c in captured.backward.calls for _, p in c.gradients if p in group_of})
    update = update_positions(layout, update_tiles(layout, trained, 0), held_nbytes)
    boundary_nbytes = captured.between_nbytes + ROOM_FOR_LOSS * captured.output_nbytes
    return StepProfile(forward, backward, update, boundary_nbytes)


def _with_more(position: Position, nbytes: int) -> Position:
    return Position(
        position.name,
        position.phase,
        position.non_model_nbytes + nbytes,
        position.op,
        position.module,
        position.reads,
        position.writes,
        position.cost_s,
    )


@dataclass(frozen=True)
class _Positions:
    """Where in a forward's inputs and outputs the values are that take memory of their own, parameters left out.

    `saved` are those that only the backward gets, the largest first.
    """

    inputs: tuple[int, ...]
    user_outputs: tuple[int, ...]
    saved: tuple[int, ...]

    @staticmethod
    def of(program: PhaseProgram) -> _Positions:
        storage_of = program.value_storages()
        seen = {program.inputs[name] for name in program.inputs}
        user_outputs: list[int] = []
        saved: list[int] = []
        for position, name in enumerate(program.outputs):
            if name is not None and storage_of[name] not in seen:
                seen.add(storage_of[name])
                (user_outputs if position < program.num_user_outputs else saved).append(position)
        saved.sort(key=lambda position: -program.storages[storage_of[program.outputs[position]]])  # type: ignore[index]
        inputs = tuple(i for i, name in enumerate(program.inputs) if name not in program.parameters)
        return _Positions(inputs, tuple(user_outputs), tuple(saved))


@dataclass
class CompiledGraph:
    """Runs a captured graph under its session's budget, planning anew when what is around it changes."""

    session: Session
    captured: Captured
    _plans: dict[tuple, PlannedStep] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._positions = _Positions.of(self.captured.forward)

    # --- planning ---

    def plan(
        self, held_nbytes: int, *, cold_backward: bool = False, hooked: frozenset[str] = frozenset()
    ) -> PlannedStep:
        """The verified plan beside `held_nbytes` of others' values, returning the gradients of `hooked` parameters.

        Raises:
            BudgetError: there is none within the budget.
            VerificationError: a bug in the planner; nothing has run.
        """
        session = self.session
        layout, resident = session.store.layout, session.store.resident
        key = (
            *(session.budget_nbytes, held_nbytes, cold_backward, hooked),
            *(resident, len(layout.groups), len(layout.small)),
        )
        if key not in self._plans:
            captured = self.captured.returning(hooked)
            step = profile(captured, layout)
            phases = [(FORWARD, step.forward), (BACKWARD, step.backward)]
            plan = plan_phases(
                [(name, calls) for name, calls in phases if calls and not (cold_backward and name == FORWARD)],
                layout,
                budget_nbytes=session.budget_nbytes,
                resident=resident,
                hardware=session.hardware,
                held_nbytes=held_nbytes,
                boundary_nbytes=step.boundary_nbytes,
            )
            self._plans[key] = self._build(captured, plan, layout, held_nbytes)
        return self._plans[key]

    def _build(self, captured: Captured, plan: Plan, layout: ChunkLayout, held_nbytes: int) -> PlannedStep:
        programs = {FORWARD: captured.forward, BACKWARD: captured.backward}
        memories = {name: segment.memory for name, segment in self.captured.segments.items()}
        runs = {name: segment.run for name, segment in self.captured.segments.items()}
        phases: dict[str, PlannedPhase] = {}
        present: frozenset[str] = frozenset()
        for phase in plan.phases:
            program = programs[phase.phase]
            assert program is not None
            graph = insert_events(
                program, phase, self.captured.modules, group_of=layout.group_of(), resident=plan.resident
            )
            kept = plan.kept if phase is not plan.phases[-1] else frozenset[str]()
            if self.session.options.verify:
                elsewhere = program.held - set(program.inputs.values())  # held by the caller, not passed in
                extra = sum(program.storages[storage] for storage in elsewhere)
                extra += captured.output_nbytes if phase.phase == FORWARD else 0
                violations = verify_phase(
                    graph.graph,
                    layout=layout,
                    memories=memories,
                    fixed_nbytes=fixed_nbytes(layout, plan.resident) + held_nbytes + extra,
                    budget_nbytes=plan.budget_nbytes,
                    present=present,
                    kept=kept,
                    gradients={name for call in program.calls for _, name in call.gradients},
                )
                if violations:
                    raise VerificationError(violations)
            present = kept
            phases[phase.phase] = PlannedPhase(graph, lower(graph.graph, runs))
        return PlannedStep(plan, phases)

    # --- running ---

    def forward(self, arguments: list[Any]) -> list[Any]:
        """The forward as AOTAutograd calls it: `arguments` is emptied."""
        session, captured, program = self.session, self.captured, self.captured.forward
        session.store.release_slots()
        live = session.live.nbytes(leaving_out=arguments)
        planned = self.plan(max(0, live - captured.output_nbytes), hooked=self._hooked())
        inputs = [arguments[position] for position in self._positions.inputs]
        outputs = self._run(FORWARD, planned, arguments)
        session.live.watch(inputs)
        session.live.watch(outputs[position] for position in self._positions.user_outputs)
        if self._positions.saved:  # saved values live and die together: one stands for all
            nbytes = captured.between_nbytes - captured.output_nbytes - program.held_nbytes
            session.live.watch([outputs[self._positions.saved[0]]], nbytes)
        session.update_held_nbytes = program.held_nbytes + captured.output_nbytes
        if self.captured.backward is None:
            session.store.release_slots()
        return outputs

    def backward(self, arguments: list[Any]) -> list[Any]:
        """The backward as AOTAutograd calls it: sunk gradients are in `.grad` when it returns, None stands for them."""
        session, store = self.session, self.session.store
        assert self.captured.backward is not None
        self._refuse_partial_backward()
        held, hooked = max(0, session.live.nbytes() - self.captured.between_nbytes), self._hooked()
        planned = self.plan(held, hooked=hooked)
        if store.present != planned.plan.kept or len(planned.plan.phases) < 2:
            store.release_slots()
            planned = self.plan(held, cold_backward=True, hooked=hooked)
        outputs = self._run(BACKWARD, planned, arguments)
        if hooked:  # autograd will keep these as `.grad`, on the compute tier, until the next backward takes them home
            session.live.watch(outputs[position] for position, _, name in self._sunk() if name in hooked)
        return outputs

    def _refuse_partial_backward(self) -> None:
        """Gradients are sunk as they are made, so autograd cannot hand out some of them.

        Raises:
            UnsupportedError: `torch.autograd.grad`, or `backward(inputs=...)`, asks for something else than all.
        """
        running = torch._C._current_autograd_node()
        for node, _ in running.next_functions if running is not None else ():
            variable = getattr(node, "variable", None)
            if node is not None and variable is not None and not _is_accumulated(node):
                names = [name for _, _, name in self._sunk() if self.session.store.parameter(name) is variable]
                raise UnsupportedError(
                    f"this backward leaves out the gradient of {', '.join(names) or 'an input'}: torch.autograd.grad "
                    "and backward(inputs=...) do not work through a model compiled by chunkc; call backward() and "
                    "read .grad"
                )

    def _sunk(self) -> tuple[tuple[int, str, str], ...]:
        return self.captured.backward.gradient_outputs if self.captured.backward is not None else ()

    def _hooked(self) -> frozenset[str]:
        """Parameters whose gradients autograd must see, because a hook wants them."""
        store = self.session.store
        return frozenset(name for _, _, name in self._sunk() if store.parameter(name)._backward_hooks)

    def _run(self, phase: str, planned: PlannedStep, arguments: list[Any]) -> list[Any]:
        session = self.session
        measurement = Measurement()
        session.store.tier.lap_peak_nbytes()
        outputs = planned.phases[phase].executable(arguments, Run(session.store, measurement))
        session.record(phase, self, planned.plan, measurement)
        return outputs


def _is_accumulated(node: torch.autograd.graph.Node) -> bool:
    """Whether the backward that runs now will add to the leaf's `.grad`."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # "a leaf node was passed ... but we are currently running autograd.grad()"
        return False


def boxed(function: Callable[[list[Any]], list[Any]]) -> Callable[[list[Any]], list[Any]]:
    """Mark a callable as taking one list that it may empty (AOTAutograd's boxed convention)."""

    def call(arguments: list[Any]) -> list[Any]:
        return function(arguments)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
