"""`chunkc.optim`: what it refuses, before anything changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from optim_models import MLP, MODES, OPTIMIZERS, assert_equal, backward, build, several_groups, snapshot, states, train
from torch import nn

import chunkc

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.mark.parametrize("optimizer", [chunkc.optim.AdamW, chunkc.optim.Adam, chunkc.optim.LAMB])
@pytest.mark.parametrize(
    "settings",
    [
        {"lr": -1.0},
        {"lr": float("nan")},
        {"betas": (1.0, 0.9)},
        {"betas": (0.9, -0.1)},
        {"eps": -1e-8},
        {"weight_decay": -0.1},
        {"lr": "1"},
        {"lr": None},
        {"lr": True},
        {"lr": [1e-3]},
        {"lr": 1j},
        {"lr": 10**400},
        {"lr": torch.tensor(float("nan"))},
        {"lr": torch.ones(2)},
        {"lr": torch.tensor(True)},
        {"lr": torch.ones((), device="meta")},
        {"betas": None},
        {"betas": 0.9},
        {"betas": "ab"},
        {"betas": (0.9,)},
        {"betas": (0.9, float("nan"))},
        {"betas": (False, 0.9)},
        {"eps": "1e-8"},
        {"eps": float("nan")},
        {"weight_decay": None},
        {"weight_decay": float("nan")},
        {"maximize": "no"},
        {"maximize": None},
    ],
    ids=str,
)
def test_values_that_make_no_sense(optimizer: type, settings: dict[str, Any]) -> None:
    weight = nn.Parameter(torch.ones(3))
    with pytest.raises(chunkc.OptionsError, match=next(iter(settings)).removesuffix("s") + "|eps"):
        optimizer([weight], **settings)
    with pytest.raises(chunkc.OptionsError):
        optimizer([{"params": [weight], **settings}])
    made = optimizer([weight])
    weight.grad = torch.ones(3)
    made.param_groups[0].update(settings)
    with pytest.raises(chunkc.OptionsError):
        made.step()
    assert torch.equal(weight, torch.ones(3))


@pytest.mark.parametrize(
    "settings",
    [
        {"moments_dtype": []},
        {"moments_dtype": torch.ones(2)},
        {"moments_dtype": torch.float16},
        {"master_weights": 1.5},
        {"master_weights": "yes"},
        {"stochastic_rounding": "no"},
        {"stochastic_rounding": None},
        {"rounding_seed": "7"},
        {"rounding_seed": 0.5},
        {"update_on": []},
        {"overlap": None},
    ],
    ids=str,
)
def test_options_that_make_no_sense(settings: dict[str, Any]) -> None:
    with pytest.raises(chunkc.OptionsError, match=next(iter(settings))):
        chunkc.optim.AdamW([nn.Parameter(torch.ones(3))], **settings)


@pytest.mark.parametrize("made", [chunkc.optim.AdamW, torch.optim.AdamW])
def test_what_torch_refuses_too(made: Any) -> None:
    weight = nn.Parameter(torch.ones(3))
    with pytest.raises(TypeError, match="ordered"):
        made([{"params": {weight}}])
    with pytest.raises(TypeError, match="must be a dict"):
        made([weight]).add_param_group([nn.Parameter(torch.ones(3))])
    with pytest.raises(ValueError, match="more than one parameter group"):
        made([weight]).add_param_group({"params": [weight]})


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_numbers_that_torch_takes_too(name: str) -> None:
    ours, theirs = OPTIMIZERS[name]
    mine, shadow = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    lr = torch.tensor(0.1)
    optimizers = [
        of([p], lr=lr, betas=(np.float64(0.5), 0.75), weight_decay=1) for of, p in ((ours, mine), (theirs, shadow))
    ]
    for step in range(3):
        for parameter, optimizer in zip((mine, shadow), optimizers):
            parameter.grad = torch.full((3,), float(step + 1))
            optimizer.step()
        lr.mul_(0.5)
        torch.testing.assert_close(mine, shadow, rtol=0, atol=1e-6)


def test_differentiable_updates_are_refused() -> None:
    weight = nn.Parameter(torch.ones(3))
    with pytest.raises(chunkc.OptionsError, match="differentiable"):
        chunkc.optim.AdamW([{"params": [weight], "differentiable": True}])
    for optimizer in (chunkc.optim.AdamW, chunkc.optim.Adam):
        with pytest.raises(chunkc.OptionsError, match="differentiable"):
            optimizer([weight], differentiable=True)
    chunkc.optim.AdamW([{"params": [weight], "differentiable": False}])


def test_states_of_another_optimizer_are_named() -> None:
    shadow = MLP()
    other = torch.optim.SGD(shadow.parameters(), momentum=0.9)
    train(shadow, other, range(1))
    optimizer = chunkc.optim.AdamW(MLP().parameters())
    found = {**optimizer.state_dict(), "state": other.state_dict()["state"]}
    with pytest.raises(chunkc.OptionsError, match=r"momentum_buffer.*load it into the optimizer that saved it"):
        optimizer.load_state_dict(found)


def test_a_refused_group_is_not_added() -> None:
    optimizer = chunkc.optim.AdamW([nn.Parameter(torch.ones(3))])
    for group in (
        {"params": [nn.Parameter(torch.ones(3).to(torch.float8_e5m2))]},
        {"params": [nn.Parameter(torch.ones(3))], "differentiable": True},
        {"params": [nn.Parameter(torch.ones(3))], "lr": -1.0},
    ):
        with pytest.raises(chunkc.ChunkcError):
            optimizer.add_param_group(group)
        assert len(optimizer.param_groups) == 1


def test_sparse_gradients_are_refused_before_anything_changes() -> None:
    first, table = nn.Linear(4, 4), nn.Embedding(8, 4, sparse=True)
    optimizer = chunkc.optim.AdamW([*first.parameters(), *table.parameters()])
    before = {**snapshot(first), "table": table.weight.detach().clone()}
    first(table(torch.tensor([1, 2]))).sum().backward()
    with pytest.raises(chunkc.UnsupportedError, match="make the embedding with sparse=False"):
        optimizer.step()
    assert_equal({**snapshot(first), "table": table.weight.detach().clone()}, before)


@pytest.mark.parametrize("mode", MODES)
def test_a_value_spoilt_later_is_refused_before_anything_changes(mode: str) -> None:
    model, call = build(mode)
    optimizer = chunkc.optim.AdamW(several_groups(model))
    train(call, optimizer, range(1))
    before, states_before = snapshot(model), states(model, optimizer)
    backward(call, 1)
    optimizer.param_groups[2]["lr"] = -1.0
    with pytest.raises(chunkc.OptionsError, match="lr"):
        optimizer.step()
    assert_equal(snapshot(model), before)
    assert_equal(states(model, optimizer), states_before)
