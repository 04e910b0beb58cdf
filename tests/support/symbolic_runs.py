"""Segments with symbolic sizes, made as `torch.compile(dynamic=True)` makes them, and run under the meter."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx
from torch._inductor.codecache import PyCodeCache
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode

from chunkc.ir.program import SegmentMemory
from chunkc.passes.codegen import CompiledSegment, compile_segment, describe_segment
from chunkc.passes.graphs.graphs import placeholders, returned
from chunkc.passes.graphs.shapes import ShapesAt, SymbolicShapes, symbol_values
from chunkc.passes.graphs.symbols import Size, free_symbols, plain_symbol, region, shape_env_of
from chunkc.passes.memory.inductor.wrapper_reader import AT, ParsedWrapper
from chunkc.passes.segments.cuts import clone_parameter_views, cut
from chunkc.passes.segments.segments import Piece, Segment, SegmentTable, extract
from chunkc.runtime.device import cpu_allocator
from chunkc.tracing.capture import TracedGraphs, capture_graph

Values = dict[sympy.Symbol, int]


def evaluated(size: Size, values: Values) -> int:
    return size if isinstance(size, int) else int(size.xreplace({s: sympy.Integer(v) for s, v in values.items()}))


def values_of(segment: Segment, args: Sequence[Any]) -> Values:
    """Return the values of the symbols of a segment's inputs for these arguments."""
    found: Values = {}
    for example, value in zip(segment.example_inputs, args, strict=True):
        pairs = [(example, value)]
        if isinstance(example, torch.Tensor):
            pairs = [*zip(example.shape, value.shape), *zip(example.stride(), value.stride())]
        for symbolic, number in pairs:
            symbol = plain_symbol(symbolic)
            if symbol is not None:
                assert found.setdefault(symbol, int(number)) == int(number)
    return found


def pieces_of(gm: fx.GraphModule, table: SegmentTable, whole: bool) -> list[Piece]:
    """Cut a graph as if each input of fixed sizes, a parameter, were a chunk of its own; or leave it `whole`."""
    values = {node: node.meta["val"] for node in placeholders(gm.graph)}
    fixed = [n for n, value in values.items() if isinstance(value, torch.Tensor) and not [*free_symbols([value])]]
    groups = {node: index for index, node in enumerate(fixed)}
    clone_parameter_views(gm.graph, fixed)
    return extract(gm, cut(gm.graph, groups=groups, gradient_groups={}, whole=whole), table)


@dataclass(frozen=True)
class Reading:
    """A moment of a run: what ran, and the most bytes meanwhile, beyond those before the run."""

    op: str
    nbytes: int


class Meter(TorchDispatchMode):
    """Runs a wrapper of Inductor's line by line, its kernels and all, and reads the meter at every one."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.readings: list[Reading] = []
        self.left_nbytes = 0
        self._wrapper = ParsedWrapper.parse(source)
        self._module = PyCodeCache.load(source)
        self._phase_context = 0

    def run(self, args: list[Any]) -> tuple[Any, ...]:
        """Takes the arguments out of `args`, which must hold their only references."""
        names = dict(vars(self._module))
        for name in self._wrapper.kernels:
            names[name] = self._read(name, names[name])
        names["empty_strided_cpu"] = self._read("allocation", names["empty_strided_cpu"])
        names[AT] = lambda position: None
        call = self._wrapper.call(names)
        self._phase_context = cpu_allocator.current_nbytes() - sum(storages_of(args).values())
        with self:
            self._read("start", lambda: None)()
            outputs = tuple(call(args))
        self.left_nbytes = cpu_allocator.current_nbytes() - self._phase_context
        return outputs

    def _read(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            cpu_allocator.reset_peak()
            result = function(*args, **kwargs)
            self.readings.append(Reading(name, cpu_allocator.peak_nbytes() - self._phase_context))
            return result

        return call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = cpu_allocator.current_nbytes() - self._phase_context
        result = self._read(func._schema.name.replace("::", "."), func)(*args, **kwargs)
        if "out" not in kwargs and self.readings[-1].nbytes == before:
            self.readings.pop()  # a view, or an operator that allocates nothing
        return result


def storages_of(args: Sequence[Any]) -> dict[int, int]:
    """Return the bytes of the distinct storages of tensors."""
    return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in args if isinstance(t, torch.Tensor)}


def predicted(memory: SegmentMemory, args: Sequence[Any]) -> list[Reading]:
    """Return the expected readings of `Meter`: the segment's own bytes, and the inputs that it still holds."""
    found = []
    for index, step in enumerate(memory.steps):
        held = [value for value, until in zip(args, memory.input_released) if index < until]
        found.append(Reading(step.op, step.nbytes + sum(storages_of(held).values())))
    return found


