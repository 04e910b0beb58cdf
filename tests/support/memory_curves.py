"""Bytes over the moments of a training step, predicted and measured, operation by operation.

A segment of `codegen="eager"` is run node by node by a measuring copy of `EagerSegment`, which reads the meter after
every node. In a segment of Inductor's, it is read after every kernel that the generated wrapper calls. Predicted is
what `passes.segment_memory` says of the segment, put where `passes.profile` puts it.
"""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from harness import HUGE, compile_case
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import Batch, Case

from chunkc.ir.program import PhaseProgram, SegmentMemory
from chunkc.passes import codegen
from chunkc.passes.graphs.graphs import is_compute, module_path, op_name
from chunkc.passes.graphs.shapes import is_number
from chunkc.passes.memory.inductor import memory
from chunkc.passes.memory.inductor.wrapper_reader import ParsedWrapper
from chunkc.passes.memory.profile import last_holds
from chunkc.passes.memory.segment_memory import NO_SCRATCH, Scratch
from chunkc.passes.rewrite.runner import DISABLE
from chunkc.runtime.device import cpu_allocator
from chunkc.session.compiled_step import CompiledGraph
from chunkc.torch_private import compile_cache


@dataclass
class CallReadings:
    """Readings of the meter while one segment ran once.

    Attributes:
        start_nbytes: bytes when it was called.
        peak_nbytes: largest bytes during each of its nodes; in Inductor's, during each kernel or operator it calls.
        ops: of Inductor's, names of what was called, one for each peak.
    """

    start_nbytes: int
    peak_nbytes: list[int] = field(default_factory=list)
    ops: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Moment:
    """An operation of a step: bytes beyond model data, predicted and by the meter."""

    call: str
    op: str
    module: str
    predicted_nbytes: int
    measured_nbytes: int

    @property
    def excess_nbytes(self) -> int:
        """Bytes that were predicted too much; negative: too little."""
        return self.predicted_nbytes - self.measured_nbytes


@dataclass(frozen=True)
class PhaseCurve:
    """A phase of one graph. `base_nbytes` is what else was charged when it began."""

    phase: str
    moments: tuple[Moment, ...]
    base_nbytes: int

    @property
    def predicted_peak_nbytes(self) -> int:
        return max(moment.predicted_nbytes for moment in self.moments)

    @property
    def measured_peak_nbytes(self) -> int:
        return max(moment.measured_nbytes for moment in self.moments)


