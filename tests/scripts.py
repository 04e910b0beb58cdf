"""Scripts that train one model in ordinary PyTorch, run under a small budget, a large one, and eagerly.

The first two must agree in every bit, the third closely. `conftest.py` registers this file as `scripts`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from harness import HUGE, Optimizer, array, budget_nbytes, compile_case, differences
from torch import Tensor, nn
from zoo import CASES, Case

CASE = CASES["short_gpt"]
"""The model of all tests that run a script."""

Script = Callable[[nn.Module, Callable[..., Tensor]], Any]
"""Gets the model and the callable to train with (compiled or the model itself); returns arrays."""


def sgd(parameters: Any) -> Optimizer:
    """A plain optimizer whose steps do not amplify rounding, as Adam's first ones do."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def small_budget(home: str = "cpu", room: float = 1.05) -> int:
    """Bytes: nearly the minimum, or `room` times it."""
    return int(room * budget_nbytes("short_gpt", 0, home))


def compile_small(home: str = "cpu", case: Case = CASE, room: float = 1.05) -> tuple[nn.Module, nn.Module]:
    """The model and its compiled self, cut into segments, under `small_budget`."""
    return compile_case(case, memory_budget=small_budget(home, room), home=home, whole_graph="never")


def run_three_ways(script: Script, *, home: str = "cpu", room: float = 1.05) -> Any:
    """What `script` returns under a small budget, after checking it against a large one and eager PyTorch.

    A script that holds more than one call's values at once needs `room` for them.
    """
    small = script(*compile_small(home, room=room))
    large = script(*compile_case(CASE, memory_budget=HUGE, whole_graph="never"))
    found = differences(small, large)
    assert not found, "\n".join(found[:20])
    model = CASE.build(0)
    assert_close(small, script(model, model))
    return small


def assert_close(left: Any, right: Any) -> None:
    """Nested arrays agree up to the rounding of another order of operations; NaN equals NaN."""
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        left, right = list(left.values()), [right[key] for key in left]
    if isinstance(left, list | tuple):
        assert len(left) == len(right)
        for pair in zip(left, right):
            assert_close(*pair)
        return
    np.testing.assert_allclose(left, right, rtol=1e-3, atol=1e-5)


def backward(call: Callable[..., Tensor], step: int) -> np.ndarray:
    """One forward and backward; returns the loss."""
    loss = call(**CASE.batch(step))
    loss.backward()
    return array(loss)


def train_steps(call: Callable[..., Tensor], optimizer: Optimizer, steps: range) -> list[np.ndarray]:
    """Ordinary training steps; returns the losses."""
    losses = []
    for step in steps:
        losses.append(backward(call, step))
        optimizer.step()
        optimizer.zero_grad()
    return losses
