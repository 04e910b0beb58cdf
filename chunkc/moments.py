"""A planned step's moments and its peak, for people: what is in memory, by kind and by the user's module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from chunkc.captured import Captured
from chunkc.ir.chunks import ChunkLayout, split_chunk_name
from chunkc.ir.explanation import ExplainedMoment, Peak, TimedEvent
from chunkc.ir.plan import EVICT, PREFETCH, Moment, PhasePlan, Plan, Tile
from chunkc.passes.profile import call_steps


@dataclass(frozen=True)
class StepPlans:
    """A planned step: forward and backward, and the optimizer's update in slots, with a moment for each of `tiles`; the
    CPU updates `at_home`."""

    captured: Captured
    layout: ChunkLayout
    plan: Plan
    graphs: Mapping[str, fx.GraphModule]
    update: Plan | None
    minimum_nbytes: int
    fits: bool
    at_home: frozenset[int] = frozenset()
    tiles: tuple[Tile, ...] = ()

    @property
    def plans(self) -> tuple[Plan, ...]:
        return (self.plan,) if self.update is None else (self.plan, self.update)

    @property
    def phases(self) -> tuple[PhasePlan, ...]:
        return tuple(phase for plan in self.plans for phase in plan.phases)


def explained_moments(
    step: StepPlans, events: Sequence[TimedEvent], expressions: Sequence[str] = ()
) -> Iterator[ExplainedMoment]:
    """Every operation of forward and backward, and every tile of the update.

    `expressions`: the non-model bytes of each of the former, for a step of dynamic shapes.
    """
    in_symbols = iter(expressions)
    spans = {event.name: event for event in events if event.kind in ("call", "update")}
    by_name = {moment.name: moment for moment in step.plan.moments}
    for program in step.captured.programs.values():
        extra = step.captured.output_nbytes if program is step.captured.forward else 0
        for call, steps in zip(program.calls, call_steps(program, step.captured.memories)):
            span, moment = spans[call.name], by_name[call.name]
            for index, at in enumerate(steps):
                share = (span.end_s - span.start_s) * index / len(steps)
                yield ExplainedMoment(
                    call=call.name,
                    phase=program.phase,
                    op=at.op,
                    module=at.module,
                    source=at.source,
                    start_s=span.start_s + share,
                    contents=_contents(moment, at.around_nbytes + extra, at.inside_nbytes),
                    expression=next(in_symbols, None),
                )
    for moment in step.update.moments if step.update else ():
        yield ExplainedMoment(
            call=moment.name,
            phase=moment.phase,
            op=moment.op,
            module=moment.module,
            source="",
            start_s=spans[moment.name].start_s,
            contents=_contents(moment, moment.non_model_nbytes, 0),
        )


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
    """The fullest moment of the step and what fills it, by kind and module."""
    moments = [moment for plan in step.plans for moment in plan.moments]
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
        *(s.spec for g in sorted(step.plan.resident) for s in step.layout.groups[g].slices),
    ):
        add("parameters", spec.name.rpartition(".")[0], spec.nbytes)
    add("gradients", "", peak.gradient_nbytes)
    add("optimizer states", "", peak.state_nbytes)
    add("others", "", peak.other_nbytes)
    for chunk in _slots_at(step, peak):
        group = step.layout.groups[split_chunk_name(chunk)[1]]
        add("slots", group.slices[0].spec.name.rpartition(".")[0], step.layout.chunk_nbytes_of(chunk))
    program = step.captured.programs.get(peak.phase)
    if program is None:
        add("activations", "", peak.non_model_nbytes)
        return Peak(peak.name, peak.op, peak.module, _largest_first(contents))
    index = [call.name for call in program.calls].index(peak.name)
    steps = next(found for i, found in enumerate(call_steps(program, step.captured.memories)) if i == index)
    fullest = max(steps, key=lambda at: at.nbytes)
    makers = _makers(step.captured)
    for storage in fullest.around:
        add("activations", makers.get(storage, "inputs"), program.storages[storage])
    if program is step.captured.forward:
        add("activations", "outputs of the step before", step.captured.output_nbytes)
    add("temporaries", fullest.module, fullest.inside_nbytes)
    return Peak(peak.name, peak.op, peak.module, _largest_first(contents), fullest.source)


def _largest_first(contents: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(contents.items(), key=lambda item: -item[1]))


def _makers(captured: Captured) -> dict[str, str]:
    """Storage -> the module whose call made it."""
    found: dict[str, str] = {}
    for program in captured.programs.values():
        for call in program.calls:
            for storage in call.output_storages:
                found.setdefault(storage, call.module or "the model")
    return found


def _slots_at(step: StepPlans, peak: Moment) -> list[str]:
    """Chunks that have a slot at a moment."""
    present: set[str] = set()
    for phase in step.phases:
        for index, stop in enumerate(phase.stops):
            for event in stop:
                if event.kind == PREFETCH:
                    present.add(event.chunk)
                elif event.kind == EVICT:
                    present.discard(event.chunk)
            if index < len(phase.moments) and phase.moments[index] is peak:
                return sorted(present)
    return []
