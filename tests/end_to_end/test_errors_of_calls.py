"""An error belongs to its call alone: whatever a call was refused, later calls that can be served are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import array, differences, weights
from optim_models import MLP, WIDTH
from torch import Tensor, nn

import chunkc

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

BUDGET_NBYTES = 400 * 1024
"""A training step of 16 rows fits it, and one of 99 does not."""

TINY_NBYTES = 4096

SIZES = (16, 99, 16, 8, 99, 3, 16)


class Normed(nn.Module):
    """Buffers that every call changes, and random numbers: what a refused call must not have touched."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm, self.dropout = nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (self.dropout(self.norm(x)) - 1).square().mean()


def build(kind: type[nn.Module] = MLP) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def compiled(model: nn.Module, *, dynamic: bool | None = None, **options: Any) -> Callable[..., Tensor]:
    options = {"memory_budget": BUDGET_NBYTES, "codegen": "eager", "whole_graph": "never"} | options
    return torch.compile(model, backend="chunkc", dynamic=dynamic, options=options)


def rows(num_rows: int) -> Tensor:
    return torch.randn(num_rows, WIDTH, generator=torch.Generator().manual_seed(num_rows))


def steps(
    model: nn.Module, call: Callable[..., Tensor], sizes: tuple[int, ...], left_out: tuple[int, ...] = ()
) -> list[Any]:
    """Loss and gradients of a step of each size; None where chunkc refused it, or where it is to be left out."""
    torch.manual_seed(7)
    found: list[Any] = []
    for size in sizes:
        if size in left_out:
            found.append(None)
            continue
        try:
            loss = call(rows(size))
            loss.backward()
            found.append([array(loss), [array(p.grad) for p in model.parameters() if p.grad is not None]])
        except chunkc.ChunkcError:
            found.append(None)
        model.zero_grad()
    return found


def assert_served(found: list[Any], expected: list[Any]) -> None:
    assert [x is None for x in found] == [x is None for x in expected]
    for of_call, of_plain in zip(found, expected):
        if of_plain is not None:
            assert of_call[0] == pytest.approx(of_plain[0], rel=1e-5)
            for gradient, plain in zip(of_call[1], of_plain[1], strict=True):
                assert np.all(np.abs(gradient - plain) <= np.maximum(1e-3 * np.abs(plain), 1e-6))


@pytest.mark.parametrize(
    ("kind", "sizes", "options"),
    [
        (Normed, SIZES, {}),
        (Normed, SIZES[1:], {"home": "disk"}),
        (MLP, SIZES[1:], {"dynamic": True, "whole_graph": "auto"}),
        pytest.param(Normed, SIZES, {"home": "disk"}, marks=pytest.mark.second_tier),
        pytest.param(Normed, SIZES[1:], {}, marks=pytest.mark.second_tier),
        pytest.param(
            MLP, [999 if n == 99 else n for n in SIZES], {"codegen": "inductor"}, marks=pytest.mark.second_tier
        ),
    ],
    ids=["later", "first, on a disk", "symbols", "later, on a disk", "first", "fused, so that 99 rows fit"],
)
def test_one_batch_that_does_not_fit(kind: type[nn.Module], sizes: tuple[int, ...], options: dict[str, Any]) -> None:
    """Whether the size that does not fit is the first one, or the one for which Dynamo makes sizes symbols."""
    model, plain = build(kind), build(kind)
    assert_served(steps(model, compiled(model, **options), sizes), steps(plain, plain, sizes, left_out=(99, 999)))
    for of in (model, plain) if kind is Normed else ():
        assert int(of.norm.num_batches_tracked) == len(sizes) - 2


def test_one_evaluation_that_does_not_fit() -> None:
    model, plain = build(), build()
    call = compiled(model)
    for size, fits in ((16, True), (999, False), (16, True), (8, True), (999, False), (12, True)):
        with torch.no_grad(), nullcontext() if fits else pytest.raises(chunkc.BudgetError):
            assert call(rows(size)).item() == pytest.approx(plain(rows(size)).item(), rel=1e-5)
    assert_served(steps(model, call, (16, 8)), steps(plain, plain, (16, 8)))


