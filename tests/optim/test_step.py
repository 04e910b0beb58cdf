"""`chunkc.optim`: chunks and tiles under a step, and what surrounds it."""

from __future__ import annotations

import pytest
import torch
from harness import home_of
from optim_models import (
    BUDGET_NBYTES,
    LAYERS,
    MODES,
    TWO_PER_CHUNK,
    WIDTH,
    assert_equal,
    assert_managed,
    backward,
    batch,
    build,
    several_groups,
    snapshot,
    states,
    train,
)
from torch import Tensor

import chunkc
from chunkc.ir.states import EXP_AVG, EXP_AVG_SQ, MASTER_LOW
from chunkc.passes.planning import updates as update_planning

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.mark.parametrize("mode", ["placed", "adopted"])
def test_a_state_is_a_home_view_with_its_own_storage(mode: str) -> None:
    model, call = build(mode, dtype=torch.bfloat16)
    optimizer = chunkc.optim.AdamW(model.parameters())
    train(call, optimizer, range(2), torch.bfloat16)
    for layer in model.layers:
        session, name = home_of(layer.weight)
        for kind in (EXP_AVG, EXP_AVG_SQ, MASTER_LOW):
            value = optimizer.state[layer.weight][kind]
            assert value.data_ptr() == session.store.views.home_view(kind, name).data_ptr()
            assert value.untyped_storage().nbytes() == value.nbytes
            assert value.nbytes == (2 if kind == MASTER_LOW else 4) * layer.weight.numel()
            assert value.shape == layer.weight.shape
            assert value.any()


@pytest.mark.quick(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tile_numel", [(1024, 4096), (1000, 1000), (1 << 14, 1 << 14)])
def test_results_do_not_depend_on_tiles(
    monkeypatch: pytest.MonkeyPatch, tile_numel: tuple[int, int], dtype: torch.dtype
) -> None:
    """Neighbours in one chunk with different settings, one of them without gradient, cut anywhere."""
    chunk_nbytes = 2 * dtype.itemsize * WIDTH * WIDTH

    def run() -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
        model, call = build("placed", dtype=dtype, **(TWO_PER_CHUNK | {"chunk_size": chunk_nbytes}))
        optimizer = chunkc.optim.AdamW(several_groups(model))
        for step in range(2):
            backward(call, step, dtype)
            if step:
                model.layers[1].weight.grad = None
            optimizer.step()
            optimizer.zero_grad()
        assert_managed(model, "placed")
        moments = [label for label, _, _ in chunkc.report(model).moments if label.startswith("update")]
        return snapshot(model), states(model, optimizer), len(moments)

    weights, moments, num_tiles = run()
    monkeypatch.setattr(update_planning, "MIN_TILE_NUMEL", tile_numel[0])
    monkeypatch.setattr(update_planning, "MAX_TILE_NUMEL", tile_numel[1])
    other_weights, other_moments, other_num_tiles = run()
    assert other_num_tiles > num_tiles
    assert_equal(other_weights, weights)
    assert_equal(other_moments, moments)


def test_the_optimizer_step_obeys_the_budget() -> None:
    model, call = build("placed")
    train(call, chunkc.optim.AdamW(model.parameters()), range(2))
    report = chunkc.report(model)
    updates = [nbytes for label, nbytes, _ in report.moments if label.startswith("update")]
    assert len(updates) == LAYERS
    assert max(updates) <= report.predicted_peak_nbytes <= BUDGET_NBYTES


@pytest.mark.parametrize("mode", MODES)
def test_closure(mode: str) -> None:
    left, call_left = build(mode)
    right, call_right = build(mode)
    closed, plain = (chunkc.optim.AdamW(m.parameters(), lr=1e-2) for m in (left, right))
    losses = []

    def closure() -> Tensor:
        closed.zero_grad()
        loss = call_left(batch(0))
        loss.backward()
        losses.append(loss)
        return loss

    with torch.no_grad():
        assert closed.step(closure) is losses[0]
    train(call_right, plain, range(1))
    assert_equal(snapshot(left), snapshot(right))
    assert plain.step() is None
