"""Plan a training step as other systems would: each policy for chunks with each treatment of what forwards save.

A treatment says which saved values are offloaded or recomputed; a policy, or chunkc's own planner, moves the chunks.
All are timed by the same simulator, with chunkc's choice of the groups that stay in the room that the treatment leaves,
and its tiles for the optimizer's step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from models import unet

from chunkc.explaining.cuda_offline import captured_for
from chunkc.explaining.dry_run import DryRun
from chunkc.explaining.explain import budget_of, on_hardware
from chunkc.explaining.memory_timeline import PlannedRun, StepPlans
from chunkc.explaining.offline import OfflineStep, capture_offline
from chunkc.explaining.predicted_step import PredictedStep
from chunkc.explaining.updates import Updates
from chunkc.ir.errors import BudgetError
from chunkc.ir.hardware import Hardware
from chunkc.ir.items import ActivationPlan
from chunkc.ir.layout import Chunk, ChunkLayout
from chunkc.ir.links import QUEUES
from chunkc.ir.plan import PhasePlan, Position
from chunkc.ir.program import FORWARD, UPDATE
from chunkc.ir.simulate import RESIDENT_UPDATE, simulate, step_time
from chunkc.machines.presets import load_hardware
from chunkc.models import find_model
from chunkc.optim.update_mode import NONE, UpdateMode
from chunkc.options import parse_options
from chunkc.passes.planning.residency import chunk_items
from chunkc.passes.planning.room import Room, fixed_nbytes
from chunkc.passes.planning.update_seconds import traffic_s
from chunkc.passes.planning.updates import update_positions
from chunkc.policy.captured_step import Captured, profile
from chunkc.policy.decide import decide
from chunkc.policy.state import Forms, PhaseCalled
from peers.policies import POLICIES, phase_plan

UNET = "unet"
"""The name of the one model that is not built in."""


@dataclass(frozen=True)
class Case:
    """A model on a machine. `budget`: as in `torch.compile`'s options."""

    model: str
    hardware: str
    batch_size: int
    budget: str = "auto"
    seq_len: int | None = None


@dataclass(frozen=True)
class Treatment:
    """Treatment of the values that a forward saves.

    Attributes:
        name: for people; of no treatment at all nothing.
        checkpointing: each block keeps its input and is recomputed.
        saved_part: PyTorch's `activation_memory_budget`.
        offloads: the largest values go home until the others fit (torchtitan, DeepCompile).
    """

    name: str
    checkpointing: bool = False
    saved_part: float = 1.0
    offloads: bool = False

    def __str__(self) -> str:
        return f" + {self.name}" if self.name else ""


TREATMENTS = (
    Treatment(""),
    Treatment("full checkpointing", checkpointing=True),
    Treatment("activation_memory_budget=0.5", saved_part=0.5),
    Treatment("largest activations offloaded", offloads=True),
    Treatment("full checkpointing, largest activations offloaded", checkpointing=True, offloads=True),
)


@dataclass(frozen=True)
class Planned:
    """A planned case. `step` is None where nothing fits the budget."""

    dry_run: DryRun
    predicted: PredictedStep
    step: StepPlans | None
    hardware: Hardware
    budget_nbytes: int
    updates: Updates

    @property
    def captured(self) -> Captured:
        """The graph without an activation plan."""
        return self.dry_run.captured[0]


@lru_cache(maxsize=8)
def _captured(case: Case, dtype: torch.dtype, treatment: Treatment, has_kernels: bool) -> OfflineStep:
    """A case's model in a dtype, on any hardware.

    Args:
        has_kernels: whether attention has kernels of its own, as PyTorch is told around this call; part of the key.
    """
    assert has_kernels == torch.backends.cuda.flash_sdp_enabled()
    kwargs: dict[str, torch.Tensor] = {}
    with torch.device("meta"):
        if case.model == UNET:
            module = unet.build(dtype, activation_checkpointing=treatment.checkpointing)
            args = unet.example(case.batch_size, dtype)
        else:
            spec = find_model(case.model)
            form = {"seq_len": case.seq_len, "dtype": spec.config.only_dtype or dtype}
            module = spec.build(activation_checkpointing=treatment.checkpointing, **form)
            args, kwargs = spec.example(case.batch_size, **form)
    with torch._functorch.config.patch(activation_memory_budget=treatment.saved_part):
        return capture_offline(module, args, kwargs, codegen="eager", repeatable=True)


@dataclass(frozen=True)
class Replayed:
    """A case as `chunkc explain` predicts it.

    Attributes:
        budget_nbytes: the case's.
        updates: with what `overlap="auto"` is for the case.
    """

    predicted: PredictedStep
    hardware: Hardware
    budget_nbytes: int
    updates: Updates


def replayed(case: Case, overlap: str, activations: str, treatment: Treatment = TREATMENTS[0]) -> Replayed:
    """Trace a case, in bf16, or in fp16 where the device has no arithmetic units for bf16.

    The host's RAM is unlimited, as it is for the other policies and for the bound.
    """
    machine_ = replace(load_hardware(case.hardware), host_memory_nbytes=None)
    options = parse_options({"memory_budget": case.budget, "codegen": "eager", "activations": activations})
    dtype = torch.bfloat16 if machine_.bf16_flops_per_s else torch.float16
    any_machine, any_moves = replace(case, hardware="", budget=""), replace(treatment, name="", offloads=False)

    def capture() -> OfflineStep:
        return _captured(any_machine, dtype, any_moves, torch.backends.cuda.flash_sdp_enabled())

    captured = on_hardware(machine_, captured_for(machine_, capture), options, 3)
    predicted = PredictedStep(captured, options, machine_, Updates(UpdateMode(overlap)))
    return Replayed(predicted, predicted.hardware, budget_of(options, machine_), predicted.training.updates)


