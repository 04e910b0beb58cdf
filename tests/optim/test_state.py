"""`chunkc.optim`: states are saved, loaded and exchanged with `torch.optim`."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optim_models import (
    ALL_OPTIMIZERS,
    MLP,
    MODES,
    WITHOUT_SENSE,
    assert_close,
    assert_equal,
    assert_managed,
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


# ---------------------------------------------------------------- what does not fit changes nothing


State = dict[str, Any]
LAST = 7


def put(kind: str, value: Callable[[torch.Tensor], Any]) -> Callable[[State], None]:
    """Change one state of the last parameter."""

    def change(state: State) -> None:
        state["state"][LAST][kind] = value(state["state"][LAST][kind])

    return change


def put_group(name: str, value: Any) -> Callable[[State], None]:
    def change(state: State) -> None:
        state["param_groups"][-1][name] = value

    return change


def drop(*path: Any) -> Callable[[State], None]:
    def change(state: State) -> None:
        for key in path[:-1]:
            state = state[key]
        del state[path[-1]]

    return change


def add_group(state: State) -> None:
    state["param_groups"].append({**state["param_groups"][0], "params": []})


def move_parameter(state: State) -> None:
    state["param_groups"][0]["params"].append(state["param_groups"][-1]["params"].pop())


def other_key(state: State) -> None:
    state["state"][99] = state["state"][LAST]


def other_state(state: State) -> None:
    state["state"][LAST]["momentum"] = state["state"][LAST]["exp_avg_sq"]


BAD: dict[str, Callable[[State], None]] = {
    "rows": put("exp_avg", lambda t: t[:-1]),
    "broadcast": put("exp_avg_sq", lambda t: t[:1]),
    "flat": put("exp_avg", lambda t: t.reshape(1, -1)),
    "complex": put("exp_avg", lambda t: t.to(torch.complex64)),
    "integers": put("exp_avg", lambda t: t.to(torch.int64)),
    "codes without scales": put("exp_avg", lambda t: t.to(torch.uint8)),
    "booleans": put("exp_avg_sq", lambda t: t > 0),
    "list": put("exp_avg", lambda t: t.tolist()),
    "none": put("exp_avg", lambda t: None),
    "meta": put("exp_avg", lambda t: t.to("meta")),
    "sparse": put("exp_avg", lambda t: t.to_sparse()),
    "step text": put("step", lambda t: "1"),
    "step nan": put("step", lambda t: math.nan),
    "step half": put("step", lambda t: torch.tensor(1.5)),
    "step negative": put("step", lambda t: -1),
    "step bool": put("step", lambda t: True),
    "steps": put("step", lambda t: torch.ones(2)),
    "no moment": drop("state", LAST, "exp_avg_sq"),
    "no step": drop("state", LAST, "step"),
    "unknown state": other_state,
    "state of nobody": other_key,
    "states": lambda state: state["state"].__setitem__(LAST, [1, 2]),
    "fewer groups": drop("param_groups", -1),
    "more groups": add_group,
    "other sizes": move_parameter,
    "amsgrad": put_group("amsgrad", True),
    "differentiable": put_group("differentiable", True),
    "no lr": drop("param_groups", -1, "lr"),
    "no betas": drop("param_groups", -1, "betas"),
    **{f"{name} {value}": put_group(name, value) for name, values in WITHOUT_SENSE.items() for value in values},
}


def groups_of(model: nn.Module) -> list[State]:
    parameters = list(model.parameters())
    return [{"params": parameters[:6], "lr": 1e-2}, {"params": parameters[6:], "lr": 3e-3}]


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    groups = [{**group, "params": [id(p) for p in group["params"]]} for group in optimizer.param_groups]
    return {"groups": copy.deepcopy(groups), "parameters": snapshot(model), "states": states(model, optimizer)}


def assert_unchanged(model: nn.Module, optimizer: torch.optim.Optimizer, before: dict[str, Any]) -> None:
    after = everything(model, optimizer)
    assert after["groups"] == before["groups"]
    assert_equal(after["parameters"], before["parameters"])
    assert_equal(after["states"], before["states"])


BAD_IN_8_BITS: dict[str, Callable[[State], None]] = {
    "no scale": drop("state", LAST, "exp_avg_scale"),
    "scales": put("exp_avg_scale", lambda t: t[:-1]),
    "integer scales": put("exp_avg_scale", lambda t: t.int()),
    "codes in fp32": put("exp_avg", lambda t: t.float()),
    "signed codes": put("exp_avg", lambda t: t.to(torch.int8)),
    "gaps": put("exp_avg_sq", lambda t: torch.stack([t, t], -1)[..., 0]),
}


@pytest.mark.parametrize(
    ("mode", "dtype", "moments_dtype"),
    [
        *((mode, dtype, "float32") for mode in ("plain", "placed") for dtype in (torch.float32, torch.bfloat16)),
        ("plain", torch.float32, "int8"),
    ],
)
def test_what_does_not_fit_changes_nothing(mode: str, dtype: torch.dtype, moments_dtype: str) -> None:
    bad, message = BAD, ""
    if moments_dtype == "int8":
        bad, message = BAD_IN_8_BITS, "the loaded state of parameter 1 of parameter group 1: exp_avg"
    model, call = build(mode, dtype=dtype)
    optimizer = chunkc.optim.AdamW(groups_of(model), moments_dtype=moments_dtype)
    train(call, optimizer, range(1), dtype)
    older = copy.deepcopy(optimizer.state_dict())
    assert max(older["state"]) == LAST
    train(call, optimizer, range(1, 3), dtype)
    assert_managed(model, mode)
    before = everything(model, optimizer)
    for name, spoil in bad.items():
        spoilt = copy.deepcopy(older)
        spoil(spoilt)
        with pytest.raises(chunkc.OptionsError, match=message) as raised:
            optimizer.load_state_dict(spoilt)
        assert "\n" not in str(raised.value), name
        assert_unchanged(model, optimizer, before)
    optimizer.load_state_dict(older)
    assert all(int(optimizer.state[p]["step"]) == 1 for p in model.parameters())


def test_what_torch_accepts_is_loaded() -> None:
    model, call = build("plain")
    optimizer = chunkc.optim.AdamW(groups_of(model))
    train(call, optimizer, range(1))
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0] |= {"lr": torch.tensor(0.5), "betas": [0, 0.5], "mine": "a note"}
    del state["param_groups"][1]["maximize"]
    state["state"][0] |= {"step": 4, "exp_avg": state["state"][0]["exp_avg"].double()}
    state["state"][1] = {}
    del state["state"][2]
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["mine"] == "a note"
    assert [int(optimizer.state[p].get("step", 0)) for p in model.parameters()] == [4, 0, 0, *[1] * 5]
    train(call, optimizer, range(1, 2))


@pytest.mark.parametrize("mode", MODES)
def test_states_change_places(mode: str) -> None:
    """A state dict has the states themselves; those of one parameter are not overwritten before another has them."""
    model, call = build(mode)
    optimizer = chunkc.optim.AdamW(model.parameters())
    train(call, optimizer, range(2))
    before = copy.deepcopy(optimizer.state_dict())["state"]
    own = optimizer.state_dict()
    own["state"][0], own["state"][2] = own["state"][2], own["state"][0]
    own["state"][4] = {**own["state"][4], "exp_avg": own["state"][4]["exp_avg_sq"], "exp_avg_sq": before[4]["exp_avg"]}
    own["state"][6]["exp_avg"] = own["state"][6]["exp_avg"].t()
    optimizer.load_state_dict(own)
    after = optimizer.state_dict()["state"]
    assert_equal(after[0], before[2])
    assert_equal(after[2], before[0])
    assert torch.equal(after[4]["exp_avg"], before[4]["exp_avg_sq"])
    assert torch.equal(after[4]["exp_avg_sq"], before[4]["exp_avg"])
    assert torch.equal(after[6]["exp_avg"], before[6]["exp_avg"].t())


def test_hooks_see_what_is_loaded() -> None:
    model, call = build("placed")
    optimizer = chunkc.optim.AdamW(model.parameters())
    train(call, optimizer, range(1))
    seen: list[float] = []

    def halved(_: Any, state: State) -> State:
        halves = {i: {**s, "exp_avg": s["exp_avg"] / 2} for i, s in state["state"].items()}
        return {**state, "state": halves}

    weight = model.layers[0].weight
    wanted = optimizer.state[weight]["exp_avg"] / 2
    optimizer.register_load_state_dict_pre_hook(halved)
    optimizer.register_load_state_dict_post_hook(lambda found: seen.append(found.state[weight]["exp_avg"].clone()))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert torch.equal(seen[0], wanted)
    assert torch.equal(optimizer.state[weight]["exp_avg"], wanted)


@pytest.mark.parametrize("mode", MODES)
def test_adam_that_loads_an_adamw_decays_as_in_torch(mode: str) -> None:
    model, call = build(mode)
    shadow = nn.ParameterList([p.detach().clone() for p in model.parameters()])
    saved = torch.optim.AdamW(shadow, lr=1e-2, weight_decay=0.5).state_dict()
    optimizer, twin_optimizer = chunkc.optim.Adam(model.parameters()), torch.optim.Adam(shadow)
    for of in (optimizer, twin_optimizer):
        of.load_state_dict(saved)
    for step in range(2):
        backward(call, step)
        copy_gradients(model, shadow)
        for of in (optimizer, twin_optimizer):
            of.step()
            of.zero_grad()
    torch.testing.assert_close([*model.parameters()], [*shadow], rtol=0, atol=1e-6)