def copies_of(args: Sequence[Any]) -> list[Any]:
    return [
        torch.empty_strided(a.shape, a.stride(), dtype=a.dtype).copy_(a) if isinstance(a, torch.Tensor) else a
        for a in args
    ]


def holds(conditions: Iterable[sympy.Basic], values: Mapping[sympy.Symbol, int]) -> bool:
    """Whether all conditions hold where the symbols have these values. Conditions on other symbols are left out."""
    numbers = {symbol: sympy.Integer(value) for symbol, value in values.items()}
    known = [condition for condition in conditions if condition.free_symbols <= numbers.keys()]
    return all(condition.xreplace(numbers) is sympy.true for condition in known)


@dataclass
class Described:
    """A compiled segment with its memory in symbols, wherever it was called so far."""

    segment: Segment
    compiled: CompiledSegment
    memories: list[tuple[tuple[sympy.Basic, ...], SegmentMemory]]

    def at(self, shape: Values) -> SegmentMemory:
        """In symbols still, for the conditions that hold at `shape`. The wrapper is not generated again."""
        for conditions, memory in self.memories:
            if holds(conditions, shape):
                return memory
        shapes = SymbolicShapes(shape)
        memory = describe_segment(self.segment, "inductor", 1, shapes, self.compiled.wrapper)
        self.memories.append((shapes.conditions, memory))
        assert holds(shapes.conditions, shape)
        return memory


