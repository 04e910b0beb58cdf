"""Models that look alike, made one after the other in one process: each starts from its own weights."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from harness import array, differences, home_of
from plain_modules import Stack

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
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(array(loss))
    session, name = home_of(model.get_parameter("layers.0.weight"))
    assert session.store.is_managed(name)
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
