"""What an optimizer updates outside of the plan is said once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from harness import HUGE, take_step
from torch import nn

import chunkc


@torch.compiler.disable
def looked_up(words: nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
    return words(ids)


class Reader(nn.Module):
    """Words are looked up by eager code, or by the graph."""

    def __init__(self, *, eager: bool) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(64, 32), nn.Linear(32, 32)
        self.look_up = looked_up if eager else nn.Embedding.__call__

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.look_up(self.words, ids))


def said_of(
    model: nn.Module, call: Callable[..., Any], optimizer: type, caplog: pytest.LogCaptureFixture, x: Any = None
) -> list[str]:
    """What is said in three steps about what is in no budget."""
    chosen = optimizer(model.parameters(), lr=0.1)
    for _ in range(3):
        out = call(torch.randn(4, 8) if x is None else x)
        take_step((out[0] if isinstance(out, tuple) else out).square().mean(), chosen)
    return [record.getMessage() for record in caplog.records if "outside of the memory budget" in record.getMessage()]


@pytest.mark.parametrize("optimizer", [chunkc.optim.SGD, torch.optim.SGD])
def test_parameters_that_no_graph_takes_are_named_once(caplog: pytest.LogCaptureFixture, optimizer: type) -> None:
    for eager, frozen in ((True, False), (False, False), (True, True)):
        torch._dynamo.reset()
        caplog.clear()
        model = Reader(eager=eager)
        model.words.requires_grad_(not frozen)
        call = torch.compile(model, backend="chunkc", options={"memory_budget": HUGE, "codegen": "eager"})
        said = said_of(model, call, optimizer, caplog, torch.arange(8))
        named = "no compiled graph trains words.weight: 8.00 KiB (8,192 bytes) of parameters are outside"
        assert [message.startswith(named) for message in said] == [True] * (eager and not frozen)


# ---------------------------------------------------------------- modules of which nothing is compiled

OPTIONS = {"memory_budget": 1, "codegen": "eager"}


class Dropped(nn.Module):
    """A branch on a random number in a loop: Dynamo gives up on the function, and its layers are of `torch.nn`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.training and torch.rand(()) < -1:
                continue
            x = layer(x)
        return x


class Routed(nn.Module):
    """Experts chosen by `nonzero()`."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 2), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        p, k = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (k == number).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(x[rows]) * p[rows, None])
        return out


class Loop:
    """A training loop of the user's, no module."""

    def __init__(self, model: nn.Module) -> None:
        self.models = {"net": model}

    def __call__(self, x: torch.Tensor) -> Any:
        return self.step(x)

    def step(self, x: torch.Tensor) -> Any:
        return self.models["net"](x)


class Slotted:
    """A training loop without a `__dict__`, to which nothing can refer weakly."""

    __slots__ = ("model", "unset")

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, x: torch.Tensor) -> Any:
        return self.model(x)


def compiled(given: Any) -> Any:
    return torch.compile(given, backend="chunkc", options=OPTIONS)


def compiled_in_place(model: nn.Module) -> Any:
    model.compile(backend="chunkc", options=OPTIONS)
    return model