@dataclass
class Graph:
    """A captured graph: its segments compiled for symbols, and what was found out about each when it ran.

    Attributes:
        differences: moments at which the meter read something else than predicted.
        num_moments: moments that were compared.
        shapes: values of the symbols of every call of a segment.
    """

    capture: TracedGraphs
    shape_env: ShapeEnv | None
    forward: list[Piece]
    backward: list[Piece]
    described: dict[str, Described] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)
    num_moments: int = 0
    shapes: list[Values] = field(default_factory=list)

    def compile(self, table: SegmentTable) -> None:
        """Compile every segment once; a description before has found the same memory."""
        for segment in table.segments.values():
            traced = symbol_values(segment.example_inputs)
            shapes, ahead = SymbolicShapes(traced), SymbolicShapes(traced)
            before = describe_segment(segment, "inductor", 1, ahead)
            num_guards = len(self.shape_env.guards) if self.shape_env is not None else 0
            compiled = compile_segment(segment, "inductor", 1, shapes)
            assert compiled.memory == before
            assert shapes.conditions == ahead.conditions
            assert self.shape_env is None or len(self.shape_env.guards) == num_guards
            self.described[segment.name] = Described(segment, compiled, [(shapes.conditions, compiled.memory)])

    def run(self, gm: fx.GraphModule, pieces: Sequence[Piece], args: list[Any]) -> list[Any]:
        values = dict(zip(placeholders(gm.graph), args, strict=True))
        args.clear()
        for piece in pieces:
            values.update(zip(piece.outputs, self._call(piece, [values[node] for node in piece.inputs]), strict=True))
        return [None if node is None else values[node] for node in returned(gm.graph)]

    def _call(self, piece: Piece, args: list[Any]) -> Sequence[Any]:
        described = self.described[piece.segment.name]
        name, compiled, shape = piece.segment.name, described.compiled, values_of(piece.segment, args)
        self.shapes.append(shape)
        assert self.shape_env is None or holds(region(self.shape_env), shape)
        memory = described.at(shape)
        plain = describe_segment(piece.segment, "inductor", 1, ShapesAt(shape), compiled.wrapper)
        assert memory.with_sizes(lambda nbytes: evaluated(nbytes, shape)) == plain
        if not compiled.wrapper:
            return compiled.run(copies_of(args))
        whole = compiled.run(copies_of(args))
        expected = predicted(plain, args := copies_of(args))
        meter = Meter(compiled.wrapper.source)
        input_nbytes = [a.untyped_storage().nbytes() if isinstance(a, torch.Tensor) else 0 for a in args]
        gc.collect()
        outputs = meter.run(args)
        torch.testing.assert_close([*outputs], [*whole])
        self.num_moments += len(expected)
        self.differences += [
            f"{name} at {shape}: {paper} predicted, {read} by the meter"
            for paper, read in itertools.zip_longest(expected, meter.readings)
            if paper is None or read is None or read.op not in (paper.op, "allocation") or paper.nbytes != read.nbytes
        ]
        kept = sum(plain.storage_nbytes) + sum(input_nbytes[-1 - n] for n in set(plain.outputs) if n < 0)
        if meter.left_nbytes != kept:
            self.differences.append(f"{name} at {shape}: {kept} bytes leave it as predicted, {meter.left_nbytes} do")
        return outputs


def captured_of(function: Callable[..., Any], *args: torch.Tensor) -> TracedGraphs:
    """Return the graphs of `function` with symbols for sizes; nothing of them is compiled."""
    found: list[TracedGraphs] = []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        names = [None] * len(placeholders(gm.graph))
        _, capture = capture_graph(gm, inputs, names, codegen="inductor", run_forward=list, run_backward=list)
        found.append(capture)
        return gm

    torch._dynamo.reset()
    torch.compile(function, backend=backend, dynamic=True)(*args)
    return found[0]


class Subject:
    """A module compiled for symbolic sizes, segment by segment: once per graph that Dynamo captures."""

    def __init__(self, module: Callable[..., Any], *, whole: bool = False) -> None:
        self.graphs: list[Graph] = []
        self._whole = whole
        torch._dynamo.reset()
        self._compiled = torch.compile(module, backend=self._backend, dynamic=True)

    def __call__(self, *args: torch.Tensor) -> Any:
        return self._compiled(*args)

    def _backend(self, gm: fx.GraphModule, inputs: list[Any]) -> Any:
        def forward(args: list[Any]) -> list[Any]:
            assert capture.forward is not None
            return graph.run(capture.forward, graph.forward, args)

        def backward(args: list[Any]) -> list[Any]:
            assert capture.backward is not None
            return graph.run(capture.backward, graph.backward, args)

        names = [None] * len(placeholders(gm.graph))
        call, capture = capture_graph(gm, inputs, names, codegen="inductor", run_forward=forward, run_backward=backward)
        table = SegmentTable()
        assert capture.forward is not None
        shape_env = shape_env_of(node.meta["val"] for node in placeholders(capture.forward.graph))
        ahead = pieces_of(capture.forward, table, self._whole)
        back = pieces_of(capture.backward, table, self._whole) if capture.backward is not None else []
        graph = Graph(capture, shape_env, ahead, back)
        graph.compile(table)
        self.graphs.append(graph)
        return call

    @property
    def graph(self) -> Graph:
        (only,) = self.graphs
        return only

    @property
    def differences(self) -> list[str]:
        return [line for graph in self.graphs for line in graph.differences]
