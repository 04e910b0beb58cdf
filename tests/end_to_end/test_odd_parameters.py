"""Parameters and gradients that lie in memory in odd ways, in a compiled model: as with the backend `aot_eager`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import chunkc
from chunkc.optim.states import names_at_home

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

WIDTH = 64
BUDGETS = ["260KiB", "100MiB"]
SETTINGS = {"lr": 1e-2, "weight_decay": 0.1}


class Odd(nn.Module):
    """Layers that move under a small budget, and parameters that cannot."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.base = torch.randn(WIDTH, 100)
        self.columns = nn.Parameter(self.base[:, :WIDTH])
        self.gaps = nn.Parameter(torch.randn(2 * WIDTH, WIDTH).t()[:, ::2])
        self.nothing = nn.Parameter(torch.randn(WIDTH, 0))
        self.number = nn.Parameter(torch.tensor(2.0))
        self.one, self.other = (nn.Parameter(half) for half in torch.randn(2 * WIDTH).chunk(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        x = x @ self.columns * self.number + x @ self.gaps + self.one * self.other
        return torch.cat([x, x @ self.nothing], 1).square().mean()


class Expanded(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.columns = nn.Parameter(torch.randn(1, WIDTH).expand(WIDTH, WIDTH))


def compiled(kind: type[Odd], budget: str) -> tuple[Odd, Callable, Odd, Callable]:
    """The model and its twin, with what to call of each."""
    options = {"codegen": "eager", "memory_budget": budget, "whole_graph": "never", "chunk_size": 16384}
    model, shadow = kind(), kind()
    call, twin_call = (
        torch.compile(model, backend="chunkc", options=options),
        torch.compile(shadow, backend="aot_eager"),
    )
    return model, call, shadow, twin_call


def backward(call: Callable, step: int) -> Tensor:
    loss = call(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)))
    loss.backward()
    return loss


def assert_same_gradients(model: nn.Module, shadow: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), shadow.parameters()):
        mine, its = p.grad, q.grad
        assert torch.equal(mine, its), name
        assert mine.stride() == its.stride(), name


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("kind", [Odd, Expanded])
def test_gradients_are_those_of_autograd(kind: type[Odd], budget: str) -> None:
    model, call, shadow, twin_call = compiled(kind, budget)
    for step in range(3):  # later ones are added
        assert torch.equal(backward(call, step), backward(twin_call, step))
        assert_same_gradients(model, shadow)
    assert bool(names_at_home(model.parameters())) == (budget == BUDGETS[0])


@pytest.mark.parametrize("budget", BUDGETS)
def test_what_cannot_be_updated_is_named(budget: str) -> None:
    model, call, *_ = compiled(Expanded, budget)
    optimizer = chunkc.optim.AdamW(model.parameters())
    backward(call, 0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(chunkc.UnsupportedError, match="the parameter columns of shape"):
        optimizer.step()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def none(model: Odd) -> None:
    assert all(p.grad is not None for p in model.parameters())


def one_for_all(model: Odd) -> None:
    shared = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(7))
    for p in (model.layers[0].weight, model.layers[1].weight, model.columns):
        p.grad = shared


def expanded(model: Odd) -> None:
    row = torch.randn(WIDTH, generator=torch.Generator().manual_seed(7))
    for p in (model.layers[0].weight, model.columns, model.gaps):
        p.grad = row.expand(WIDTH, WIDTH)
    model.one.grad = row


def transposed(model: Odd) -> None:
    for p in (model.layers[0].weight, model.columns):
        p.grad = p.grad.clone().t()


def transposed_in_place(model: Odd) -> None:
    for p in (model.layers[0].weight, model.columns):
        p.grad = p.grad.t()


def own(model: Odd) -> None:
    for p in (model.layers[0].weight, model.columns):
        p.grad = p.detach()


@pytest.mark.quick(6)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("give", [none, one_for_all, expanded, transposed, transposed_in_place, own])
def test_steps_are_those_of_torch_with_whatever_gradients_the_user_gives(give: Callable, budget: str) -> None:
    model, call, shadow, twin_call = compiled(Odd, budget)
    optimizer = chunkc.optim.AdamW(model.parameters(), **SETTINGS)
    twin_optimizer = torch.optim.AdamW(shadow.parameters(), **SETTINGS)
    for step in range(3):
        torch.testing.assert_close(backward(call, step), backward(twin_call, step), rtol=0, atol=1e-5)
        give(model)
        give(shadow)
        for of in (optimizer, twin_optimizer):
            of.step()
        for (name, p), q in zip(model.named_parameters(), shadow.parameters()):
            torch.testing.assert_close(p, q, rtol=0, atol=1e-5, msg=name)
        for of in (optimizer, twin_optimizer):
            of.zero_grad()
    torch.testing.assert_close(model.base, shadow.base, rtol=0, atol=1e-5)
    assert torch.equal(model.base[:, WIDTH:], Odd().base[:, WIDTH:])


class Showing(nn.Module):
    """Returns views of parameters, too: of a weight, and of a bias that is too small to move."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        loss = self.second(torch.tanh(self.first(x))).square().mean()
        return loss, self.first.weight.t(), self.second.bias[: WIDTH // 2]


@pytest.mark.parametrize("chunk_size", [4096, WIDTH * WIDTH * 4])
@pytest.mark.parametrize("tied", ["untied", "tied", "transposed"])
def test_views_of_parameters_that_stay_are_returned(tied: str, chunk_size: int) -> None:
    """Weights tied through `.data` stay, and so does what is small."""

    def train(**compiled_by: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = Showing()
        if tied != "untied":
            data = model.first.weight.data
            model.second.weight.data = data if tied == "tied" else data.t()
        call, found = torch.compile(model, **compiled_by), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            loss, *views = call(torch.full((2, WIDTH), 0.1 * step))
            loss.backward()
            optimizer.step()  # which the views show
            optimizer.zero_grad()
            assert torch.equal(views[0], model.first.weight.t())
            found += [loss.detach(), *(view.detach().clone() for view in views)]
        return [*found, *(p.detach().clone() for p in model.parameters())]

    options = {"memory_budget": "16MiB", "codegen": "eager", "whole_graph": "never", "chunk_size": chunk_size}
    expected, found = train(backend="aot_eager"), train(backend="chunkc", options=options)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))
