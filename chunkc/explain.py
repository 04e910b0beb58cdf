"""`chunkc.explain`: what a training step will need and how long it will take, before anything runs or is allocated.

The model goes through the same capture, layout, planner and verifier as in training; only the compiler and the
runtime are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from chunkc.build import Builder
from chunkc.captured import Captured, plan_step, profile, rewrite, verify
from chunkc.ir.chunks import ChunkLayout, split_chunk_name
from chunkc.ir.errors import BudgetError, OptionsError, UnsupportedError, format_nbytes
from chunkc.ir.explanation import (
    Chunks,
    ExplainedMoment,
    Explanation,
    Peak,
    TimedEvent,
)
from chunkc.ir.hardware import Hardware
from chunkc.ir.plan import EVICT, PREFETCH, Moment, PhasePlan, Plan
from chunkc.ir.program import UPDATE
from chunkc.ir.simulate import simulate, step_time, traffic, update_s_per_element
from chunkc.offline import OfflineGraph, capture_offline
from chunkc.options import Options, parse_options, resolve_budget
from chunkc.passes.layout import lay_out
from chunkc.passes.planning import (
    check_minimum,
    choose_resident,
    fixed_nbytes,
    plan_phases,
    update_positions,
    update_tiles,
)
from chunkc.passes.profile import call_steps
from chunkc.presets import load_hardware

Show = Callable[[str], None]
"""Told what begins."""


def explain(
    model: nn.Module,
    *args: Any,
    memory_budget: int | str = "auto",
    hardware: str | Hardware = "cpu",
    home: str = "cpu",
    chunk_size: int | str = "auto",
    codegen: str = "eager",
    whole_graph: str = "auto",
    name: str | None = None,
    show: Show | None = None,
    **kwargs: Any,
) -> Explanation:
    """Explain one training step of `model(*args, **kwargs)`: nothing runs and nothing is allocated.

    Args:
        model: real, on the meta device or on fake tensors.
        memory_budget: of one device, as in `torch.compile`'s options; "auto": 90 % of what the hardware's device
            has beside the driver's context.
        hardware: a preset's name (`"rtx3090"`, `"8xv100-32g"`), a file, or a `Hardware`.
        home, chunk_size, codegen, whole_graph: as in `torch.compile`'s options.
        show: told what begins, for a progress display.

    Raises:
        OptionsError: an argument makes no sense.
        UnsupportedError: the model cannot be captured, or has an operator whose memory is not known.
    """
    asked = {"memory_budget": memory_budget, "home": home, "chunk_size": chunk_size}
    options = parse_options({**asked, "codegen": codegen, "whole_graph": whole_graph})
    machine = hardware if isinstance(hardware, Hardware) else load_hardware(hardware)
    show = show or (lambda what: None)
    show("tracing the model")
    graph = _one_graph(model, args, kwargs, options)
    show("planning")
    return explain_graph(graph, options, _training_in(machine, graph, options), name or type(model).__name__)


def minimum_budget(
    model: nn.Module,
    *args: Any,
    hardware: str | Hardware = "cpu",
    chunk_size: int | str = "auto",
    codegen: str = "eager",
    memory_budget: int | str = "auto",
    home: str = "cpu",
    **kwargs: Any,
) -> int:
    """The smallest budget, in bytes, in which `model(*args, **kwargs)` trains; arguments as for `explain`."""
    asked = {"memory_budget": memory_budget, "home": home, "chunk_size": chunk_size}
    options = parse_options({**asked, "codegen": codegen})
    machine = hardware if isinstance(hardware, Hardware) else load_hardware(hardware)
    graph = _one_graph(model, args, kwargs, options)
    layout = _layout(graph, options)
    step = plan_for(graph, layout, options, _training_in(machine, graph, options), budget_of(options, machine))
    return step.minimum_nbytes


def _one_graph(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], options: Options) -> OfflineGraph:
    graphs = capture_offline(model, args, kwargs, codegen=options.codegen)
    if len(graphs) > 1:
        raise UnsupportedError(
            f"torch.compile splits this model into {len(graphs)} graphs; only models in one graph can be explained so "
            "far (torch.compile(..., fullgraph=True) says where it breaks)"
        )
    return graphs[0]


def _layout(graph: OfflineGraph, options: Options) -> ChunkLayout:
    layout = lay_out(list(graph.movable), options.chunk_size if isinstance(options.chunk_size, int) else None)
    return ChunkLayout(layout.chunk_nbytes, layout.groups, (*layout.small, *graph.fixed))


def _training_in(machine: Hardware, graph: OfflineGraph, options: Options) -> Hardware:
    """The machine at the rate of the dtype that most parameters have, its links no faster than a home on disk."""
    sizes: dict[torch.dtype, int] = {}
    for spec in (*graph.movable, *graph.fixed):
        sizes[spec.dtype] = sizes.get(spec.dtype, 0) + spec.numel
    if sizes:
        machine = machine.training_in(max(sizes, key=lambda dtype: sizes[dtype]))
    if options.home_kind == "cpu":
        return machine
    inwards, outwards = machine.to_device_bytes_per_s, machine.to_home_bytes_per_s
    return replace(
        machine,
        to_device_bytes_per_s=min(inwards, machine.disk_read_bytes_per_s or inwards),
        to_home_bytes_per_s=min(outwards, machine.disk_write_bytes_per_s or outwards),
    )


def budget_of(options: Options, hardware: Hardware) -> int:
    """The budget in bytes on given hardware.

    Raises:
        OptionsError: the budget is more than a GPU has; or it is a part of a memory that the hardware does not state.
    """
    usable, asked = hardware.usable_memory_nbytes, options.memory_budget
    if usable is None and not isinstance(asked, int):
        raise OptionsError(
            f"hardware {hardware.name!r} does not say how much memory its device has: give memory_budget in bytes"
        )
    budget = resolve_budget(asked, hardware.device_memory_nbytes or 0, usable or 0)
    if hardware.kind == "cuda" and usable is not None and budget > usable:
        raise OptionsError(
            f"memory_budget is {format_nbytes(budget)}, but a device of {hardware.name} has {format_nbytes(usable)} "
            "beside the driver's context"
        )
    return budget


@dataclass(frozen=True)
class _Step:
    """A planned step: forward and backward, and the optimizer's update."""

    captured: Captured
    layout: ChunkLayout
    plan: Plan
    graphs: Mapping[str, fx.GraphModule]
    update: Plan | None
    minimum_nbytes: int
    fits: bool

    @property
    def plans(self) -> tuple[Plan, ...]:
        return (self.plan,) if self.update is None else (self.plan, self.update)

    @property
    def phases(self) -> tuple[PhasePlan, ...]:
        return tuple(phase for plan in self.plans for phase in plan.phases)


