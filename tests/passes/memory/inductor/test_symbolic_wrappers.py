"""Wrappers with symbols for sizes, replayed in symbols and at plain sizes: the same bytes, and no guard of Dynamo's;
and wrappers for CUDA devices, replayed without one. Bytes of compiled code at many sizes:
`tests/end_to_end/test_prediction.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import sympy
import torch
from cuda_wrappers import LAYER, OLDER, SYMBOLIC
from harness import counted
from torch import fx, nn
from torch._dynamo.source import ConstantSource, LocalSource
from torch._inductor import config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from chunkc import compile as compilation
from chunkc.ir.errors import UnsupportedError
from chunkc.ir.program import SegmentMemory
from chunkc.passes import codegen
from chunkc.passes.codegen import describe_segment
from chunkc.passes.graphs.graphs import placeholders
from chunkc.passes.graphs.shapes import ShapesAt, SymbolicShapes
from chunkc.passes.graphs.symbols import Size, free_symbols, plain_symbol
from chunkc.passes.memory.inductor.cuda import steady_inductor
from chunkc.passes.memory.inductor.memory import inductor_memory
from chunkc.passes.memory.scratch.cuda import cuda_scratch_nbytes
from chunkc.passes.segments.segments import SegmentTable, extract
from chunkc.runtime.device import cpu_allocator
from chunkc.tracing.capture import TracedGraphs, capture_graph

Values = dict[sympy.Symbol, int]


def evaluated(size: Size, values: Values) -> int:
    return size if isinstance(size, int) else int(size.xreplace({s: sympy.Integer(v) for s, v in values.items()}))


def holds(conditions: Iterable[sympy.Basic], values: Mapping[sympy.Symbol, int]) -> bool:
    """Whether all conditions hold where the symbols have these values. Conditions on other symbols are left out."""
    numbers = {symbol: sympy.Integer(value) for symbol, value in values.items()}
    known = [condition for condition in conditions if condition.free_symbols <= numbers.keys()]
    return all(condition.xreplace(numbers) is sympy.true for condition in known)


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


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.scale).sum(0) + 1


def summing() -> Any:
    torch._dynamo.reset()
    return torch.compile(Sums(), backend="chunkc", dynamic=True, options={"codegen": "inductor"})


@pytest.mark.second_tier
def test_sizes_outside_of_what_was_compiled_are_captured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's loop for a sum takes 4096 rows or fewer for granted, tracing takes more than one."""
    captures, call, found = counted(monkeypatch, compilation, "capture_graph"), summing(), []
    for rows, columns in ((6, 5), (9, 4), (4096, 2), (5000, 3), (1, 3), (7, 3)):
        x = torch.randn(rows, columns)
        with torch.no_grad():
            result = call(x)
        torch.testing.assert_close(result, x.sum(0) + 1, rtol=1e-4, atol=1e-3)
        found.append(captures.calls)
    assert found == [1, 1, 1, 2, 3, 3]


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
    capture = captured_of(lambda x: torch.exp((x * 2).view(-1, 4)) + 1, torch.randn(6, 5, 4, requires_grad=True))
    graph = capture.forward.graph
    exp = next(node for node in graph.nodes if node.target is torch.ops.aten.exp.default)
    (piece,) = extract(capture.forward, [[exp, *exp.users][:1]], SegmentTable())
    symbols = {s for s in map(plain_symbol, piece.segment.example_inputs) if s is not None}
    assert len(symbols) == 2
    assert symbols == set(free_symbols(piece.segment.example_inputs))
    memory = describe_segment(piece.segment, "inductor", 1, SymbolicShapes(dict.fromkeys(symbols, 6)))
    (first, second) = symbols
    assert memory.storage_nbytes == (16 * first * second,)


