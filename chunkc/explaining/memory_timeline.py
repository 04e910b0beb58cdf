"""Describe a planned step's moments and its peak: bytes in memory by kind and by the user's module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from chunkc.ir.explanation import ExplainedMoment, Peak, TimedEvent
from chunkc.ir.layout import Chunk, ChunkLayout
from chunkc.ir.plan import Moment, PhasePlan, Plan, Tile, chunks_after
from chunkc.ir.program import BACKWARD, FORWARD, PhaseProgram
from chunkc.passes.memory.profile import call_steps
from chunkc.policy.captured_step import Captured


@dataclass(frozen=True)
class PlannedRun:
    """A planned run of a graph's phase.

    Attributes:
        name: the phase's; where there are several graphs, `forward.1` is the second forward and `backward.1` its
            backward.
        plan: moments are named after the run. A single graph's forward and backward share one.
        graph: rewritten, with chunk nodes.
        present: chunks that have slots when it begins.
        freed: storages that the program counts as held, and that are freed already.
    """

    name: str
    phase: str
    captured: Captured
    plan: Plan
    graph: fx.GraphModule
    present: frozenset[Chunk] = frozenset()
    freed: frozenset[str] = frozenset()

    @property
    def program(self) -> PhaseProgram:
        return self.captured.programs[self.phase]

    @property
    def planned(self) -> PhasePlan:
        return next(phase for phase in self.plan.phases if phase.phase == self.phase)

    @property
    def calls(self) -> tuple[Moment, ...]:
        """The moments of the program's calls."""
        planned = self.planned
        return tuple(moment for at, moment in enumerate(planned.moments) if at not in planned.tiles)

    @property
    def updates(self) -> dict[str, Tile]:
        """Tiles that the run updates, by the name of the moment."""
        planned = self.planned
        return {planned.moments[at].name: tile for at, tile in planned.tiles.items()}

    @property
    def returned_before_nbytes(self) -> int:
        """Bytes of the previous call's outputs, which the caller may hold."""
        return self.captured.output_nbytes if self.phase == FORWARD else 0

    def costs_s(self) -> dict[str, float]:
        """Return the seconds of arithmetic, by the moment's name."""
        return {m.name: call.cost_s for m, call in zip(self.calls, self.program.calls, strict=True)}


@dataclass(frozen=True)
class StepPlans:
    """A planned step: the runs of its graphs, and the optimizer's update in slots, with a moment for each of `tiles`.

    Attributes:
        cpu_updated: groups that the CPU updates at home.
    """

    runs: tuple[PlannedRun, ...]
    layout: ChunkLayout
    resident: frozenset[int]
    update: Plan | None
    cpu_updated: frozenset[int] = frozenset()
    tiles: tuple[Tile, ...] = ()

    @property
    def plans(self) -> tuple[Plan, ...]:
        by_identity = {id(plan): plan for plan in (*(run.plan for run in self.runs), self.update) if plan is not None}
        return tuple(by_identity.values())

    @property
    def phases(self) -> tuple[PhasePlan, ...]:
        return (*(run.planned for run in self.runs), *(self.update.phases if self.update else ()))

    @property
    def updates(self) -> dict[str, Tile]:
        """Tiles that are updated in slots, and by a backward in place, by the name of the moment."""
        moments = self.update.moments if self.update else ()
        in_step = {moment.name: tile for moment, tile in zip(moments, self.tiles, strict=True)}
        return {name: tile for run in self.runs for name, tile in run.updates.items()} | in_step

    @property
    def trained(self) -> frozenset[str]:
        """Parameters that get a gradient."""
        return frozenset(name for run in self.runs for name in run.captured.trained)

    @property
    def gradients_at_home(self) -> frozenset[int]:
        """Groups with gradients that are written home: the trained ones that no update in a backward consumes."""
        return frozenset(
            index
            for run in self.runs
            if run.phase == BACKWARD
            for index in self.layout.groups_of(run.captured.trained) - run.planned.consumes
        )

    @property
    def updated_in_backward(self) -> frozenset[int]:
        """Groups that a backward updates."""
        return frozenset(group for run in self.runs for group in run.planned.updated)


