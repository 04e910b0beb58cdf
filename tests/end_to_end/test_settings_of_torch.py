"""Settings of PyTorch's own, and parameters and gradients that lie in memory in odd ways: as in plain PyTorch, or
refused before anything changes.

Sessions know parameters by weak references, with which PyTorch swaps no tensors. A default device is for the user's own
tensors: what chunkc makes is where it has to be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import array, differences, gradients, take_step, weights
from optim_models import BUDGET_NBYTES, MLP, backward, batch, build
from torch import Tensor, nn

import chunkc
from chunkc.optim.states import names_at_home

SMALL, LARGE = 400 * 1024, 64 * 2**20


@pytest.fixture
def _swapping(fresh_dynamo: None) -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def _converted(model: MLP) -> None:
    model.to(torch.bfloat16)


def _loaded(model: MLP) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


def _assigned(model: MLP) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()}, assign=True)


@pytest.mark.usefixtures("_swapping")
@pytest.mark.parametrize("budget_nbytes", [SMALL, LARGE])
@pytest.mark.parametrize("change", [_converted, _assigned])
def test_swapped_parameters_are_refused_before_anything_changes(
    change: Callable[[MLP], None], budget_nbytes: int
) -> None:
    model, call = build("adopted", memory_budget=budget_nbytes)
    backward(call, 0)
    before = [weights(model), gradients(model), [p.data_ptr() for p in model.parameters()]]
    with pytest.raises(RuntimeError, match="swap"):
        change(model)
    assert not differences([weights(model), gradients(model), [p.data_ptr() for p in model.parameters()]], before)
    model.zero_grad()
    backward(call, 0)  # and it works on
    assert not differences(gradients(model), before[1])


@pytest.mark.usefixtures("_swapping")
@pytest.mark.parametrize("budget_nbytes", [SMALL, LARGE])
def test_values_are_loaded_where_they_are(budget_nbytes: int) -> None:
    """PyTorch copies loaded values before it swaps, and complains after that; without swapping it is content."""
    model, call = build("adopted", memory_budget=budget_nbytes)
    backward(call, 0)
    halves = [array(p) * 0.5 for p in model.parameters()]
    with pytest.raises(RuntimeError, match="swap"):
        _loaded(model)
    assert not differences([array(p) for p in model.parameters()], halves)
    torch.__future__.set_swap_module_params_on_conversion(False)
    _loaded(model)
    assert not differences([array(p) for p in model.parameters()], [half * 0.5 for half in halves])


# ---------------------------------------------------------------- a default device

BATCHES = [batch(step) for step in range(3)]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: chunkc.optim.AdamW(parameters, lr=1e-2),
    "int8": lambda parameters: chunkc.optim.AdamW(parameters, lr=1e-2, moments_dtype="int8"),
    "lamb": lambda parameters: chunkc.optim.LAMB(parameters, lr=1e-2),
    "torch": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
}


def trained(optimizer_name: str, default: str, home: str) -> list[Any]:
    """Losses, and the weights at the end, of two steps, a state saved and loaded again, and a third step."""
    torch._dynamo.reset()
    model, call = build("adopted", home=home, memory_budget=BUDGET_NBYTES)
    losses = []
    with torch.device(default):
        optimizer = OPTIMIZERS[optimizer_name](model.parameters())
        for step, x in enumerate(BATCHES):
            loss = call(x)
            take_step(loss, optimizer)
            losses.append(array(loss))
            if step == 1:
                optimizer.load_state_dict(optimizer.state_dict())
                model.load_state_dict(model.state_dict())
    return [losses, weights(model)]


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("optimizer_name", "home"), [("adamw", "cpu"), ("int8", "disk"), ("lamb", "cpu"), ("torch", "disk")]
)
def test_a_default_device_changes_nothing(optimizer_name: str, home: str, tmp_path: Path) -> None:
    if home == "disk":
        home = f"disk:{tmp_path}"
    expected = trained(optimizer_name, "cpu", home)
    assert not differences(trained(optimizer_name, "meta", home), expected)


# ---------------------------------------------------------------- parameters that lie in memory in odd ways

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


def run(call: Callable, step: int) -> Tensor:
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
        assert torch.equal(run(call, step), run(twin_call, step))
        assert_same_gradients(model, shadow)
    assert bool(names_at_home(model.parameters())) == (budget == BUDGETS[0])


@pytest.mark.parametrize("budget", BUDGETS)
def test_what_cannot_be_updated_is_named(budget: str) -> None:
    model, call, *_ = compiled(Expanded, budget)
    optimizer = chunkc.optim.AdamW(model.parameters())
    run(call, 0)
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
        torch.testing.assert_close(run(call, step), run(twin_call, step), rtol=0, atol=1e-5)
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
