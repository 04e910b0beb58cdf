"""Wrappers with symbols for sizes, replayed in symbols and at plain sizes: the same bytes, and no guard of Dynamo's.
Compiled once with such symbols: bytes of every moment, and results, at many sizes.
"""

from __future__ import annotations

import gc
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from cuda_wrappers import SYMBOLIC
from torch import fx, nn
from torch._dynamo.source import ConstantSource, LocalSource
from torch._inductor.codecache import PyCodeCache
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode

from chunkc.ir.errors import UnsupportedError
from chunkc.ir.program import SegmentMemory
from chunkc.passes.codegen import CompiledSegment, compile_segment, describe_segment
from chunkc.passes.graphs.graphs import placeholders, returned
from chunkc.passes.graphs.shapes import ShapesAt, SymbolicShapes, symbol_values
from chunkc.passes.graphs.symbols import Size, free_symbols, plain_symbol, region, shape_env_of
from chunkc.passes.memory.inductor.memory import inductor_memory
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


TRACED = {"s27": 6, "s77": 5}
SHAPES = [(6, 5), (2, 2), (3, 31), (1, 7), (64, 33), (5, 1024)]


class Traced:
    """Symbols and tensors as Dynamo traces them."""

    def __init__(self) -> None:
        self.env = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.env)
        self.numbers = {}
        for name, value in TRACED.items():
            source = LocalSource(name)
            symbol = self.env.create_symbol(value, source, dynamic_dim=DimDynamic.DYNAMIC)
            self.numbers[name] = self.env.create_symintnode(symbol, hint=value, source=source)
        self.rows, self.columns = self.numbers.values()

    def tensor(self, *shape: Any, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
        with self.mode:
            return torch.empty(shape, dtype=dtype, device=device)

    def values(self, rows: int, columns: int) -> Values:
        return {n.node.expr: value for n, value in zip((self.rows, self.columns), (rows, columns))}


@pytest.fixture
def traced() -> Traced:
    return Traced()


def wrapper(*lines: str, inputs: str = "arg0_1, arg1_1, arg2_1") -> str:
    """A wrapper of `(s27, s77, tensor)`."""
    head = (f"{inputs} = args", "args.clear()", "s27 = arg0_1", "s77 = arg1_1")
    body = "\n".join(f"    {line}" for line in (*head, *lines))
    return f"cpp_fused_0 = async_compile.cpp_pybinding([], 'code')\n\ndef call(args):\n{body}\n"


def replays(source: str, inputs: Sequence[Any], traced: Traced, shape: tuple[int, int]) -> SegmentMemory:
    """In symbols from another shape and from this one, and at plain sizes: all the same, which is returned."""
    values = traced.values(*shape)
    plain = inductor_memory(source, inputs, 1, ShapesAt(values))
    for start in (tuple(TRACED.values()), shape):
        shapes = SymbolicShapes(traced.values(*start))
        memory = inductor_memory(source, inputs, 1, shapes)
        assert holds(shapes.conditions, traced.values(*start))
        if holds(shapes.conditions, values):
            assert memory.with_sizes(lambda nbytes: evaluated(nbytes, values)) == plain
        else:
            assert start != shape
    assert not traced.env.guards, "the replay's branches are no business of Dynamo's"
    return plain


def steps(memory: SegmentMemory) -> list[int]:
    return [step.nbytes for step in memory.steps]


@pytest.mark.parametrize("shape", SHAPES)
def test_reuse_views_and_sizes_computed_from_symbols(shape: tuple[int, int], traced: Traced) -> None:
    source = wrapper(
        "assert_size_stride(arg2_1, (s27, s77), (s77, 1), 'input')",
        "ps0 = s27*s77",
        "buf0 = empty_strided_cpu((s27, s77), (s77, 1), torch.float32)",
        "cpp_fused_0(arg2_1, buf0, ps0)",
        "del arg2_1",
        "buf1 = reinterpret_tensor(buf0, (ps0, ), (1, ), 0); del buf0  # reuse",
        "buf2 = empty_strided_cpu(((3 + s77) // 4, max(1, s27), 2), (2*max(1, s27), 2, 1), torch.float64)",
        "cpp_fused_0(buf1, buf2)",
        "buf3 = empty_strided_cpu((s27, min(s77, 8)), (1, s27), torch.bfloat16)",
        "cpp_fused_0_xnumel = s27*(s77 % 7)",
        "cpp_fused_0(buf3, cpp_fused_0_xnumel)",
        "del buf1",
        "buf4 = empty_strided_cpu((s27*(s77 % 7), 0), (1, 1), torch.float32)",
        "return (reinterpret_tensor(buf3, (s27, ), (1, ), 0), buf3, s27*s77, buf4, )",
    )
    rows, columns = shape
    memory = replays(source, [traced.rows, traced.columns, traced.tensor(traced.rows, traced.columns)], traced, shape)
    one, two, three = 4 * rows * columns, 16 * ((3 + columns) // 4) * rows, 2 * rows * min(columns, 8)
    assert steps(memory) == [0, one, one, one + two, one + two, *[one + two + three] * 2, two + three]
    assert memory.input_released == (8, 8, 3)
    assert memory.outputs == (0, 0, 1, 2)
    assert memory.storage_nbytes == (three, 0, 0)


@pytest.mark.parametrize("shape", SHAPES)
def test_operators_and_their_scratch(shape: tuple[int, int], traced: Traced) -> None:
    source = wrapper(
        "buf0 = torch.ops.aten.sort.stable(arg2_1, stable=False, dim=1, descending=False)",
        "buf1 = buf0[0]",
        "buf2 = buf0[1]",
        "del buf0, arg2_1",
        "buf3 = empty_strided_cpu((s77, s77), (s77, 1), torch.float32)",
        "extern_kernels.mm(reinterpret_tensor(buf1, (s77, s27), (1, s77), 0), buf1, out=buf3)",
        "buf4 = torch.ops.aten.cumsum.default(buf3, 0)",
        "del buf3",
        "return (buf4, buf2, )",
    )
    rows, columns = shape
    memory = replays(source, [traced.rows, traced.columns, traced.tensor(traced.rows, traced.columns)], traced, shape)
    ordered, square = 12 * rows * columns, 4 * columns * columns
    assert max(steps(memory)) >= ordered + 2 * square
    assert memory.storage_nbytes == (square, 8 * rows * columns)
    assert [step.op for step in memory.steps][1::2][:1] == ["aten.sort"]


@pytest.mark.parametrize("shape", SHAPES[:2])
def test_fourier_transforms_of_images(shape: tuple[int, int], traced: Traced) -> None:
    """Their meta kernels give a result other sizes, which symbols need Python's dispatcher for."""
    source = wrapper(
        "buf0 = torch.ops.aten._fft_r2c.default(arg2_1, [2, 3], 1, True)",
        "del arg2_1",
        "buf1 = buf0",
        "del buf0",
        "buf2 = torch.ops.aten._fft_c2r.default(buf1, [2, 3], 1, 8)",
        "return (buf2, )",
    )
    rows, columns = shape
    image = traced.tensor(traced.rows, traced.columns, 6, 8)
    memory = replays(source, [traced.rows, traced.columns, image], traced, shape)
    assert memory.storage_nbytes == (4 * rows * columns * 6 * 8,)


@pytest.mark.parametrize("shape", SHAPES)
def test_copies_of_whole_storages_take_those(shape: tuple[int, int], traced: Traced) -> None:
    """ATen copies all of the storage that a view lies in, where the fake result's storage ends with the view."""
    source = wrapper(
        "buf0 = torch.ops.aten.full.default([s27, 2*s77], 0, dtype=torch.complex64, device=device(type='cpu'))",
        "buf1 = torch.ops.aten.slice.Tensor(buf0, 1, 0, s77)",
        "buf2 = torch.ops.aten.copy.default(buf1, arg2_1)",
        "del arg2_1, buf0, buf1",
        "return (buf2, )",
    )
    rows, columns = shape
    tensor = traced.tensor(traced.rows, traced.columns, dtype=torch.complex64)
    memory = replays(source, [traced.rows, traced.columns, tensor], traced, shape)
    assert memory.storage_nbytes == (8 * rows * 2 * columns,)


def test_bytes_are_expressions_in_the_traced_symbols(traced: Traced) -> None:
    source = wrapper("buf0 = empty_strided_cpu((s27, s77), (s77, 1), torch.float32)", "return (buf0, s27, )")
    inputs = [traced.rows, traced.columns, traced.tensor(traced.rows, traced.columns)]
    memory = inductor_memory(source, inputs, 1, SymbolicShapes(traced.values(6, 5)))
    rows, columns = (number.node.expr for number in traced.numbers.values())
    assert [step.nbytes for step in memory.steps] == [0, 4 * rows * columns]
    assert memory.storage_nbytes == (4 * rows * columns, 0)
    assert isinstance(memory.storage_nbytes[0], sympy.Expr)
    assert isinstance(memory.storage_nbytes[1], int)


def test_a_number_read_from_data_may_be_computed_with(traced: Traced) -> None:
    lines = (
        "u0 = arg2_1.item()",
        "if not (u0 >= 0):\n        raise RuntimeError('no')",
        "u1 = 1 if arg2_1.item() else 0",
        "buf0 = empty_strided_cpu((s27, s77), (s77, 1), torch.float32)",
        "cpp_fused_0(buf0, u0, u1)",
    )
    inputs = [traced.rows, traced.columns, traced.tensor(dtype=torch.int64)]
    memory = replays(wrapper(*lines, "return (buf0, )"), inputs, traced, (3, 4))
    assert memory.storage_nbytes == (48,)
    allocates = wrapper(*lines, "buf1 = empty_strided_cpu((u0, s27), (s27, 1), torch.float32)", "return (buf1, )")
    for shapes in (SymbolicShapes(traced.values(6, 5)), ShapesAt(traced.values(6, 5))):
        with pytest.raises(UnsupportedError, match=r"depends on the values of tensors.*torch\.compiler\.disable"):
            inductor_memory(allocates, inputs, 1, shapes)


# --- CUDA ---


def layer(traced: Traced) -> list[Any]:
    sizes = [(traced.rows, traced.columns, 256), (256, 256), (256,)]
    tensors = [traced.tensor(*size, dtype=torch.bfloat16, device="cuda:0") for size in sizes]
    return [traced.rows, traced.columns, *tensors]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_cuda_wrapper_in_symbols_is_the_one_for_plain_sizes(shape: tuple[int, int], traced: Traced) -> None:
    memory = replays(SYMBOLIC, layer(traced), traced, shape)
    plain = re.sub(r"\bs27\b(?! =)", str(shape[0]), re.sub(r"\bs77\b(?! =)", str(shape[1]), SYMBOLIC))
    with FakeTensorMode():
        sizes = [(*shape, 256), (256, 256), (256,)]
        tensors = [torch.empty(size, dtype=torch.bfloat16, device="cuda:0") for size in sizes]
    assert memory == inductor_memory(plain, [*shape, *tensors], 1)
    rows = shape[0] * shape[1]
    assert memory.storage_nbytes == (1024, -(-2 * rows // 512) * 512, 512 * (rows + 1))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    cpu_allocator.install()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.norm(F.gelu(self.up(x))))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        query, key, value = self.heads(x).view(batch, length, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(50, 16), nn.LayerNorm(16)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.norm(self.table(tokens)) @ self.table.weight.t()
        return F.cross_entropy(logits.view(-1, 50), targets.view(-1))


class Fallback(nn.Module):
    """Operators that Inductor leaves to ATen, between sums that it fuses."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(1, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ordered = torch.sort((x * self.scale).sum(-1) * 2, dim=-1)[0]
        return torch.cumsum(ordered, 0) * 3 + torch.logsumexp(x, -1)


class Edges(nn.Module):
    """Views, what may be empty, what is padded."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = torch.exp(x[2:])
        return rows, F.pad(x, (1, 2)).sum(0), torch.cat([x, x[:1] * 2]), (x * 2).view(-1), x.new_zeros(0, x.shape[0])


def floats(*shape: int) -> torch.Tensor:
    return torch.randn(shape, requires_grad=True)


def words(*shape: int) -> tuple[torch.Tensor, ...]:
    return torch.randint(50, shape), torch.randint(50, shape)


SIZES = [(7, 5), (4, 2), (3, 31), (17, 4), (8, 13)]
CASES = {
    "mlp": (Mlp, lambda b, s: (floats(b, s, 16),)),
    "attention": (Attention, lambda b, s: (floats(b, s, 16),)),
    "words": (Words, words),
    "fallback": (Fallback, lambda b, s: (floats(b, s, 6),)),
    "edges": (Edges, lambda b, s: (floats(b + 2, s),)),
}


def grads(module: nn.Module, args: tuple[torch.Tensor, ...], call) -> list[torch.Tensor]:
    """Results and gradients of parameters and inputs."""
    module.zero_grad()
    for tensor in args:
        tensor.grad = None
    result = call(*args)
    results = result if isinstance(result, tuple) else (result,)
    sum((r * r).sum() for r in results).backward()
    given = [t.grad for t in (*module.parameters(), *args) if t.grad is not None]
    return [r.detach() for r in results] + [g.clone() for g in given]


SLOW = pytest.mark.slow


@pytest.mark.second_tier
@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("edges", True),
        pytest.param("mlp", True, marks=SLOW),
        pytest.param("mlp", False, marks=SLOW),
        pytest.param("attention", True, marks=SLOW),
        pytest.param("attention", False, marks=SLOW),
        pytest.param("words", True, marks=SLOW),
        pytest.param("fallback", True, marks=SLOW),
    ],
)
def test_bytes_and_results_at_many_sizes(name: str, whole: bool) -> None:
    """`Subject` compares a description in symbols with the compiled code's, and with one at plain sizes, too."""
    build, make = CASES[name]
    module = build()
    subject = Subject(module, whole=whole)
    for sizes in SIZES:
        args = make(*sizes)
        expected = grads(module, args, module)
        found = grads(module, args, subject)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    graph = subject.graph  # compiled once
    assert not graph.differences
    assert graph.num_moments >= 3 * len(SIZES)
    assert len({tuple(sorted(shape.values())) for shape in graph.shapes}) >= len(SIZES)
    assert any(
        isinstance(step.nbytes, sympy.Expr) for part in graph.described.values() for step in part.compiled.memory.steps
    )


def column_sums(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).sum(0) + 1


@pytest.mark.second_tier
def test_sizes_outside_of_what_was_compiled_are_captured_anew() -> None:
    """Inductor's loop for a sum takes 4096 rows or fewer for granted, tracing takes more than one."""
    subject = Subject(column_sums)
    for rows, columns in ((6, 5), (9, 4), (4096, 2), (5000, 3), (1, 3), (7, 3)):
        x = torch.randn(rows, columns)
        torch.testing.assert_close(subject(x), column_sums(x), rtol=1e-4, atol=1e-3)
    first, *others = subject.graphs
    assert len(others) == 2
    assert not [line for graph in subject.graphs for line in graph.differences]
    assert {max(shape.values()) for shape in first.shapes} == {6, 7, 9, 4096}
    (rows, columns) = next(iter(first.shapes))
    conditions = region(first.shape_env)
    assert holds(conditions, {rows: 4096, columns: 2})
    assert not holds(conditions, {rows: 5000, columns: 3})
    assert not holds(conditions, {rows: 1, columns: 3})


def test_equal_symbols_share_code_and_others_do_not() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.exp(x) + 1, torch.exp(x) + 1, torch.exp(y) + 1

    table, found = SegmentTable(), []
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        x, y = (mode.from_tensor(torch.randn(n), static_shapes=False, source=ConstantSource(f"x{n}")) for n in (5, 7))
        gm = make_fx(function)(x, y)
    exps = [node for node in gm.graph.nodes if node.target is torch.ops.aten.exp.default]
    for exp in exps:
        found += extract(gm, [[exp, next(iter(exp.users))]], table)
    assert len(exps) == 3
    same, again, other = (piece.segment.name for piece in found)
    assert same == again != other


def test_every_symbol_of_a_segment_is_one_of_its_inputs() -> None:
    """Also of one whose tensors show the product of two symbols only."""
    capture = captured_of(lambda x: torch.exp((x * 2).view(-1, 4)) + 1, floats(6, 5, 4))
    graph = capture.forward.graph
    exp = next(node for node in graph.nodes if node.target is torch.ops.aten.exp.default)
    (piece,) = extract(capture.forward, [[exp, *exp.users][:1]], SegmentTable())
    symbols = {s for s in map(plain_symbol, piece.segment.example_inputs) if s is not None}
    assert len(symbols) == 2
    assert symbols == set(free_symbols(piece.segment.example_inputs))
    memory = describe_segment(piece.segment, "inductor", 1, SymbolicShapes(dict.fromkeys(symbols, 6)))
    (first, second) = symbols
    assert memory.storage_nbytes == (16 * first * second,)


def test_code_for_other_sizes_is_not_taken_from_the_cache() -> None:
    """How operators are fused depends on sizes: a description must find the code that is compiled."""
    wrappers = []
    for sizes in ((6, 5), (3, 31)):
        subject = Subject(column_sums)
        subject(torch.randn(sizes))
        wrappers += [part.compiled.wrapper.source for part in subject.graph.described.values()]
    hints = [re.search(r"rand_strided\(\((\d+), (\d+)\)", wrapper).groups() for wrapper in wrappers]
    assert hints == [("6", "5"), ("3", "31")]