def test_code_for_other_sizes_is_not_taken_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """How operators are fused depends on sizes: a description must find the code that is compiled."""
    sources, compile_fx_inner = [], codegen.compile_fx_inner

    def noting(*args: Any, **kwargs: Any) -> Any:
        compiled = compile_fx_inner(*args, **kwargs)
        sources.append(compiled.source_code)
        return compiled

    monkeypatch.setattr(codegen, "compile_fx_inner", noting)
    for sizes in ((6, 5), (3, 31)):
        with torch.no_grad():
            summing()(torch.randn(sizes))
    hints = [re.search(r"rand_strided\(\((\d+), (\d+)\)", source).groups() for source in sources]
    assert hints == [("6", "5"), ("3", "31")]


# ---------------------------------------------------------------- wrappers for CUDA devices

BF16 = torch.bfloat16
aten = torch.ops.aten


def fakes(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, device: str = "cuda:0") -> list[torch.Tensor]:
    with FakeTensorMode():
        return [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]


def test_a_layer_is_replayed_kernel_by_kernel() -> None:
    inputs = fakes((128, 256), (256, 256), (256,), dtype=BF16) + fakes((512,), dtype=torch.int64)
    memory = inductor_memory(LAYER, inputs, 1)
    ops = [step.op for step in memory.steps if step.op != "start"]
    kernels = [op for op in ops if op.startswith("triton")]
    assert list(dict.fromkeys(kernels)) == [
        "triton_per_fused_0", "triton_red_fused_1", "triton_per_fused_exp_prepare_softmax_online_sub_2",
        "triton_per_fused_prepare_softmax_online_3", "triton_per_fused_sub_4",
    ]  # fmt: skip
    assert memory.storage_nbytes == (512, 512)  # a scalar, and 256 numbers of 2 bytes
    # addmm's result, two rows of sums of 128 fp32, three tensors of 2 x 4 x 64 x 64 fp32.
    peak = max(step.nbytes for step in memory.steps if step.op == "triton_per_fused_0")
    assert peak == 128 * 256 * 2 + 2 * 512 + 3 * 131072
    # Scores, their two operands and the values, and the sums that are returned.
    assert max(step.nbytes for step in memory.steps) == 4 * 131072 + 512
    released = memory.input_released
    assert released[0] < released[3] == len(memory.steps)


