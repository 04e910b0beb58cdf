"""Operators described in symbols take what they take at any sizes that the conditions allow. Expressions evaluated
together are what each of them is.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves
from torch.utils._sympy.functions import FloatTrueDiv, FloorDiv, Max, Mod, ToFloat

from chunkc.ir.program import SegmentMemory
from chunkc.passes.graphs.expressions import Expressions, compiled
from chunkc.passes.graphs.graphs import placeholders
from chunkc.passes.graphs.shapes import ShapesAt, SymbolicShapes, is_number, numbers_first, symbol_values
from chunkc.passes.memory.segment_memory import eager_memory

aten = torch.ops.aten
THREADS = 4


def attention(x: Tensor) -> Tensor:
    heads = x.view(2, -1, 2, 8).transpose(1, 2)
    return aten._scaled_dot_product_flash_attention_for_cpu(heads, heads, heads)[0]


def convolution(x: Tensor) -> Tensor:
    """A backward in bfloat16: as many images as rows, of 16 channels and 8 times 8 pixels."""
    images = x.bfloat16().view(-1, 1, 4, 4).repeat(1, 16, 2, 2)
    filters = x.new_zeros((32, 16, 3, 3), dtype=torch.bfloat16)
    how = ([2, 2], [1, 1], [1, 1], False, [0, 0], 1)
    grad = aten.convolution.default(images, filters, None, *how)
    return aten.convolution_backward.default(grad, images, filters, None, *how, [True, True, False])[1]


FUNCTIONS: dict[str, Callable[[Tensor], object]] = {
    "attention": attention,
    "convolution": convolution,
    "bfloat16": lambda x: x.bfloat16() @ x.bfloat16().t(),
    "everything": lambda x: aten.sum.dim_IntList(x, [0, 1]),
    "transposed": lambda x: aten.native_layer_norm(x.t().contiguous().t(), [16], None, None, 1e-5),
    "block": lambda x: x.t().clone(memory_format=torch.contiguous_format),
    "norm": lambda x: aten.native_group_norm(x.view(2, 4, -1), None, None, 2, 4, x.shape[0] * 2, 2, 1e-5),
    "cast": lambda x: x.half() * x.shape[0] + x,
    "sort": lambda x: torch.sort(x, dim=0),
    "logsumexp": lambda x: torch.logsumexp(x, 0),
}


def traced(name: str, num_rows: int, mode: str) -> fx.GraphModule:
    return make_fx(lambda x: tuple(tree_leaves(FUNCTIONS[name](x))), tracing_mode=mode)(torch.zeros(num_rows, 16))


def values(graph: fx.Graph, num_rows: int) -> dict[sympy.Symbol, int]:
    """What the symbols of a graph that was traced with 6 rows stand for with others; both lengths are symbols."""
    known = symbol_values(node.meta["val"] for node in placeholders(graph))
    return {symbol: num_rows if length == 6 else length for symbol, length in known.items()}


def evaluated(memory: SegmentMemory, at: dict[sympy.Symbol, int]) -> SegmentMemory:
    return memory.with_sizes(lambda size: int(sympy.sympify(size).subs(at)))


@pytest.mark.parametrize("name", ["everything", "bfloat16", "block", "convolution"])
@settings(max_examples=2, deadline=None)
@given(small=st.integers(1, 40), large=st.integers(41, 3000))
def test_as_at_the_size(name: str, small: int, large: int) -> None:
    """Described at an even number of rows, evaluated at others: right wherever the conditions hold."""
    graph = traced(name, 6, "symbolic").graph
    for described in (2 * small, 2 * large):
        shapes = SymbolicShapes(values(graph, described))
        memory = eager_memory(graph, THREADS, shapes)
        holds = compiled(shapes.conditions, list(values(graph, 6)))
        assert all(holds(values(graph, described)))
        for num_rows in (described, described + 2, 2 * small, 2 * large):
            at = values(graph, num_rows)
            exact = eager_memory(graph, THREADS, ShapesAt(at))
            if all(holds(at)):
                assert evaluated(memory, at) == exact


@pytest.mark.parametrize("name", FUNCTIONS)
def test_as_traced_at_the_size(name: str) -> None:
    graph = traced(name, 6, "symbolic").graph
    for num_rows in (4, 30, 2048):
        expected = eager_memory(traced(name, num_rows, "fake").graph, THREADS)
        found = eager_memory(graph, THREADS, ShapesAt(values(graph, num_rows)))
        assert [(s.op, s.nbytes) for s in found.steps] == [(s.op, s.nbytes) for s in expected.steps]
        assert found.storage_nbytes == expected.storage_nbytes


def test_conditions_tell_branches_apart() -> None:
    """From 32768 elements on, each thread has a partial sum."""
    graph = traced("everything", 6, "symbolic").graph
    shapes = SymbolicShapes(values(graph, 6))
    eager_memory(graph, THREADS, shapes)
    holds = compiled(shapes.conditions, list(values(graph, 6)))
    assert [all(holds(values(graph, n))) for n in (2, 2047, 2048, 9999)] == [True, True, False, False]


def test_describing_leaves_the_traced_guards_alone() -> None:
    module = traced("transposed", 6, "symbolic")
    env = placeholders(module.graph)[0].meta["val"].fake_mode.shape_env
    before = len(env.guards)
    eager_memory(module.graph, THREADS, SymbolicShapes(symbol_values([placeholders(module.graph)[0].meta["val"]])))
    assert len(env.guards) == before


def test_numbers_come_first() -> None:
    module = make_fx(lambda x, y: (x.relu().view(-1), y.view(y.shape[0] * 16)), tracing_mode="symbolic")(
        torch.zeros(6, 16), torch.zeros(5, 16)
    )
    sizes = [node for node in module.graph.nodes if is_number(node)]
    x = torch.zeros(6, 16)
    before = module(x, torch.ones(5, 16))
    numbers_first(module.graph)
    module.recompile()
    module.graph.lint()
    assert sizes
    for left, right in zip(before, module(x, torch.ones(5, 16)), strict=True):
        assert torch.equal(left, right)


# ---------------------------------------------------------------- expressions

A, B = sympy.symbols("a b", integer=True, positive=True)
SIZES = [
    0,
    7,
    A,
    3 * A * (B + 2),
    A**2 * B - 5 * A,
    FloorDiv(A + 63, 64) * 64 * B,
    4 * Max(A, B) + Mod(B, 3),
    B * FloorDiv(A, 7) + B * FloorDiv(A, 7) * A,
]
numbers = st.integers(1, 10**5)


@given(numbers, numbers)
def test_values(a: int, b: int) -> None:
    at = {A: a, B: b}
    found = Expressions(SIZES, [A, B]).at(at)
    assert found == [int(sympy.sympify(size).subs(at)) for size in SIZES]
    assert all(type(size) is int for size in found)


def test_rows_are_the_expressions() -> None:
    known = Expressions(SIZES, [A, B])
    for size, row in zip(SIZES, known.rows, strict=True):
        assert sympy.expand(size - known.expression(row)) == 0


def test_terms_are_shared() -> None:
    assert len(Expressions([k * A * B + k for k in range(1, 100)], [A, B]).terms) == 2


@given(numbers, st.floats(1.0, 1e15))
def test_floats_are_pythons(a: int, rate: float) -> None:
    """Divided as Python divides, to the last bit."""
    seconds = FloatTrueDiv(ToFloat(3 * A), sympy.Float(rate))
    assert compiled([seconds], [A])({A: a}) == (3 * a / rate,)


def test_conditions() -> None:
    holds = compiled([sympy.Lt(A, 10), sympy.Ne(A, 4), sympy.Eq(Mod(A, 2), 0)], [A])
    assert [a for a in range(12) if all(holds({A: a}))] == [0, 2, 6, 8]


def test_parts_of_a_byte_are_refused() -> None:
    with pytest.raises(AssertionError, match="no number of bytes"):
        Expressions([A / 2], [A])
