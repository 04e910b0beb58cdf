"""Compiled once with symbols for sizes: bytes of every moment, and results, at many sizes."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import sympy
import torch
import torch.nn.functional as F
from symbolic_runs import Subject, captured_of, holds
from torch import nn
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from chunkc.passes.codegen import describe_segment
from chunkc.passes.graphs.shapes import SymbolicShapes
from chunkc.passes.graphs.symbols import free_symbols, plain_symbol, region
from chunkc.passes.segments.segments import SegmentTable, extract
from chunkc.runtime.device import cpu_allocator


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
