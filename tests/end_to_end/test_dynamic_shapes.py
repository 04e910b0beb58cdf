"""Training with shapes that change: captured twice, then only planned, and exact at every shape; by Inductor compiled
once, for every shape and every budget the same bits.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from harness import HUGE, counted, segmented
from ladder import describe, inexact, resized, rungs
from memory_curves import curves_at
from plain_modules import Residual
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from zoo import LADDER, Case

import chunkc
from chunkc import backend
from chunkc import compile as compilation
from chunkc.passes import codegen
from chunkc.runtime.device import cpu_allocator
from chunkc.session import compiled_step as graph
from chunkc.tracing import build, steps

STATIC_AND_SYMBOLIC = 2
"""Captures: of the first shape, and of all others once Dynamo has seen a second."""

WIDTH = 64


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def two_models(kind: Callable[[], nn.Module] = Residual) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = kind()
    return model, copy.deepcopy(model)


def rows(num_rows: int) -> Tensor:
    return torch.randn(num_rows, 16, WIDTH, generator=torch.Generator().manual_seed(num_rows))


def same_bits(model: nn.Module, plain: nn.Module) -> bool:
    return all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


def train_alike(model: nn.Module, call: Any, plain: nn.Module, x: Tensor) -> None:
    """A step of both, the first by `call`: the same loss and gradients to the bit."""
    losses = []
    for module, run in ((model, call), (plain, plain)):
        module.zero_grad()
        losses.append(run(x))
        losses[-1].backward()
    assert torch.equal(*losses)
    assert same_bits(model, plain)


@pytest.mark.second_tier
@pytest.mark.parametrize(("budget", "whole_graph"), [(1_700_000, "never"), (HUGE, "auto")])
def test_new_shapes_are_planned_and_not_compiled(
    budget: int, whole_graph: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses and gradients are plain PyTorch's bits at every shape."""
    captures, compilations = (
        counted(monkeypatch, compilation, "capture_graph"),
        counted(monkeypatch, codegen, "EagerSegment"),
    )
    plans = counted(monkeypatch, graph, "step_plan")
    model, plain = two_models()
    options = {"codegen": "eager", "memory_budget": budget, "whole_graph": whole_graph, "activations": "keep"}
    call = torch.compile(model, backend="chunkc", options=options)
    after_two = 0
    for index, num_rows in enumerate((4, 6, 3, 8, 6, 5, 2, 7, 13 if budget == HUGE else 9, 3)):
        train_alike(model, call, plain, rows(num_rows))
        assert chunkc.report(model).predicted_peak_nbytes <= budget
        if index == 1:
            after_two = compilations.calls
    assert captures.calls == STATIC_AND_SYMBOLIC
    assert plans.calls >= 9, "every shape has a plan of its own"
    if whole_graph == "never":
        assert compilations.calls == after_two


@pytest.mark.second_tier
def test_old_shapes_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "MAX_SIZES", 2)
    model, plain = two_models()
    call = torch.compile(model, backend="chunkc", options={"codegen": "eager", "memory_budget": HUGE})
    for module in (call, plain):
        losses = [module(rows(n)) for n in (4, 6, 3, 7, 5)]
        for loss in losses:
            loss.backward()
    assert same_bits(model, plain)


SLOW = pytest.mark.slow


@pytest.mark.second_tier
@pytest.mark.parametrize("whole_graph", ["never", pytest.param("auto", marks=SLOW)])
@pytest.mark.parametrize(
    "name", rungs(("short_gpt", "encoder", "llama", "convnet", "lstm_cells", "dropout", "t5"), ("short_gpt",))
)
def test_every_operation_to_the_byte_at_every_shape(name: str, whole_graph: str) -> None:
    """The allocator's readings, operation by operation, equal what was predicted for that shape."""
    case: Case = LADDER[name]
    sizes = [(2, 16), (4, 24), (3, 17), (7, 31), (5, 8), (2, 32)]
    has_lengths = name in ("short_gpt", "llama", "t5")
    batches = [resized(case.batch(0), n, length if has_lengths else None) for n, length in sizes]
    for curves in curves_at(case, batches, whole_graph=whole_graph):
        assert [curve.phase for curve in curves] == ["forward", "backward"]
        for curve in curves:
            wrong = inexact(curve.moments)
            assert not wrong, describe(wrong)
            assert len(curve.moments) > 5


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect what the backend warns of."""
    found: list[str] = []
    monkeypatch.setattr(backend.logger, "warning", lambda text, *args: found.append(text % args))
    return found


@pytest.mark.second_tier
def test_a_graph_whose_sizes_cannot_be_read_is_compiled_by_shape(
    warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:

    def unreadable(*args: Any) -> None:
        raise chunkc.UnsupportedError("s0 cannot be read off the sizes of a call's arguments")

    monkeypatch.setattr(steps.SizeReader, "__init__", unreadable)
    model, plain = two_models()
    call = torch.compile(model, backend="chunkc", options={"codegen": "eager", "memory_budget": HUGE})
    for num_rows in (4, 6, 3):
        train_alike(model, call, plain, rows(num_rows))
    assert len(warnings) == 1
    assert "s0 cannot be read off" in warnings[0]


@pytest.mark.second_tier
def test_views_of_other_tensors_are_compiled_by_shape(warnings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What a view's storage takes, its sizes do not say: predicted for each shape, never guessed."""
    captures = counted(monkeypatch, compilation, "capture_graph")
    model, plain = two_models()
    call = torch.compile(model, backend="chunkc", options={"codegen": "eager", "memory_budget": HUGE})
    for num_rows in (4, 6, 3, 5):
        train_alike(model, call, plain, rows(num_rows)[:, :-1])
    assert any("is a view of a larger tensor" in warning for warning in warnings)
    assert captures.calls >= 4


