"""`chunkc.optim`: states are saved, loaded and exchanged with `torch.optim`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from optim_models import (
    ALL_OPTIMIZERS,
    MLP,
    MODES,
    assert_close,
    assert_equal,
    backward,
    build,
    copy_gradients,
    snapshot,
    states,
    through_a_file,
    train,
    twin_of,
)
from torch import nn

import chunkc
from chunkc.ir.states import MASTER_LOW

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_a_state_goes_between_plain_and_placed_models() -> None:
    for source, target in (("plain", "placed"), ("placed", "plain"), ("adopted", "placed")):
        model, call = build(source, dtype=torch.bfloat16)
        optimizer = chunkc.optim.AdamW(model.parameters())
        train(call, optimizer, range(2), torch.bfloat16)
        other, other_call = build(target, dtype=torch.bfloat16, seed=1)
        other.load_state_dict(model.state_dict())
        other_optimizer = chunkc.optim.AdamW(other.parameters())
        other_optimizer.load_state_dict(optimizer.state_dict())
        assert_equal(states(other, other_optimizer), states(model, optimizer))
        backward(other_call, 2, torch.bfloat16)
        backward(call, 2, torch.bfloat16)
        copy_gradients(model, other)
        optimizer.step()
        other_optimizer.step()
        assert_equal(snapshot(other), snapshot(model))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ALL_OPTIMIZERS)
def test_loads_from_and_into_torch(mode: str, name: str) -> None:
    ours, theirs = ALL_OPTIMIZERS[name]
    settings = {"lr": 1e-2, "weight_decay": 0.1} | ({"momentum": 0.9, "dampening": 0.3} if name == "SGD" else {})
    shadow = MLP()
    optimizer = theirs(shadow.parameters(), **settings)
    train(shadow, optimizer, range(2))
    model, call = build(mode, seed=1)
    model.load_state_dict(shadow.state_dict())
    mine = ours(model.parameters())
    mine.load_state_dict(optimizer.state_dict())
    for step in range(2, 4):
        backward(call, step)
        copy_gradients(model, shadow)
        mine.step()
        optimizer.step()
        mine.zero_grad()
        assert_close(model, shadow)
    back = twin_of(model)
    returned = theirs(back.parameters(), lr=3.0)
    returned.load_state_dict(copy.deepcopy(mine.state_dict()))  # torch keeps the tensors it is given
    for step in range(4, 6):
        backward(call, step)
        copy_gradients(model, back)
        mine.step()
        returned.step()
        mine.zero_grad()
        assert_close(model, back)
    assert name == "SGD" or int(returned.state[back.layers[0].weight]["step"]) == 6
    assert mine.param_groups[0]["lr"] == returned.param_groups[0]["lr"] == 1e-2


def test_a_loaded_state_is_a_copy() -> None:
    for mode in ("plain", "placed"):
        model, call = build(mode)
        optimizer = chunkc.optim.AdamW(model.parameters())
        train(call, optimizer, range(1))
        state = copy.deepcopy(optimizer.state_dict())
        kept = copy.deepcopy(state)
        optimizer.load_state_dict(state)
        train(call, optimizer, range(1, 3))
        for index, entry in kept["state"].items():
            assert_equal(entry, state["state"][index])


@pytest.mark.parametrize("mode", ["plain", "placed"])
def test_a_missing_master_is_made_from_the_parameter(mode: str) -> None:
    model, call = build(mode, dtype=torch.bfloat16)
    shadow = twin_of(model)
    optimizer = torch.optim.AdamW(shadow.parameters())
    train(shadow, optimizer, range(1), torch.bfloat16)
    model.load_state_dict(shadow.state_dict())
    mine = chunkc.optim.AdamW(model.parameters())
    mine.load_state_dict(optimizer.state_dict())
    for p in model.parameters():
        assert not mine.state[p][MASTER_LOW].any()
    train(call, mine, range(1, 2), torch.bfloat16)
    assert all(mine.state[p][MASTER_LOW].any() for p in model.parameters())


def test_what_does_not_fit_is_not_loaded() -> None:
    model, _ = build("placed")
    optimizer = chunkc.optim.AdamW(model.parameters())
    other = chunkc.optim.AdamW([nn.Parameter(torch.ones(3))])
    with pytest.raises(ValueError, match="parameter group"):
        optimizer.load_state_dict(other.state_dict())


COPIED: list[tuple[Any, dict[str, Any]]] = [
    (chunkc.optim.Adam, {"update_on": "cpu"}),
    (chunkc.optim.AdamW, {"update_on": "cpu", "overlap": "both"}),
    (chunkc.optim.Adam, {"moments_dtype": torch.bfloat16, "stochastic_rounding": True}),
    (chunkc.optim.SGD, {"momentum": 0.9}),
]


@pytest.mark.parametrize(("kind", "settings"), COPIED, ids=str)
def test_copies_and_pickles_keep_what_they_were_told(kind: Any, settings: dict[str, Any]) -> None:
    optimizer = kind([nn.Parameter(torch.zeros(2))], **settings)
    assert not {"update_on", "overlap"} & optimizer.state_dict()["param_groups"][0].keys()
    for other in (copy.deepcopy(optimizer), through_a_file(optimizer)):
        assert (other.overlap, other.states) == (optimizer.overlap, optimizer.states)
        states = []
        for of in (optimizer, other):
            (parameter,) = of.param_groups[0]["params"]
            parameter.grad = torch.ones(2)
            of.step()
            states.append({kind: value.dtype for kind, value in of.state[parameter].items()})
        assert states[0] == states[1]
