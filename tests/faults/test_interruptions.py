"""NaN, exceptions and Ctrl-C in the middle of a step do what they do in PyTorch."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from harness import HUGE, adamw, compile_case, differences, gradients, weights
from plain_modules import ByteGPT
from scripts import CASE, compile_small, small_budget, train_steps
from torch import Tensor
from zoo import Case, byte_batch


class Interrupt(torch.autograd.Function):
    """The identity; Ctrl-C comes in the direction named by `when`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, when: str) -> Tensor:
        ctx.when = when
        if when == "forward":
            raise KeyboardInterrupt
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.when == "backward":
            raise KeyboardInterrupt
        return grad, None


class Interrupted(ByteGPT):
    """Two compiled graphs with an interruption between them."""

    when = "never"

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.blocks[0](self.embed(x))
        hidden = self.interrupt(hidden)
        return self.score(self.blocks[2](self.blocks[1](hidden)), y)

    @torch._dynamo.disable
    def interrupt(self, hidden: Tensor) -> Tensor:
        return Interrupt.apply(hidden, self.when)


INTERRUPTED = Case("interrupted", Interrupted, byte_batch, num_graphs=2)


@pytest.mark.second_tier
@pytest.mark.parametrize(
    ("when", "home"),
    [
        ("forward", "disk"),
        ("backward", "cpu"),
        *(pytest.param(*other, marks=pytest.mark.slow) for other in (("forward", "cpu"), ("backward", "disk"))),
    ],
)
def test_control_c_between_graphs(when: str, home: str) -> None:
    model, compiled = compile_case(INTERRUPTED, memory_budget=2 * small_budget(home), home=home, whole_graph="never")
    optimizer = adamw(model.parameters())
    losses = train_steps(compiled, optimizer, range(1))
    before = weights(model)
    model.when = when
    with pytest.raises(KeyboardInterrupt):
        compiled(**CASE.batch(9)).backward()
    model.when = "never"
    assert not differences(weights(model), before)
    assert all(np.isfinite(gradient).all() for gradient in gradients(model).values())
    optimizer.zero_grad()
    losses += train_steps(compiled, optimizer, range(1, 3))

    model, compiled = compile_case(INTERRUPTED, memory_budget=HUGE, whole_graph="never")
    expected = train_steps(compiled, adamw(model.parameters()), range(3))
    assert not differences(losses, expected)


def _interrupt_after(num_calls: int, submit: Callable) -> Callable:
    """`WorkerStream.submit`, interrupted once at the given call of the main thread: Python interrupts no other."""
    remaining = num_calls

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal remaining
        if threading.current_thread() is threading.main_thread():
            remaining -= 1
            if remaining == 0:
                raise KeyboardInterrupt
        return submit(*args, **kwargs)

    return interrupted


@pytest.mark.second_tier
@pytest.mark.parametrize("num_calls", [1, 4, 6])
@pytest.mark.parametrize("home", ["cpu", "disk"])
def test_control_c_while_copying(num_calls: int, home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C as a copy is submitted, in the middle of a step: nothing hangs and the next step works."""
    from chunkc.runtime.device.streams import WorkerStream

    model, compiled = compile_small(home)
    optimizer = adamw(model.parameters())
    losses = train_steps(compiled, optimizer, range(1))
    before = weights(model)
    with monkeypatch.context() as patch:
        patch.setattr(WorkerStream, "submit", _interrupt_after(num_calls, WorkerStream.submit))
        with pytest.raises(KeyboardInterrupt):
            compiled(**CASE.batch(9)).backward()
    assert not differences(weights(model), before)
    optimizer.zero_grad()
    losses += train_steps(compiled, optimizer, range(1, 3))
    model, compiled = compile_case(CASE, memory_budget=HUGE, whole_graph="never")
    expected = train_steps(compiled, adamw(model.parameters()), range(3))
    assert not differences(losses, expected)
    assert not any(math.isnan(float(loss)) for loss in losses)
