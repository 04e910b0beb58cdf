"""Wrappers with symbols for sizes, replayed in symbols and at plain sizes: the same bytes, and no guard of Dynamo's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import sympy
import torch
from cuda_wrappers import SYMBOLIC
from symbolic_runs import Values, evaluated, holds
from torch._dynamo.source import LocalSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from chunkc.ir.errors import UnsupportedError
from chunkc.ir.program import SegmentMemory
from chunkc.passes.graphs.shapes import ShapesAt, SymbolicShapes
from chunkc.passes.memory.inductor.memory import inductor_memory

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
