"""A model that is gone leaves its chunks to one like it, as when a notebook's cell runs again; never its values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optim_models import assert_equal, assert_managed, batch, build, snapshot, train
from torch import nn

import chunkc
from chunkc.session import owner

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def run(**options: Any) -> tuple[dict[str, torch.Tensor], Any]:
    model, call = build("adopted", **options)
    train(call, chunkc.optim.AdamW(model.parameters(), lr=1e-2), range(3))
    assert_managed(model, "plain" if options else "adopted")
    session, _ = owner(model.layers[0].weight)
    return snapshot(model), session


@pytest.mark.parametrize("options", [{}, {"memory_budget": 1 << 30}])
def test_the_same_again_trains_the_same(options: dict[str, Any]) -> None:
    first, session = run(**options)
    num_groups, home_nbytes = len(session.store.layout.groups), session.store.arena.nbytes
    for _ in range(2):
        again, again_session = run(**options)
        assert_equal(again, first)
        assert again_session is session
    assert (len(session.store.layout.groups), session.store.arena.nbytes) == (num_groups, home_nbytes)


def test_one_of_other_shapes_has_chunks_of_its_own() -> None:
    _, session = run()
    num_groups = len(session.store.layout.groups)
    model, call = build("adopted")
    wide = torch.randn(128, 256, generator=torch.Generator().manual_seed(0))
    model.layers[3] = nn.Sequential(nn.Linear(128, 256), nn.Linear(256, 128))
    with torch.no_grad():
        model.layers[3][1].weight.copy_(wide)
    expected = model(batch(0))
    assert torch.equal(call(batch(0)), expected)
    assert len(owner(model.layers[0].weight)[0].store.layout.groups) >= num_groups
    assert torch.equal(model.layers[3][1].weight, wide)
