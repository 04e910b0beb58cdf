"""One model that tests train in ordinary PyTorch under a small budget, in the ways that homes and codegen allow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import harness
import numpy as np
import pytest
import torch
from harness import HUGE, Optimizer, array, budget_nbytes, compile_case
from torch import Tensor, nn
from zoo import CASES, Case

CASE = CASES["short_gpt"]
"""The model that they train."""


class Way(NamedTuple):
    """Home of the model, and code generator of its segments."""

    home: str = "cpu"
    codegen: str = "eager"

    def __str__(self) -> str:
        return "-".join(self)


WAYS = [
    Way(),
    pytest.param(Way("disk"), marks=pytest.mark.second_tier),
    pytest.param(Way("disk", "inductor"), marks=pytest.mark.slow),
]

_way = Way()


@pytest.fixture(params=WAYS, ids=str)
def every_way(request: pytest.FixtureRequest) -> Iterator[Way]:
    """Run a test in each of `WAYS`."""
    global _way
    _way = request.param
    yield _way
    _way = Way()


def slowly_on_disks(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test in every way, with homes on disks in slow tests alone.

    On disks `test_user_actions` does the same in any order.
    """
    ways = [Way(), *(pytest.param(Way("disk", codegen), marks=pytest.mark.slow) for codegen in ("eager", "inductor"))]
    indirectly = pytest.mark.parametrize("every_way", ways, ids=str, indirect=True)
    return pytest.mark.usefixtures("every_way")(indirectly(test))


def sgd(parameters: Any) -> Optimizer:
    """Make a plain optimizer with steps that do not amplify rounding, as Adam's first ones do."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def small_budget(home: str | None = None, room: float = 1.05) -> int:
    """Return a budget of `room` times the minimum, in bytes."""
    return int(room * budget_nbytes("short_gpt", 0, home or _way.home, _way.codegen))


def compile_small(home: str | None = None, case: Case = CASE, room: float = 1.05) -> tuple[nn.Module, nn.Module]:
    """Return the model and its compiled self, cut into segments, under `small_budget`."""
    budget, way = small_budget(home, room), _way._replace(home=home or _way.home)
    return compile_case(case, memory_budget=budget, whole_graph="never", **way._asdict())


def compile_large() -> tuple[nn.Module, nn.Module]:
    """Return the model and its compiled self, cut into segments, where everything fits."""
    return compile_case(CASE, memory_budget=HUGE, whole_graph="never", **_way._asdict())


def assert_close(left: Any, right: Any) -> None:
    """Check that nested arrays agree up to the rounding of another order of operations; NaN equals NaN."""
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
    """Run one forward and backward; return the loss."""
    loss = call(**CASE.batch(step))
    loss.backward()
    return array(loss)


def train_steps(call: Callable[..., Tensor], optimizer: Optimizer, steps: range) -> list[np.ndarray]:
    """Run ordinary training steps; return the losses."""
    return harness.train_steps(CASE, call, optimizer, steps)


def two_alike(model: nn.Module) -> tuple[nn.Parameter, nn.Parameter]:
    """Return two large parameters of one shape."""
    shape = None
    for parameter in model.parameters():
        if parameter.dim() == 2 and parameter.numel() > 4096:
            if shape is not None and shape.shape == parameter.shape:
                return shape, parameter
            shape = shape if shape is not None else parameter
    raise AssertionError("no two parameters are alike")


def weight_of(model: nn.Module) -> nn.Parameter:
    """Return a parameter that lives in a chunk under a small budget."""
    return max(model.parameters(), key=lambda p: p.numel())
