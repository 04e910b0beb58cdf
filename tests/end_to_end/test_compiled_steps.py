"""A whole training step compiled by chunkc, and parts of it: Dynamo breaks it apart, and what comes out is right."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import array, differences, weights
from optim_models import MLP, batch
from torch import Tensor, nn

import chunkc

pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), pytest.mark.filterwarnings("ignore:Lazily|.*record_function")]

SMALL = 400 * 1024
"""Bytes: a budget in which no weight stays on the compute tier."""

Compile = Callable[..., Any]
Optimizer = torch.optim.Optimizer
Step = Callable[[Tensor], Tensor]


def _plain(function: Any) -> Any:
    return function


def _aot_eager(function: Any) -> Any:
    return torch.compile(function, backend="aot_eager")


def _by_chunkc(**options: Any) -> Compile:
    options = {"codegen": "eager", "whole_graph": "never"} | options
    return lambda function: torch.compile(function, backend="chunkc", options=options)


def _chunked(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return chunkc.optim.AdamW(parameters, lr=1e-2)


def _torch_s(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, foreach=False)


# ---------------------------------------------------------------- steps


def _whole(model: MLP, optimizer: Optimizer, compiled: Compile) -> Step:
    def step(x: Tensor) -> Tensor:
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return compiled(step)


def _with_a_compiled_model(model: MLP, optimizer: Optimizer, compiled: Compile) -> Step:
    return _whole(compiled(model), optimizer, compiled)


def _clipped_and_averaged(model: MLP, optimizer: Optimizer, compiled: Compile) -> Step:
    """Two forwards before an update, gradients clipped, a schedule, and a moving average."""
    average = MLP()
    average.load_state_dict(model.state_dict())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    @compiled
    def step(x: Tensor) -> Tensor:
        model(x).backward()
        loss = model(x + 1)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        loss = loss.detach() + norm
        torch._dynamo.graph_break()
        with torch.no_grad():
            for mean, parameter in zip(average.parameters(), model.parameters()):
                mean.lerp_(parameter, 0.5)
        return loss

    return lambda x: step(x) + average(x).detach()


def _by_hand(model: MLP, optimizer: Optimizer, compiled: Compile) -> Step:
    def step(x: Tensor) -> Tensor:
        loss = model(x)
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad * 0.1)
                parameter.grad = None
        return loss

    return compiled(step)


def _optimizer_apart(model: MLP, optimizer: Optimizer, compiled: Compile) -> Step:
    call, update = compiled(model), compiled(lambda: optimizer.step())

    def step(x: Tensor) -> Tensor:
        loss = call(x)
        loss.backward()
        update()
        optimizer.zero_grad()
        return loss

    return step


def _with_a_closure(model: MLP, optimizer: Optimizer, compiled: Compile) -> Step:
    call = compiled(model)

    def step(x: Tensor) -> Tensor:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = call(x)
            loss.backward()
            return loss

        return optimizer.step(closure)  # type: ignore[arg-type, return-value]

    return compiled(step)


def _forward_of_the_model(model: MLP, optimizer: Optimizer, compiled: Compile) -> Step:
    model.forward = compiled(model.forward)  # type: ignore[method-assign]
    return _whole(model, optimizer, _plain)


def _loss_apart(model: MLP, optimizer: Optimizer, compiled: Compile) -> Step:
    body = compiled(nn.Sequential(*model.layers))
    return _whole(lambda x: loss(body(x)), optimizer, _plain) if (loss := compiled(_square)) else body


def _square(y: Tensor) -> Tensor:
    return (y - 1).square().mean()


def _part_disabled(model: MLP, optimizer: Optimizer, compiled: Compile) -> Step:
    class Parts(nn.Module):
        @torch.compiler.disable
        def middle(self, x: Tensor) -> Tensor:
            return torch.tanh(model.layers[1](x))

        def forward(self, x: Tensor) -> Tensor:
            x = self.middle(torch.tanh(model.layers[0](x)))
            return _square(model.layers[3](torch.tanh(model.layers[2](x))))

    return _whole(compiled(Parts()), optimizer, _plain)


STEPS = [
    _whole,
    _with_a_compiled_model,
    _clipped_and_averaged,
    _by_hand,
    _with_a_closure,
    _forward_of_the_model,
    _loss_apart,
    _part_disabled,
]


def trained(step_of: Callable[..., Step], optimizer_of: Callable[..., Optimizer], compiled: Compile) -> list[Any]:
    """Losses, and weights at the end."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = MLP()
    step = step_of(model, optimizer_of(model.parameters()), compiled)
    return [[array(step(batch(number))) for number in range(3)], weights(model)]


@pytest.mark.quick(4)
@pytest.mark.parametrize("step_of", STEPS)
def test_a_compiled_step_trains_as_in_plain_pytorch(step_of: Callable[..., Step], tmp_path: Path) -> None:
    small = _by_chunkc(memory_budget=SMALL, home=f"disk:{tmp_path}")
    expected = trained(step_of, _chunked, _plain)
    assert not differences(trained(step_of, _chunked, small), expected)


@pytest.mark.parametrize("step_of", [_whole, _optimizer_apart])
def test_an_optimizer_of_torch_is_compiled_as_by_another_backend(step_of: Callable[..., Step]) -> None:
    """Compiled, its arithmetic is another one than uncompiled: Dynamo takes it for capturable."""
    expected = trained(step_of, _torch_s, _aot_eager)
    assert not differences(trained(step_of, _torch_s, _by_chunkc(memory_budget=SMALL)), expected)


@pytest.mark.parametrize("returns_something", [False, True])
def test_a_forward_that_writes_buffers_is_planned(returns_something: bool) -> None:
    """What reads parameters and writes none of them is a model's, even if it returns nothing."""

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = MLP()
            self.register_buffer("cache", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor | None:
            self.cache.copy_(self.body(x).detach())
            return self.cache + 1 if returns_something else None

    torch.manual_seed(0)
    model = Cached()
    expected = array(model.body(batch()))
    with torch.no_grad():
        _by_chunkc(memory_budget=SMALL)(model)(batch())
    assert array(model.cache) == expected
    assert chunkc.report(model).num_chunks == 4