def explain_graph(graph: OfflineGraph, options: Options, hardware: Hardware, name: str) -> Explanation:
    """Explain one captured graph."""
    layout = _layout(graph, options)
    budget = budget_of(options, hardware)
    step = plan_for(graph, layout, options, hardware, budget)
    events = _events(step, hardware)
    moments = tuple(_moments(step, events))
    home_nbytes = _home_nbytes(layout, step.plan.resident)
    on_disk = options.home != "cpu"
    host = hardware.host_memory_nbytes
    overhead = hardware.context_nbytes
    return Explanation(
        model=name,
        hardware=hardware.name,
        codegen=options.codegen,
        fits=step.fits,
        host_fits=on_disk or host is None or home_nbytes <= host,
        num_parameters=sum(spec.numel for spec in layout.specs().values()),
        memory_budget_nbytes=budget,
        minimum_budget_nbytes=step.minimum_nbytes,
        predicted_peak_nbytes=max(
            step.plan.predicted_peak_nbytes, step.update.predicted_peak_nbytes if step.update else 0
        ),
        non_model_peak_nbytes=max((m.non_model_nbytes for m in step.plan.moments), default=0),
        overhead_nbytes=overhead,
        home_nbytes=home_nbytes,
        disk_nbytes=home_nbytes if on_disk else 0,
        device_memory_nbytes=hardware.device_memory_nbytes,
        host_memory_nbytes=host,
        peak=_peak(step),
        chunks=Chunks(layout.chunk_nbytes, len(layout.groups), len(step.plan.resident)),
        traffic_nbytes=traffic(events),
        step_time_s=step_time(events),
        moments=moments,
        events=events,
        notes=tuple(_notes(step, options, hardware)),
        graphs={phase: module.code for phase, module in step.graphs.items()},
        plan_text="".join(map(str, step.plans)),
    )