def test_errors_say_what_each_size_needs() -> None:
    model = build()
    call = compiled(model, memory_budget=TINY_NBYTES)
    needed = []
    for size in (16, 99, 99, 16, 8):
        with pytest.raises(chunkc.BudgetError) as error:
            call(rows(size))
        needed.append(error.value.minimum_nbytes)
    assert needed[0] == needed[3] > needed[4]
    assert needed[1] == needed[2] > needed[0]
    call = compiled(model, memory_budget=needed[0])
    for size in (16, 8):
        call(rows(size)).backward()
    with pytest.raises(chunkc.BudgetError):
        call(rows(99))


@pytest.mark.parametrize("home", ["nowhere", "cpu", "disk"])
def test_a_larger_budget_after_an_error(home: str) -> None:
    """The model is as it was, also if it was placed before."""
    model, plain = build(), build()
    if home != "nowhere":
        chunkc.place(model, home=home)
    before, addresses = weights(model), [p.data_ptr() for p in model.parameters()]
    for budget_nbytes in (TINY_NBYTES, BUDGET_NBYTES):
        call = compiled(model, memory_budget=budget_nbytes)
        for _ in range(2):  # a second call fails in the same way
            with pytest.raises(chunkc.BudgetError):
                call(rows(99))
        assert not differences(weights(model), before)
        assert [p.data_ptr() for p in model.parameters()] == addresses
        assert all(p.grad is None for p in model.parameters())
    assert_served(steps(model, compiled(model, memory_budget=2**24), (99, 16)), steps(plain, plain, (99, 16)))


def test_a_budget_that_is_too_small_leaves_the_former_one() -> None:
    model, plain = build(), build()
    call = compiled(model)
    found = steps(model, call, (16,))
    with pytest.raises(chunkc.BudgetError):
        compiled(model, memory_budget=TINY_NBYTES)(rows(16))
    assert chunkc.report(model).memory_budget_nbytes == BUDGET_NBYTES
    assert not differences(steps(model, call, (16,)), found)
    assert_served(found, steps(plain, plain, (16,)))


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_home_that_comes_later(dynamic: bool, tmp_path: Path) -> None:
    """The same compiled model works once its home does, although Dynamo keeps what was compiled at the first call."""
    model, plain = build(Normed), build(Normed)
    before = weights(model)
    call = compiled(model, dynamic=dynamic, home=f"disk:{tmp_path}/home", whole_graph="auto")
    for _ in range(2):
        with pytest.raises(chunkc.HomeError):
            call(rows(16))
    assert not differences(weights(model), before)
    (tmp_path / "home").mkdir()
    if dynamic:  # batch normalisation's momentum is a number that may be a symbol
        with pytest.raises(chunkc.UnsupportedError, match="reset"):
            call(rows(16))
        torch._dynamo.reset()
    assert_served(steps(model, call, (16, 8)), steps(plain, plain, (16, 8)))
    assert int(model.norm.num_batches_tracked) == 2


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_size_that_is_not_supported_is_refused_alone(dynamic: bool) -> None:
    """The operator's bytes are known of some sizes only."""

    def scratch(args: tuple[Tensor], *rest: Any) -> int:
        if args[0].shape[0] > 50:
            raise chunkc.UnsupportedError("nobody knows")
        return 0

    class Sorted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.chunkc_test.sized(self.body(x)).mean()

    with torch.library._scoped_library("chunkc_test", "FRAGMENT") as library:
        library.define("sized(Tensor x) -> Tensor")
        library.impl("sized", lambda x: x * 2, "CompositeExplicitAutograd")
        library.impl("sized", lambda x: torch.empty_like(x), "Meta")
        chunkc.declare_scratch("chunkc_test::sized", scratch)
        model, plain = build(Sorted), build(Sorted)
        call = compiled(model, dynamic=dynamic, memory_budget=2**24, whole_graph="auto")
        with torch.no_grad():
            for size in (99, 16, 99, 8):
                with pytest.raises(chunkc.UnsupportedError) if size == 99 else nullcontext():
                    assert torch.equal(call(rows(size)), plain(rows(size)))