def plan(case: Case, overlap: str, activations: str, treatment: Treatment = TREATMENTS[0]) -> Planned:
    """Plan a case."""
    traced = replayed(case, overlap, activations, treatment)
    predicted, budget = traced.predicted, traced.budget_nbytes
    dry_run = predicted.fitting(budget)
    step = predicted.planned(dry_run)
    fits = dry_run.budget_nbytes == budget
    return Planned(dry_run, predicted, step if fits else None, traced.hardware, budget, traced.updates)


def timed(planned: Planned, step: StepPlans, phases: Sequence[PhasePlan]) -> tuple[float, int]:
    """Seconds of a step by the simulator, and the bytes it copies, both ways."""
    costs = {name: cost for run in step.runs for name, cost in run.costs_s().items()}
    nbytes = planned.updates.nbytes(step)
    costs |= {name: traffic_s(nbytes[name], planned.hardware) for name in step.updates}
    events = simulate(
        phases,
        costs,
        planned.hardware,
        resident_update_s=traffic_s(nbytes[RESIDENT_UPDATE], planned.hardware),
        checksums_s=planned.updates.checksums_s(step, planned.hardware),
        host_updates=planned.updates.simulated(step.cpu_updated, step.layout, planned.hardware),
    )
    return step_time(events).total, sum(event.nbytes for event in events if event.stream in QUEUES)


def baselines(case: Case, treatments: Sequence[Treatment] = TREATMENTS) -> Iterator[tuple[str, float]]:
    """Seconds of the step as others would run it; what does not fit is left out."""
    for treatment in treatments:
        planned = plan(case, NONE, "offload" if treatment.offloads else "keep", treatment)
        if planned.step is None:
            continue
        step = _offloading(planned) if treatment.offloads else planned.step
        if step is None:
            continue
        if treatment.name:
            yield f"chunkc's chunks{treatment}", timed(planned, step, step.phases)[0]
        for name, seconds in _by_policies(planned, step):
            yield f"{name}{treatment}", seconds


def _offloading(planned: Planned) -> StepPlans | None:
    """The step with as few of the largest saved values at home as the others leave no room for."""
    now, captured = planned.dry_run.planner_state, planned.captured
    activation_plan = ActivationPlan(offloaded=largest(captured, now.layout, now.budget_nbytes))
    if not activation_plan:
        return None  # then it is no other than without
    every = replace(now, resident=frozenset(group.index for group in now.layout.groups) - now.layout.cut)
    runs = []
    try:
        for run in planned.dry_run.runs:
            context = replace(run.request.context, activation_plan=activation_plan)
            external_nbytes = run.request.in_use_nbytes
            found = decide(every, PhaseCalled(Forms(captured), external_nbytes, context))
            every = found.planner_state
            runs.append(replace(run, request=found.request))
    except BudgetError:
        return None
    runs = [replace(run, request=replace(run.request, planner_state=every)) for run in runs]
    due = tuple(sorted(every.layout.groups_of(every.trained) - every.resident))
    update = replace(planned.dry_run.update, planner_state=every, groups=due)
    return planned.predicted.planned(replace(planned.dry_run, planner_state=every, runs=tuple(runs), update=update))


def largest(captured: Captured, layout: ChunkLayout, budget_nbytes: int) -> frozenset[str]:
    """The fewest of the saved values, largest first, without which every call has room for its own chunks."""
    order = [one.storage for one in sorted(captured.offloadable, key=lambda one: (-one.nbytes, one.storage))]
    free = budget_nbytes - fixed_nbytes(layout, frozenset())

    def fits(count: int) -> bool:
        positions = profile(captured.following(ActivationPlan(offloaded=frozenset(order[:count]))), layout).passes
        return Room.of(layout).needed_nbytes(positions) <= free

    low, high = 0, len(order)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return frozenset(order[:low])


def _by_policies(planned: Planned, step: StepPlans) -> Iterator[tuple[str, float]]:
    """Time a step with chunks moved by each policy."""
    lines = {run.phase: _line(run, step) for run in step.runs}
    if step.update is not None:
        caller_nbytes = step.runs[0].captured.caller_nbytes
        lines[UPDATE] = _without(update_positions(step.layout, step.tiles, caller_nbytes), step.resident)
    fixed, captured = fixed_nbytes(step.layout, step.resident), step.runs[0].captured
    for policy in POLICIES:
        phases = []
        try:
            for phase, line in lines.items():
                capacity = [planned.budget_nbytes - fixed - position.non_model_nbytes for position in line]
                items = chunk_items(step.layout, line, step.resident)
                saved = () if phase == UPDATE else captured.offloaded
                phases.append(phase_plan(policy, phase, line, items, capacity, saved))
        except ValueError:
            continue
        yield policy.name, timed(planned, step, phases)[0]


def _line(run: PlannedRun, step: StepPlans) -> list[Position]:
    """A run's calls as positions, without what stays; named as its plan's moments are."""
    found = profile(run.captured, step.layout)
    positions = found.forward if run.phase == FORWARD else found.backward
    names = [moment.name for moment in run.planned.moments]
    return _without([replace(one, name=name) for one, name in zip(positions, names, strict=True)], step.resident)


def _without(positions: Sequence[Position], resident: frozenset[int]) -> list[Position]:
    def moving(items: frozenset[Chunk]) -> frozenset[Chunk]:
        return frozenset(item for item in items if item.group not in resident)

    return [replace(one, reads=moving(one.reads), writes=moving(one.writes)) for one in positions]
