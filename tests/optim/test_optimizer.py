"""`chunkc.optim`: the arithmetic is torch's, for the parameters that torch would update."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import adam_cases
import pytest
import torch
from optim_models import (
    MLP,
    MODES,
    OPTIMIZERS,
    TWO_PER_CHUNK,
    Optimizer,
    assert_close,
    assert_equal,
    assert_managed,
    backward,
    build,
    copy_gradients,
    several_groups,
    snapshot,
    states,
    train,
    twin_of,
)

import chunkc
from chunkc.ir.states import EXP_AVG, EXP_AVG_SQ, MASTER, MASTER_LOW
from chunkc.kernels.hyperparameters import AdamHyper

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def follow_torch(
    mode: str,
    make: Callable[[MLP, bool], Optimizer],
    *,
    num_steps: int = 3,
    after: Callable[[Optimizer], Any] | None = None,
) -> None:
    """Train with chunkc's and torch's optimizer on the same gradients and compare. `make(model, is_torch)`."""
    model, call = build(mode)
    shadow = twin_of(model)
    pairs = [(model, make(model, False)), (shadow, make(shadow, True))]
    ticks = [after(optimizer) if after else None for _, optimizer in pairs]
    before = snapshot(model)
    for step in range(num_steps):
        backward(call, step)
        copy_gradients(model, shadow)
        for (_, optimizer), tick in zip(pairs, ticks):
            optimizer.step()
            optimizer.zero_grad()
            if tick is not None:
                tick.step()
        assert_close(model, shadow)
    assert_managed(model, mode)
    assert any(not torch.equal(before[name], p) for name, p in model.named_parameters())


@pytest.mark.quick(6, second=5)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("settings", [{"weight_decay": 0.0}, {"weight_decay": 0.1}, {"maximize": True}])
def test_one_group_follows_torch(mode: str, name: str, settings: dict[str, Any]) -> None:
    def make(model: MLP, is_torch: bool) -> Optimizer:
        return OPTIMIZERS[name][is_torch](model.parameters(), lr=1e-2, **settings)

    follow_torch(mode, make)


def test_l2_and_decoupled_weight_decay_differ() -> None:
    left, call_left = build("placed")
    right, call_right = build("placed")
    train(call_left, chunkc.optim.Adam(left.parameters(), lr=1e-2, weight_decay=0.1), range(2))
    train(call_right, chunkc.optim.AdamW(right.parameters(), lr=1e-2, weight_decay=0.1), range(2))
    assert not torch.equal(left.layers[0].weight, right.layers[0].weight)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_help_names_every_argument_and_torch_s_in_their_order(name: str) -> None:
    ours, theirs = (inspect.signature(kind).parameters for kind in OPTIMIZERS[name])
    positional = [p.name for p in theirs.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in ours.values() if p.kind is p.POSITIONAL_OR_KEYWORD] == positional
    assert {p.name for p in ours.values() if p.kind is p.KEYWORD_ONLY} - {"decoupled_weight_decay"} == {
        *("maximize", "foreach", "capturable", "differentiable", "fused", "update_on", "overlap", "undoable"),
        *("moments_dtype", "master_weights", "stochastic_rounding", "rounding_seed"),
    }
    assert {p.name: ours[p.name].default for p in theirs.values() if p.name in ours} == {
        p.name: p.default for p in theirs.values() if p.name in ours
    }


def test_adam_and_adamw_differ_in_one_default() -> None:
    adam, adamw = (inspect.signature(kind).parameters for kind in (chunkc.optim.Adam, chunkc.optim.AdamW))
    assert [name for name in adamw if adam[name] != adamw[name]] == ["weight_decay"]
    assert [name for name in adam if name != "decoupled_weight_decay"] == list(adamw)


def test_the_defaults_are_those_of_torch() -> None:
    for ours, theirs in OPTIMIZERS.values():
        mine, other = ours(MLP().parameters()).defaults, theirs(MLP().parameters()).defaults
        assert all(other[key] == value for key, value in mine.items())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_several_groups_follow_torch(mode: str, name: str) -> None:
    follow_torch(mode, lambda model, is_torch: OPTIMIZERS[name][is_torch](several_groups(model), lr=1e-3))


@pytest.mark.parametrize("mode", ["plain", "placed"])
@pytest.mark.parametrize("kind", ["StepLR", "LambdaLR", "OneCycleLR"])
def test_schedulers(mode: str, kind: str) -> None:
    schedulers = torch.optim.lr_scheduler
    after = {
        "StepLR": lambda optimizer: schedulers.StepLR(optimizer, step_size=2, gamma=0.1),
        "LambdaLR": lambda optimizer: schedulers.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
        "OneCycleLR": lambda optimizer: schedulers.OneCycleLR(optimizer, max_lr=1e-2, total_steps=5),  # betas too
    }[kind]
    follow_torch(
        mode,
        lambda model, is_torch: OPTIMIZERS["AdamW"][is_torch](several_groups(model)[:3], lr=1e-2),
        num_steps=4,
        after=after,
    )


@pytest.mark.parametrize("mode", ["plain", "placed"])
def test_a_learning_rate_may_be_a_tensor(mode: str) -> None:
    left, call_left = build(mode)
    right, call_right = build(mode)
    train(call_left, chunkc.optim.AdamW(left.parameters(), lr=torch.tensor(1e-2)), range(2))
    train(call_right, chunkc.optim.AdamW(right.parameters(), lr=float(torch.tensor(1e-2))), range(2))
    assert_equal(snapshot(left), snapshot(right))


@pytest.mark.quick(4, second=3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("masters", ["split", "float32"])
def test_bf16_parameters_have_fp32_masters(mode: str, name: str, masters: str) -> None:
    settings = {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.1}  # eps: where L2 cancels a gradient, rounding is all
    model, call = build(mode, dtype=torch.bfloat16)
    optimizer = OPTIMIZERS[name][0](model.parameters(), **settings, master_weights=masters)
    flat = {n: p.detach().clone().flatten() for n, p in model.named_parameters()}
    wide = {n: (torch.zeros(p.numel()), torch.zeros(p.numel()), p.float()) for n, p in flat.items()}
    for step in range(3):
        backward(call, step, torch.bfloat16)
        hyper = AdamHyper(**settings, step=step + 1, decoupled=name == "AdamW")
        for n, p in model.named_parameters():
            adam_cases.adam_update(flat[n], p.grad.detach().clone().flatten(), *wide[n], hyper)
        optimizer.step()
        optimizer.zero_grad()
        saved = optimizer.state_dict()["state"]
        for index, (n, p) in enumerate(model.named_parameters()):
            state = saved[index]
            assert (MASTER_LOW if masters == "split" else MASTER) in optimizer.state[p]
            assert p.dtype is torch.bfloat16
            assert torch.equal(state[MASTER].to(torch.bfloat16), p)
            for kind, expected in zip((EXP_AVG, EXP_AVG_SQ, MASTER), wide[n]):
                assert state[kind].dtype is torch.float32
                torch.testing.assert_close(state[kind].flatten(), expected, rtol=1e-5, atol=1e-6)
    assert_managed(model, mode)
    assert any(not torch.equal(saved[index][MASTER], p.float()) for index, p in enumerate(model.parameters()))


@pytest.mark.parametrize("mode", MODES)
def test_without_gradient_nothing_happens(mode: str) -> None:
    model, call = build(mode, **TWO_PER_CHUNK)
    optimizer = chunkc.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.5)
    left_out = ("layers.1.weight", "layers.2.bias")
    train(call, optimizer, range(2))
    before, states_before = snapshot(model), states(model, optimizer)
    backward(call, 2)
    for name in left_out:
        model.get_parameter(name).grad = None
    optimizer.step()
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) == (name in left_out), name
        for kind, value in optimizer.state[p].items():
            assert torch.equal(value, states_before[f"{name}.{kind}"]) == (name in left_out), (name, kind)


@pytest.mark.parametrize("mode", MODES)
def test_a_parameter_that_never_had_a_gradient_has_no_state(mode: str) -> None:
    model, call = build(mode)
    optimizer = chunkc.optim.AdamW(model.parameters(), lr=1e-2)
    before = snapshot(model)
    backward(call, 0)
    model.layers[0].weight.grad = None
    optimizer.step()
    assert not optimizer.state[model.layers[0].weight]
    assert torch.equal(model.layers[0].weight, before["layers.0.weight"])
    optimizer.zero_grad()
    train(call, optimizer, range(1, 2))
    counts = {name: int(optimizer.state[p]["step"]) for name, p in model.named_parameters()}
    assert counts.pop("layers.0.weight") == 1
    assert set(counts.values()) == {2}


def test_a_step_without_any_gradient() -> None:
    for mode in MODES:
        model, _ = build(mode)
        before = snapshot(model)
        chunkc.optim.AdamW(model.parameters()).step()
        assert_equal(snapshot(model), before)


@pytest.mark.parametrize("mode", MODES)
def test_two_optimizers_share_a_model(mode: str) -> None:
    """Weights of one chunk belong to different optimizers; a third weight to none."""
    left, call_left = build(mode, **TWO_PER_CHUNK)
    right, call_right = build(mode, **TWO_PER_CHUNK)
    frozen = left.layers[3].weight.detach().clone()
    groups = several_groups(left)[:3]
    both = [chunkc.optim.AdamW(groups[:1]), chunkc.optim.AdamW(groups[1:])]
    one = chunkc.optim.AdamW(several_groups(right)[:3])
    for step in range(2):
        backward(call_left, step)
        backward(call_right, step)
        for optimizer in (*both, one):
            optimizer.step()
        left.zero_grad()
        right.zero_grad()
    assert_equal(snapshot(left), snapshot(right))
    assert torch.equal(left.layers[3].weight, frozen)


@pytest.mark.parametrize("mode", MODES)
def test_add_param_group(mode: str) -> None:
    model, call = build(mode)
    optimizer = chunkc.optim.AdamW(model.layers[0].parameters(), lr=1e-2)
    train(call, optimizer, range(1))
    model.zero_grad()
    before = snapshot(model)
    optimizer.add_param_group({"params": model.layers[1].parameters(), "lr": 2e-2})
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 2e-2]
    train(call, optimizer, range(1, 2))
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {"layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"}
    assert int(optimizer.state[model.layers[0].weight]["step"]) == 2
    assert int(optimizer.state[model.layers[1].weight]["step"]) == 1