def explained_moments(
    step: StepPlans, events: Sequence[TimedEvent], expressions: Sequence[str] = ()
) -> Iterator[ExplainedMoment]:
    """Yield a moment for each operation of forward and backward, and for each tile of the update.

    `expressions`: the non-model bytes of each operation, for a step with dynamic shapes.
    """
    in_symbols = iter(expressions)
    spans = {event.name: event for event in events if event.kind in ("call", "update")}

    def of_update(moment: Moment) -> ExplainedMoment:
        return ExplainedMoment(
            call=moment.name,
            phase=moment.phase,
            op=moment.op,
            module=moment.module,
            source="",
            start_s=spans[moment.name].start_s,
            contents=_contents(moment, moment.non_model_nbytes, 0),
        )

    for run in step.runs:
        freed_nbytes = sum(run.program.storages[storage] for storage in run.freed)
        extra = run.returned_before_nbytes - freed_nbytes
        operations = call_steps(run.program, run.captured.memories)
        for at_call, moment in enumerate(run.planned.moments):
            if at_call in run.planned.tiles:
                yield of_update(moment)
                continue
            steps, span = next(operations), spans[moment.name]
            for index, at in enumerate(steps):
                share = (span.end_s - span.start_s) * index / len(steps)
                yield ExplainedMoment(
                    call=moment.name,
                    phase=run.phase,
                    op=at.op,
                    module=at.module,
                    source=at.source,
                    start_s=span.start_s + share,
                    contents=_contents(moment, at.external_nbytes + extra, at.inside_nbytes),
                    expression=next(in_symbols, None),
                )
    for moment in step.update.moments if step.update else ():
        yield of_update(moment)


def _contents(moment: Moment, activations: int, temporaries: int) -> dict[str, int]:
    return {
        "parameters": moment.parameter_nbytes,
        "gradients": moment.gradient_nbytes,
        "optimizer states": moment.state_nbytes,
        "slots": moment.slot_nbytes,
        "activations": activations,
        "temporaries": temporaries,
        "others": moment.other_nbytes,
    }


def peak_of(step: StepPlans) -> Peak:
    """Return the fullest moment of the step and its bytes, by kind and module."""
    moments = [moment for phase in step.phases for moment in phase.moments]
    if not moments:
        return Peak("", "", "", {})
    peak = max(moments, key=lambda moment: moment.nbytes)
    contents: dict[str, int] = {}

    def add(kind: str, module: str, nbytes: int) -> None:
        if nbytes:
            label = f"{kind}: {module}" if module else kind
            contents[label] = contents.get(label, 0) + nbytes

    for spec in (
        *step.layout.small,
        *(s.spec for g in sorted(step.resident) for s in step.layout.groups[g].slices),
    ):
        add("parameters", spec.name.rpartition(".")[0], spec.nbytes)
    add("gradients", "", peak.gradient_nbytes)
    add("optimizer states", "", peak.state_nbytes)
    add("others", "", peak.other_nbytes)
    in_slots_nbytes = 0
    for chunk in _slots_at(step, peak):
        group = step.layout.groups[chunk.group]
        add("slots", group.slices[0].spec.name.rpartition(".")[0], step.layout.chunk_nbytes_of(chunk))
        in_slots_nbytes += step.layout.chunk_nbytes_of(chunk)
    add("activations", "on their way", peak.slot_nbytes - in_slots_nbytes)
    run = next((run for run in step.runs if peak in run.planned.moments), None)
    if run is None or peak.name in run.updates:
        add("activations", "", peak.non_model_nbytes)
        return Peak(peak.name, peak.op, peak.module, _largest_first(contents))
    index, program = run.calls.index(peak), run.program
    steps = next(found for i, found in enumerate(call_steps(program, run.captured.memories)) if i == index)
    fullest = max(steps, key=lambda at: at.nbytes)
    makers = run.captured.makers
    for storage in sorted(fullest.around - run.freed):
        add("activations", makers.get(storage, "inputs"), program.storages[storage])
    add("activations", "outputs of the step before", run.returned_before_nbytes)
    add("temporaries", fullest.module, fullest.inside_nbytes)
    return Peak(peak.name, peak.op, peak.module, _largest_first(contents), fullest.source)


def _largest_first(contents: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(contents.items(), key=lambda item: -item[1]))


def offloaded_by_module(step: StepPlans) -> dict[str, int]:
    """Return the bytes of offloaded saved values, by the module that made them."""
    return _by_module(step, lambda own: {saved.storage: saved.nbytes for saved in own.offloaded})


def recomputed_by_module(step: StepPlans) -> dict[str, int]:
    """Return the bytes of saved values that the backward recomputes, by the module that made them."""
    return _by_module(step, lambda own: {name: own.forward.storages[name] for name in own.forward.remade})


def _by_module(step: StepPlans, nbytes_of: Callable[[Captured], Mapping[str, int]]) -> dict[str, int]:
    by_module: dict[str, int] = {}
    for captured in (run.captured for run in step.runs if run.phase == FORWARD):
        for storage, nbytes in nbytes_of(captured).items():
            module = captured.makers.get(storage, "the model")
            by_module[module] = by_module.get(module, 0) + nbytes
    return by_module


def _slots_at(step: StepPlans, peak: Moment) -> list[Chunk]:
    """Return the chunks that have a slot at a moment."""
    starts = [*(run.present for run in step.runs), *([frozenset()] if step.update else [])]
    for phase, start in zip(step.phases, starts, strict=True):
        for at, moment in enumerate(phase.moments):
            if moment is peak:
                return sorted(chunks_after(phase.stops[: at + 1], start))
    return []
