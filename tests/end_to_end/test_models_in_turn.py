"""Models that look alike, made one after the other in one process: each starts from its own weights."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from harness import array, differences, home_of, take_step
from optim_models import batch, build
from optim_models import train as train_mlp
from plain_modules import Stack
from torch import nn

import chunkc

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
OPTIONS = {"memory_budget": 130 * 1024, "codegen": "eager", "whole_graph": "never"}


def train(kept: list[Any]) -> list[Any]:
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
        results.append(train(kept))
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