NUM_BLOCKS = 4


class Apart(nn.Sequential):
    """Dynamo enters its own forward, and PyTorch's classes never by themselves."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class BlocksApart(Residual):
    """Between blocks Dynamo breaks the graph, so that they share one."""

    def __init__(self) -> None:
        super().__init__(NUM_BLOCKS, Apart)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
            torch._dynamo.graph_break()
        return x.square().mean()


@pytest.mark.second_tier
def test_modules_that_share_a_graph_are_compiled_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses and gradients are plain PyTorch's bits at every shape."""
    captures = counted(monkeypatch, compilation, "capture_graph")
    model, plain = two_models(BlocksApart)
    call = segmented(model, 1_840_000)
    after_two = 0
    for index, num_rows in enumerate((4, 6, 3, 8, 5, 4)):
        train_alike(model, call, plain, rows(num_rows))
        if index == 1:
            after_two = captures.calls
    assert captures.calls == after_two >= NUM_BLOCKS


@pytest.mark.second_tier
def test_a_shared_graph_that_turns_out_valid_for_fewer_sizes_is_compiled_by_shape(
    warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempt that is given up has placed and owned the parameters already."""

    @contextmanager
    def guarded(env: ShapeEnv) -> Iterator[None]:
        yield
        raise compilation.NotForAnyShapes from chunkc.UnsupportedError("two sizes must be equal")

    monkeypatch.setattr(backend, "_no_more_guards", guarded)
    model, plain = two_models(BlocksApart)
    call = segmented(model, 1_840_000)
    for num_rows in (4, 6, 3, 8, 3):
        train_alike(model, call, plain, rows(num_rows))
        assert chunkc.report(model).predicted_peak_nbytes <= 1_840_000
    assert [warning for warning in warnings if "two sizes must be equal" in warning]


class Tokens(Residual):
    """A parameter is repeated for every row of the batch, so that its view has the batch's size."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.cat([self.token.expand(len(x), -1, -1), x], dim=1))


@pytest.mark.second_tier
def test_views_of_parameters_have_sizes_in_symbols(monkeypatch: pytest.MonkeyPatch) -> None:
    captures = counted(monkeypatch, compilation, "capture_graph")
    model, plain = two_models(Tokens)
    call = segmented(model, 1_700_000)
    for num_rows in (4, 6, 3, 8):
        train_alike(model, call, plain, rows(num_rows))
    assert captures.calls == STATIC_AND_SYMBOLIC


# ---------------------------------------------------------------- by Inductor

WIDTH = 64
SHAPES = [(8, 9), (7, 11), (8, 16), (3, 31), (9, 10), (7, 11)]
"""Of more than 4096 numbers and fewer than 4096 rows: Inductor's loops for sums are others beyond."""


def marked(shape: tuple[int, int]) -> Tensor:
    found = torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(sum(shape)))
    for dim in (0, 1):
        torch._dynamo.mark_dynamic(found, dim)
    return found


def train(budget: int, limited: bool) -> tuple[list[Tensor], nn.Module]:
    """Losses and gradients at every shape; inside a hard limit from the second step on, when all is compiled."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    cpu_allocator.install()
    gc.collect()
    foreign = cpu_allocator.current_nbytes()
    model = Residual(2)
    options = {"codegen": "inductor", "memory_budget": budget}
    call = torch.compile(model, backend="chunkc", options=options)
    found: list[Tensor] = []
    for index, shape in enumerate(SHAPES):
        gc.collect()
        kept = sum(t.untyped_storage().nbytes() for t in found)
        with cpu_allocator.hard_limit(foreign + kept + budget if limited and index else None):
            loss = call(marked(shape))
            loss.backward()
            loss = loss.detach()
        found.append(loss)
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
    return found, model


@pytest.mark.second_tier
def test_compiled_once_and_planned_for_every_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    captures = counted(monkeypatch, compilation, "capture_graph")
    compilations = counted(monkeypatch, codegen, "compile_fx_inner")
    descriptions = counted(monkeypatch, build, "generated_wrapper")
    free, model = train(1 << 30, limited=False)
    predicted = chunkc.report(model).predicted_peak_nbytes
    assert captures.calls == 1
    once = compilations.calls
    assert once > 0
    tight, model = train(predicted * 3 // 4, limited=True)
    assert chunkc.report(model).predicted_peak_nbytes <= predicted * 3 // 4
    assert captures.calls == 2
    assert compilations.calls == 2 * once
    assert descriptions.calls == 0, "a wrapper is read again at other sizes, not generated again"
    assert len(free) == len(tight)
    assert all(torch.equal(a, b) for a, b in zip(free, tight)), "the budget changes no bit"
    torch.manual_seed(0)
    plain = Residual(2)
    for shape, loss in zip(SHAPES, free[:: len(free) // len(SHAPES)]):
        torch.testing.assert_close(plain(marked(shape)).detach(), loss)


def test_sizes_are_known_where_nobody_asserts_them() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    plain = Residual(2)
    call = torch.compile(copy.deepcopy(plain), backend="chunkc", options={"codegen": "inductor"})
    with torch._inductor.config.patch(size_asserts=False):
        for shape in SHAPES[:2]:
            torch.testing.assert_close(call(marked(shape)), plain(marked(shape)))