def plan_for(
    graph: OfflineGraph, layout: ChunkLayout, options: Options, hardware: Hardware, budget_nbytes: int
) -> _Step:
    """The plan for a budget; where it is too small, the plan for the smallest that works, marked as not fitting."""
    everything = frozenset(group.index for group in layout.groups)
    builder = Builder(
        graph.capture,
        options.codegen,
        layout,
        budget_nbytes,
        hardware,
        may_be_whole=options.whole_graph == "auto",
        compiled=False,
    )
    captured = builder.build()
    step = profile(captured, layout)
    fits = True
    try:
        minimum = check_minimum(step.all, layout, budget_nbytes, 0, all_may_stay=True)
    except BudgetError as error:
        fits, minimum = False, error.minimum_nbytes
    usable = max(budget_nbytes, minimum)
    resident = choose_resident(step, layout, usable, everything)
    plan = plan_step(captured, layout, budget_nbytes=usable, resident=resident, hardware=hardware)
    graphs = rewrite(captured, plan, layout)
    verify(captured, plan, graphs, layout)
    update: Plan | None = None
    if captured.backward is not None:
        group_of = layout.group_of()
        trained = sorted({group_of[name] for name in captured.trained if name in group_of} - resident)
        held = captured.forward.held_nbytes + captured.output_nbytes
        fixed = fixed_nbytes(layout, resident) + held
        tiles = update_tiles(layout, trained, usable - fixed)
        positions = update_positions(layout, tiles, held)
        update = plan_phases([(UPDATE, positions)], layout, budget_nbytes=usable, resident=resident, hardware=hardware)
    return _Step(captured, layout, plan, graphs, update, minimum, fits)


def _events(step: _Step, hardware: Hardware) -> tuple[TimedEvent, ...]:
    costs = {call.name: call.cost_s for program in step.captured.programs.values() for call in program.calls}
    per_element = update_s_per_element(hardware)
    for moment in step.update.moments if step.update else ():
        begin, _, end = moment.name.partition("[")[2].rstrip("]").partition(":")
        costs[moment.name] = (int(end) - int(begin)) * per_element
    group_of, specs = step.layout.group_of(), step.layout.specs()
    staying = {None, *step.plan.resident}
    num_staying = sum(specs[name].numel for name in step.captured.trained if group_of.get(name) in staying)
    return simulate(step.phases, costs, hardware, staying_update_s=num_staying * per_element)


def _home_nbytes(layout: ChunkLayout, resident: frozenset[int]) -> int:
    """Bytes at home of every group that moves: all kinds of data it has."""
    return sum(
        sum(group.nbytes(kind) for kind in (group.update_kinds if group.trainable else group.update_kinds[:1]))
        for group in layout.groups
        if group.index not in resident
    )


def _moments(step: _Step, events: Sequence[TimedEvent]) -> Iterator[ExplainedMoment]:
    """Every operation of forward and backward, and every tile of the update."""
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
                    source="",
                    start_s=span.start_s + share,
                    contents=_contents(moment, at.around_nbytes + extra, at.inside_nbytes),
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


def _peak(step: _Step) -> Peak:
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
    return Peak(peak.name, peak.op, peak.module, _largest_first(contents))


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


def _slots_at(step: _Step, peak: Moment) -> list[str]:
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


def _notes(step: _Step, options: Options, hardware: Hardware) -> Iterator[str]:
    if step.captured.whole:
        yield "everything fits: the graph is compiled whole and nothing moves"
    if hardware.kind == "cuda":
        if options.codegen == "inductor":
            yield "fused as on a CPU: Inductor's Triton kernels may fuse other operators and so need other bytes"
        yield "traced on a CPU: operators that CUDA implements otherwise may differ in their own workspaces"
        yield f"the driver's context and libraries take {hardware.context_nbytes:,} bytes more, counted apart"
    if hardware.num_devices > 1:
        yield f"planned for one of the {hardware.num_devices} devices, which trains the whole model by itself"
    yield f"rates of {hardware.name}: {hardware.source or 'as given'}"
