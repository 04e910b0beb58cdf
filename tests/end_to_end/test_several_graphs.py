"""Models of several graphs train in every budget from the smallest on, with the same bits."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from harness import HUGE, Result, assert_same_training, train
from torch import Tensor, nn
from zoo import CASES, Case, floats

from chunkc.explaining.explain import minimum_budget


@pytest.mark.quick(0, second=1)
@pytest.mark.parametrize("percent", [180, 188, 220, 228])
def test_residents_in_the_way_of_a_later_graph_s_backward(percent: int) -> None:
    """Percent of the smallest budget. Others: `tests/properties/test_ladder.py`."""
    result = trained(smallest_nbytes("keep") * percent // 100, "keep")
    assert_same_training(result, trained(HUGE, "keep"))


@cache
def smallest_nbytes(activations: str) -> int:
    case = CASES["graph_breaks"]
    return minimum_budget(case.build(), **case.batch(0), memory_budget=1, activations=activations)


@cache
def trained(budget_nbytes: int, activations: str) -> Result:
    options = {"place": False, "whole_graph": "never", "limit": False, "activations": activations}
    return train(CASES["graph_breaks"], memory_budget=budget_nbytes, **options)


class ResidualAlone(nn.Module):
    """Its middle graph has nothing to compute in the backward: an addition hands its gradient on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y, z = self.first(x), x * 2
        torch._dynamo.graph_break()
        y = y + z
        torch._dynamo.graph_break()
        return self.second(y).square().mean()


@pytest.mark.parametrize("activations", ["auto", "keep"])
def test_a_backward_without_operations_is_planned(activations: str) -> None:
    case = Case("residual_alone", ResidualAlone, lambda seed: {"x": floats(seed, (8, 64))}, num_graphs=3)
    smallest = minimum_budget(case.build(), **case.batch(0), memory_budget=1, activations=activations)
    options = {"place": False, "whole_graph": "never", "limit": False, "activations": activations}
    results = [train(case, memory_budget=nbytes, **options) for nbytes in (smallest, HUGE)]
    assert_same_training(*results)


class SizeBetweenGraphs(nn.Module):
    """Its first graph returns a size, which a logarithm makes a number where it was a symbol."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        length = x.size(1)
        y = self.inner(x) * int(math.log(length))
        torch._dynamo.graph_break()
        return (y * length).square().mean()


def test_a_graph_may_return_a_number() -> None:
    options = {"memory_budget": HUGE, "codegen": "eager"}
    plain, model = SizeBetweenGraphs(), SizeBetweenGraphs()
    model.load_state_dict(plain.state_dict())
    compiled = torch.compile(model, backend="chunkc", options=options)
    for length in (4, 6, 9):
        x = floats(length, (2, length, 16))
        torch.testing.assert_close(compiled(x), plain(x))
