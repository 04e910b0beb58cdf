"""A model that is gone leaves nothing behind, as when a notebook's cell runs again: not its chunks, nor its values."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from harness import session_of
from optim_models import assert_equal, assert_managed, batch, build, snapshot, train
from torch import nn

import chunkc

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def run(**options: Any) -> tuple[dict[str, torch.Tensor], Any]:
    model, call = build("adopted", **options)
    train(call, chunkc.optim.AdamW(model.parameters(), lr=1e-2), range(3))
    assert_managed(model, "plain" if options else "adopted")
    session = session_of(model)
    return snapshot(model), session


@pytest.mark.second_tier
@pytest.mark.parametrize("options", [{}, {"memory_budget": 1 << 30}])
def test_the_same_again_trains_the_same(options: dict[str, Any]) -> None:
    first, session = run(**options)
    for _ in range(2):
        gc.collect()
        assert session.is_over
        assert session.store.arena.nbytes == 0
        again, session = run(**options)
        assert_equal(again, first)


def test_one_laid_out_otherwise_has_a_chunk_of_its_own() -> None:
    run()
    model, call = build("adopted")
    model.layers[3].weight = nn.Parameter(model.layers[3].weight.detach().t().contiguous().t())
    with torch.no_grad():
        expected, weight = model(batch(0)), model.layers[3].weight.detach().clone()
    torch.testing.assert_close(call(batch(0)), expected)
    assert torch.equal(model.layers[3].weight, weight)
    assert model.layers[3].weight.stride() == weight.t().contiguous().t().stride()
