"""Models of several graphs train in every budget from the smallest on, with the same bits. Of models that look
alike, made one after the other in one process, each starts from its own weights.
"""

from __future__ import annotations

import gc
import math
from functools import cache
from typing import Any

import pytest
import torch
from harness import HUGE, Result, array, assert_same_training, differences, home_of, take_step, train
from optim_models import batch, build
from optim_models import train as train_mlp
from plain_modules import Stack
from torch import Tensor, nn
from zoo import CASES, Case, floats

import chunkc
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


# ---------------------------------------------------------------- models that look alike, one after the other

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
OPTIONS = {"memory_budget": 130 * 1024, "codegen": "eager", "whole_graph": "never"}


def train_stack(kept: list[Any]) -> list[Any]:
    """Dynamo compiles the first of these models, and uses its code for all that are compiled with equal options."""
    torch.manual_seed(0)
    model = Stack()
    compiled = torch.compile(model, backend="chunkc", options=dict(OPTIONS))
    optimizer = chunkc.optim.AdamW(model.parameters(), lr=0.1)
    found = []
    for step in range(2):
        loss = compiled(torch.full((2, 64), float(step + 1)))
        take_step(loss, optimizer)
        found.append(array(loss))
    session, name = home_of(model.get_parameter("layers.0.weight"))
    assert session.store.views.is_managed(name)
    kept.append(model)
    return [*found, *(array(p) for p in model.parameters())]


@pytest.mark.second_tier
@pytest.mark.parametrize("held", [(), (0,), (1,)])
def test_a_model_never_begins_with_the_weights_of_one_that_is_gone(held: tuple[int, ...]) -> None:
    kept: list[Any] = []
    results = []
    for number in range(3):
        results.append(train_stack(kept))
        if number not in held:
            kept.pop()
        gc.collect()
    for result in results[1:]:
        assert not differences(result, results[0])


@pytest.mark.quick(1)
@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_the_second_of_two_alike_retains_its_graph_too(codegen: str) -> None:
    """It is compiled outside of Dynamo, and its backward first without, then with `retain_graph`."""
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        model = Stack()
        compiled = torch.compile(model, backend="chunkc", options={**OPTIONS, "codegen": codegen})
        compiled(torch.ones(2, 64)).backward()
        loss = compiled(torch.ones(2, 64))
        loss.backward(retain_graph=True)
        loss.backward()
        found.append([array(p.grad) for p in model.parameters() if p.grad is not None])
    assert found[0]
    assert not differences(*found)


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(64, 64), nn.BatchNorm1d(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.inner(x)).square().mean()


def test_of_two_alike_both_plan_the_same_bytes_for_their_buffers() -> None:
    """New values of buffers are copied where the buffers are: nobody holds them after the call."""
    peaks, statistics = [], []
    for _ in range(2):
        torch.manual_seed(0)
        model = Normalised()
        compiled = torch.compile(model, backend="chunkc", options={**OPTIONS, "memory_budget": 1 << 20})
        for seed in range(2):
            compiled(torch.full((4, 64), float(seed))).backward()
        statistics.append([array(b) for b in model.buffers()])
        peaks.append([(label, planned) for label, planned, _ in chunkc.report(model).moments])
    assert peaks[0] == peaks[1]
    assert not differences(*statistics)


def test_one_laid_out_otherwise_has_a_chunk_of_its_own() -> None:
    first, first_call = build("adopted")
    train_mlp(first_call, chunkc.optim.AdamW(first.parameters(), lr=1e-2), range(3))
    model, call = build("adopted")
    model.layers[3].weight = nn.Parameter(model.layers[3].weight.detach().t().contiguous().t())
    with torch.no_grad():
        expected, weight = model(batch(0)), model.layers[3].weight.detach().clone()
    torch.testing.assert_close(call(batch(0)), expected)
    assert torch.equal(model.layers[3].weight, weight)
    assert model.layers[3].weight.stride() == weight.t().contiguous().t().stride()