def test_the_shape_of_older_wrappers() -> None:
    memory = inductor_memory(OLDER, fakes((100, 100), (100, 100)), 1)
    ops = [step.op for step in memory.steps]
    assert {"aten.mm", "triton_poi_fused_relu_0", "triton_red_fused_sum_1", "aten.full"} <= set(ops)
    assert memory.outputs[-1] == -1  # the first input is returned
    rounded = -(-40000 // 512) * 512
    # buf1, the scalar and the workspace, while the sum runs.
    assert max(s.nbytes for s in memory.steps if s.op == "triton_red_fused_sum_1") == rounded + 512 + 4096
    assert memory.storage_nbytes[:2] == (512, rounded)
    attention = max(s.nbytes for s in memory.steps if "attention" in s.op)
    assert attention > rounded * 2 + 100 * 64 * 4


@pytest.mark.parametrize("inputs_on", ["cpu", "cuda:1"])
def test_where_the_inputs_lie_changes_nothing(inputs_on: str) -> None:
    """Fake inputs may say anything; the wrapper says where it computes."""
    memory = inductor_memory(OLDER, fakes((100, 100), (100, 100), device=inputs_on), 1)
    assert memory == inductor_memory(OLDER, fakes((100, 100), (100, 100)), 1)


@pytest.mark.parametrize("index", [0, 1])
def test_nor_does_which_gpu_the_wrapper_is_for(index: int) -> None:
    """An operator may meet an input, a buffer of the wrapper's own, and one that an operator made."""
    meets = "buf7 = torch.ops.aten.addmm.default(primals_1, buf1, buf4)\n        buf6 = buf5[0]"
    source = OLDER.replace("buf6 = buf5[0]", meets).replace("index=0", f"index={index}")
    memory = inductor_memory(source, fakes((100, 100), (100, 100), device=f"cuda:{index}"), 1)
    assert [step.op for step in memory.steps].count("aten.addmm") == 1
    assert memory == inductor_memory(source, fakes((100, 100), (100, 100), device="cpu"), 1)


def test_pinned_host_memory_is_refused() -> None:
    source = OLDER.replace("workspace_0.zero_()", "empty_strided_cpu_pinned((4, ), (1, ), torch.float32)")
    with pytest.raises(UnsupportedError, match="pinned"):
        inductor_memory(source, fakes((100, 100), (100, 100)), 1)


def attention(heads: int = 4, keys: int = 4, width: int = 64, rows: int = 256) -> list[torch.Tensor]:
    return fakes((2, heads, rows, width), (2, keys, rows, width), (2, keys, rows, width), dtype=BF16)


def test_flash_attention_s_backward_sums_queries_gradients_in_fp32() -> None:
    query, key, value = attention()
    op = aten._scaled_dot_product_flash_attention_backward.default
    lse = fakes((2, 4, 256))[0]
    seq = torch.empty(0, dtype=torch.int32)
    arguments = (query, query, key, value, query, lse, seq, seq, 256, 256, 0.0, True, seq, seq)
    nbytes = cuda_scratch_nbytes(op, arguments, {}, (query, key, value))
    assert nbytes >= query.numel() * 4 + lse.numel() * 4
    shared = attention(keys=1)
    arguments = (query, query, *shared[1:], query, lse, seq, seq, 256, 256, 0.0, True, seq, seq)
    # Heads that share keys: gradients per query head first.
    assert cuda_scratch_nbytes(op, arguments, {}, (query, *shared[1:])) >= nbytes + 2 * query.numel() * 2 - 4096


def test_flash_attention_splits_keys_only_where_the_device_would_idle() -> None:
    op = aten._scaled_dot_product_flash_attention.default
    small = attention(rows=64)
    large = fakes(*[(16, 16, 2048, 64)] * 3, dtype=BF16)
    assert cuda_scratch_nbytes(op, tuple(small), {}, small[0]) > small[0].numel() * 4
    assert cuda_scratch_nbytes(op, tuple(large), {}, large[0]) < large[0].nbytes // 100


def test_an_odd_head_size_is_copied() -> None:
    op = aten._scaled_dot_product_flash_attention.default
    odd = fakes(*[(16, 16, 2048, 60)] * 3, dtype=BF16)
    assert cuda_scratch_nbytes(op, tuple(odd), {}, odd[0]) >= 3 * odd[0].numel() // 60 * 64 * 2


def test_only_cuda_segments_are_compiled_that_way() -> None:
    with FakeTensorMode():
        there = torch.empty(2, device="cuda:0")
    before = config.shape_padding, config.triton.autotune_pointwise, config.deterministic
    with steady_inductor([torch.zeros(2), 3, None]):
        assert (config.shape_padding, config.triton.autotune_pointwise, config.deterministic) == before
    with steady_inductor([torch.zeros(2), there]):
        assert (config.shape_padding, config.triton.autotune_pointwise, config.deterministic) == (False, False, True)
    assert (config.shape_padding, config.triton.autotune_pointwise, config.deterministic) == before


def test_what_a_user_has_set_that_measures_on_the_device_is_without_effect_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with FakeTensorMode():
        there = torch.empty(2, device="cuda:0")
    with config.patch({"max_autotune": True, "triton.cudagraphs": True}):
        for _ in range(2):
            with steady_inductor([there]):
                assert (config.max_autotune, config.triton.cudagraphs) == (False, False)
        assert config.max_autotune
    (record,) = caplog.records
    assert "options max_autotune, triton.cudagraphs are without effect" in record.getMessage()
    with steady_inductor([there]):
        pass
    assert len(caplog.records) == 1