class MeasuringSegment(codegen.EagerSegment):
    """`EagerSegment`, with a reading after every operation."""

    def __init__(self, module: fx.GraphModule, log: list[CallReadings]) -> None:
        super().__init__(module)
        self._log = log

    def __call__(self, inputs: list[Any]) -> tuple[Any, ...]:
        cpu_allocator.lap_peak_nbytes()
        self._log.append(CallReadings(cpu_allocator.current_nbytes()))
        return super().__call__(inputs)

    def _target(self, module: fx.GraphModule, node: fx.Node) -> Callable[..., Any]:
        target = super()._target(module, node)
        return target if is_number(node) else functools.partial(self._measured, target)

    def _measured(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        cpu_allocator.lap_peak_nbytes()
        found = target(*args, **kwargs)
        self._log[-1].peak_nbytes.append(cpu_allocator.lap_peak_nbytes())
        return found


class _ReadOperators(TorchDispatchMode):
    """Reads the meter after every operator that a wrapper calls by itself."""

    supports_higher_order_operators = True

    def __init__(self, read: Callable[[str], None]) -> None:
        super().__init__()
        self._read = read

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cpu_allocator.lap_peak_nbytes()
        result = func(*args, **(kwargs or {}))
        self._read(memory.op_name_of(func))
        return result


class MeasuringOutput:
    """Inductor's compiled segment, with a reading after every kernel and operator."""

    def __init__(self, compiled: Any, log: list[CallReadings]) -> None:
        self._compiled, self._log = compiled, log
        self.source_code = getattr(compiled, "source_code", None)

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        cpu_allocator.lap_peak_nbytes()
        readings = CallReadings(cpu_allocator.current_nbytes())

        def read(op: str) -> None:
            readings.ops.append(op)
            readings.peak_nbytes.append(cpu_allocator.lap_peak_nbytes())

        def reading(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any) -> None:
                cpu_allocator.lap_peak_nbytes()  # what was let go after the call before is no part of this one
                kernel(*args)
                read(name)

            return run

        names = self._compiled.current_callable.__func__.__globals__  # of the module that Inductor generated
        kernels = ParsedWrapper.parse(self.source_code).kernels
        with mock.patch.dict(names, {name: reading(name, names[name]) for name in kernels}), _ReadOperators(read):
            outputs = self._compiled(inputs)
        self._log.append(readings)
        return outputs


@dataclass
class _Calls:
    """Calls of an Inductor segment's wrapper: per call its name and the last of its steps, of which `places` has
    names and positions."""

    places: list[tuple[str, int | None]]
    calls: list[tuple[str, int]]

    def peaks(self, inside: Sequence[int]) -> list[tuple[str, int]]:
        """Per call, the bytes while it runs, buffers taken for it included."""
        return [(op, inside[end]) for op, end in self.calls]


def _places(memory: SegmentMemory) -> list[tuple[str, int | None]]:
    return [(step.op, step.position) for step in memory.steps]


@contextmanager
def _noting_calls() -> Iterator[list[_Calls]]:
    """Inductor segments described inside say which of their steps belong to which call."""
    found: list[_Calls] = []
    calls: list[tuple[str, int]] = []
    step, describe = memory._StorageTracker.step, codegen.inductor_memory

    def noting_step(tracker: Any, label: str, scratch: Scratch = NO_SCRATCH) -> None:
        step(tracker, label, scratch)
        if label == "start":
            calls.clear()
        if label != memory.ALLOCATION:
            calls.append((label, len(tracker.steps) - 1))

    def noting_memory(*args: Any, **kwargs: Any) -> SegmentMemory:
        memory = describe(*args, **kwargs)
        found.append(_Calls(_places(memory), calls[:]))
        return memory

    with (
        mock.patch.object(memory._StorageTracker, "step", noting_step),
        mock.patch.object(codegen, "inductor_memory", noting_memory),
        mock.patch.object(compile_cache, "is_on", return_value=False),  # kept bytes are read off no wrapper
    ):
        yield found


@dataclass
class _PhaseRun:
    phase: str
    graph: CompiledGraph
    readings: list[CallReadings]


@contextmanager
def _measuring() -> Iterator[list[_PhaseRun]]:
    """Segments that are compiled inside measure themselves; yields the phases that ran so far."""
    log: list[CallReadings] = []
    runs: list[_PhaseRun] = []

    def eager(module: fx.GraphModule) -> MeasuringSegment:
        return MeasuringSegment(module, log)

    def inductor(*args: Any, **kwargs: Any) -> MeasuringOutput:
        return MeasuringOutput(compile_fx_inner(*args, **kwargs), log)

    def phase(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(graph: CompiledGraph, arguments: list[Any]) -> Any:
            outputs = method(graph, arguments)
            runs.append(_PhaseRun(name, graph, log[:]))
            log.clear()
            return outputs

        return run

    compile_fx_inner = codegen.compile_fx_inner
    with (
        mock.patch.dict(os.environ, {DISABLE: "casts"}),  # slots are no part of a curve
        mock.patch.object(codegen, "EagerSegment", eager),
        mock.patch.object(codegen, "compile_fx_inner", inductor),
        mock.patch.object(CompiledGraph, "forward", phase("forward", CompiledGraph.forward)),
        mock.patch.object(CompiledGraph, "backward", phase("backward", CompiledGraph.backward)),
    ):
        yield runs


def step_curves(case: Case, codegen: str, *, steps: int = 2, **options: Any) -> list[PhaseCurve]:
    """The curves of every phase of one training step of `case`, with everything resident.

    The last of `steps` is the measured one. In the second, gradients exist and are added to, so model data neither
    grows nor shrinks.
    """
    cpu_allocator.install()
    with _measuring() as runs, _noting_calls() as calls:
        _, compiled = compile_case(case, memory_budget=HUGE, codegen=codegen, place=False, **options)
        for _ in range(steps):
            runs.clear()
            batch = case.batch(0)
            gc.collect()
            output = compiled(**batch)  # kept to the end, as the prediction assumes of what a caller gets
            case.loss(output).backward()
            del output, batch
    return [_curve(run, calls) for run in runs]


def curves_at(case: Case, batches: Sequence[Batch], codegen: str = "eager", **options: Any) -> list[list[PhaseCurve]]:
    """The curves of one training step with each batch after the first, by one model of dynamic shapes."""
    cpu_allocator.install()
    found = []
    with _measuring() as runs, _noting_calls() as calls:
        _, compiled = compile_case(case, memory_budget=HUGE, codegen=codegen, place=False, **options)
        for batch in batches:
            runs.clear()
            gc.collect()
            output = compiled(**batch)
            case.loss(output).backward()
            found.append([_curve(run, calls) for run in runs])
            del output
    return found[1:]


def _curve(run: _PhaseRun, calls: Sequence[_Calls]) -> PhaseCurve:
    captured = run.graph.captured
    program = captured.forward
    if run.phase == "backward":
        assert captured.backward is not None
        program = captured.backward
    assert len(program.calls) == len(run.readings)
    memories = {name: segment.memory for name, segment in captured.segments.items()}
    names = {name: _node_names(module) for name, module in captured.modules.items()}
    moments: list[Moment] = []
    base: int | None = None
    for call, (start, inside), readings in zip(program.calls, _predicted(program, memories), run.readings):
        if base is None:
            base = readings.start_nbytes - start
        moments.append(Moment(call.name, "start", call.module, start, readings.start_nbytes - base))
        steps = memories[call.segment].steps
        if readings.ops:
            noted = next(noted for noted in calls if noted.places == _places(memories[call.segment]))
            found = [
                ((op, call.module), predicted, measured)
                for op, predicted, measured in _aligned(noted.peaks(inside), readings)
            ]
        else:
            assert len(readings.peak_nbytes) == len(steps)
            found = list(zip(names[call.segment], inside, readings.peak_nbytes, strict=True))
        for (op, module), predicted, measured in found:
            moments.append(Moment(call.name, op, module, predicted, measured - base))
    assert base is not None
    return PhaseCurve(run.phase, tuple(moments), base)


def _aligned(predicted: Sequence[tuple[str, int]], readings: CallReadings) -> Iterator[tuple[str, int, int]]:
    """Predicted and measured bytes of the calls in a wrapper. Measured are also operators that allocate nothing."""
    measured = iter(zip(readings.ops, readings.peak_nbytes, strict=True))
    for op, nbytes in predicted:
        if op == "start":
            continue
        reading = next((reading for found, reading in measured if found == op), None)
        assert reading is not None, f"{op} was predicted and not called; called were {readings.ops}"
        yield op, nbytes, reading
    rest = [op for op, _ in measured]
    assert not set(rest) & {op for op, _ in predicted}, f"called and not predicted: {rest}"


def _node_names(module: torch.nn.Module) -> list[tuple[str, str]]:
    assert isinstance(module, fx.GraphModule)
    nodes = [node for node in module.graph.nodes if is_compute(node) and not is_number(node)]
    return [(op_name(node), module_path(node)) for node in nodes]


def _predicted(program: PhaseProgram, memories: dict[str, SegmentMemory]) -> Iterator[tuple[int, list[int]]]:
    """Per call: bytes when it begins, and at each of its steps. As `passes.profile.positions`, every step kept."""
    last, storage_of, nbytes_of = last_holds(program), program.value_storages, program.storages
    live = {storage for storage in program.inputs.values() if last.get(storage, -1) >= 0} | program.held
    for index, call in enumerate(program.calls):
        memory = memories[call.segment]
        live = {storage for storage in live if last[storage] >= index}
        released: dict[str, int] = {}
        for position, value in enumerate(call.inputs):
            storage = storage_of[value]
            if last[storage] == index and storage in live:
                released[storage] = max(released.get(storage, 0), memory.input_released[position])
        around = sum(nbytes_of[storage] for storage in live if storage not in released)
        yield (
            around + sum(nbytes_of[storage] for storage in released),
            [
                around + step.nbytes + sum(nbytes_of[storage] for storage, until in released.items() if number < until)
                for number, step in enumerate(memory.steps)
            ],
        )
        live |= set(call.output_storages)
