"""Training with shapes that change, compiled by Inductor: once, for every shape and every budget the same bits."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator

import pytest
import torch
from harness import counted
from plain_modules import Residual
from torch import Tensor, nn

import chunkc
from chunkc import compile as compilation
from chunkc.passes import codegen
from chunkc.runtime.device import cpu_allocator
from chunkc.tracing import build

WIDTH = 64
SHAPES = [(8, 9), (7, 11), (8, 16), (3, 31), (9, 10), (7, 11)]
"""Of more than 4096 numbers and fewer than 4096 rows: Inductor's loops for sums are others beyond."""


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    cpu_allocator.install()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def rows(shape: tuple[int, int]) -> Tensor:
    found = torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(sum(shape)))
    for dim in (0, 1):
        torch._dynamo.mark_dynamic(found, dim)
    return found


def train(budget: int, limited: bool) -> tuple[list[Tensor], nn.Module]:
    """Losses and gradients at every shape; inside a hard limit from the second step on, when all is compiled."""
    torch.manual_seed(0)
    torch._dynamo.reset()
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
            loss = call(rows(shape))
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
        torch.testing.assert_close(plain(rows(shape)).detach(), loss)


def test_sizes_are_known_where_nobody_asserts_them() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    plain = Residual(2)
    call = torch.compile(copy.deepcopy(plain), backend="chunkc", options={"codegen": "inductor"})
    with torch._inductor.config.patch(size_asserts=False):
        for shape in SHAPES[:2]:
            torch.testing.assert_close(call(rows(shape)), plain(rows(shape)))