WAYS: dict[str, Callable[[nn.Module], Callable[..., Any]]] = {
    "around": compiled,
    "in place": compiled_in_place,
    "in a function": lambda model: compiled(lambda x: model(x)),
    "given to a function": lambda model: partial(compiled(lambda module, x: module(x)), model),
    "among arguments": lambda model: partial(compiled(lambda parts, x: parts["net"][0](x)), {"net": [model]}),
    "a method": lambda model: compiled(Loop(model).step),
    "an object": lambda model: compiled(Loop(model)),
    "an object with slots": lambda model: compiled(Slotted(model)),
    "a partial function": lambda model: compiled(partial(lambda net, x: net(x), model)),
    "a partial method": lambda model: compiled(partial(Loop(model).step)),
    "a method of a module": lambda model: compiled(model.forward),
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "LSTM (weight_ih_l0, ...)": lambda: nn.LSTM(8, 8),
    "Sequential (0.weight, ...)": lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None)),
    "Dropped (layers.0.weight, ...)": Dropped,
    "Routed (gate.weight, ...)": Routed,
}


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("optimizer", [chunkc.optim.SGD, torch.optim.SGD])
@pytest.mark.parametrize(
    ("name", "way"),
    [
        *((name, way) for name in MODELS for way in list(WAYS)[:4]),
        *((next(iter(MODELS)), way) for way in list(WAYS)[4:]),
    ],
)
def test_a_module_of_which_nothing_is_compiled_is_named_once(
    name: str, way: str, optimizer: type, caplog: pytest.LogCaptureFixture
) -> None:
    model = MODELS[name]()
    (said,) = said_of(model, WAYS[way](model), optimizer, caplog)
    assert said.startswith(f"no graph of {name} is compiled: ")
    assert f"({sum(p.nbytes for p in model.parameters()):,} bytes)" in said or "bytes of parameters" in said
    assert "TORCH_LOGS=graph_breaks" in said


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("ignore:.*record_function")
@pytest.mark.parametrize("optimizer", [chunkc.optim.SGD, torch.optim.SGD])
@pytest.mark.parametrize(("kind", "named"), [(nn.LSTM, True), (nn.Linear, False)])
def test_a_whole_compiled_step_is_looked_at_as_it_is_traced(
    kind: type[nn.Module], named: bool, optimizer: type, caplog: pytest.LogCaptureFixture
) -> None:
    """Dynamo traces the optimizer's hooks into the step, and none of them runs."""
    model = kind(8, 8)
    chosen = optimizer(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        out = model(x)
        loss = (out[0] if isinstance(out, tuple) else out).square().mean()
        loss.backward()
        chosen.step()
        chosen.zero_grad()
        return loss

    call = torch.compile(step, backend="chunkc", options=OPTIONS | {"memory_budget": HUGE})
    losses = [call(torch.ones(4, 8)).item() for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]
    said = [record.getMessage() for record in caplog.records if "outside of the memory budget" in record.getMessage()]
    assert [message.startswith("no graph of LSTM (weight_ih_l0, ...) is compiled: ") for message in said] == [
        True
    ] * named


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_graph_that_only_evaluates_trains_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Layers are dropped in training alone, and an evaluation comes first."""
    model = Dropped()
    call = torch.compile(model, backend="chunkc", options=OPTIONS | {"memory_budget": HUGE})
    model.eval()
    with torch.no_grad():
        call(torch.randn(4, 8))
    assert chunkc.report(model).num_instructions > 0
    model.train()
    (said,) = said_of(model, call, chunkc.optim.SGD, caplog)
    assert said.startswith("no training graph of Dropped (layers.0.weight, ...) is compiled: ")


@pytest.mark.usefixtures("fresh_dynamo")
def test_several_are_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Blocks compiled in place, as others do: the warning names the largest."""
    model = nn.Sequential(*(nn.LSTM(8, 8) for _ in range(3)), nn.Linear(8, 8))
    for block in model:
        block.compile(backend="chunkc", options=OPTIONS | {"memory_budget": HUGE})

    def call(x: torch.Tensor) -> torch.Tensor:
        for block in list(model)[:3]:
            x, _ = block(x)
        return model[3](x)

    (said,) = said_of(model, call, chunkc.optim.SGD, caplog)
    assert "no graph of LSTM (weight_ih_l0, ...) and of 2 more modules is compiled: 6.75 KiB" in said
    assert chunkc.report(model[3]).num_instructions > 0  # and what can be compiled is


@pytest.mark.usefixtures("fresh_dynamo")
def test_other_backends_and_modules_that_are_not_trained_are_not_chunkc_s(caplog: pytest.LogCaptureFixture) -> None:
    teacher, other, plain = nn.LSTM(8, 8), nn.LSTM(8, 8), nn.LSTM(8, 8)
    calls = [
        torch.compile(teacher, backend="chunkc", options=OPTIONS),
        torch.compile(other, backend="aot_eager"),
        plain,
    ]
    optimizer = torch.optim.SGD([*other.parameters(), *plain.parameters()], lr=0.1)
    take_step(sum(call(torch.randn(4, 8))[0].square().mean() for call in calls), optimizer)
    assert not caplog.records
