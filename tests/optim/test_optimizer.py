"""`chunkc.optim`: the arithmetic is torch's, for the parameters that torch would update."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import home_of
from optim_models import (
    ALL_OPTIMIZERS,
    MLP,
    MODES,
    OPTIMIZERS,
    TWO_PER_CHUNK,
    Optimizer,
    assert_close,
    assert_equal,
    assert_managed,
    backward,
    batch,
    build,
    copy_gradients,
    several_groups,
    snapshot,
    states,
    train,
    twin_of,
)
from torch import Tensor

import chunkc
from chunkc.ir.states import EXP_AVG, EXP_AVG_SQ, MASTER_LOW

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def follow_torch(
    mode: str,
    make: Callable[[MLP, bool], Optimizer],
    *changes: Callable[[Optimizer], object],
    **options: Any,
) -> None:
    """Train with chunkc's and torch's optimizer on the same gradients, and compare.

    Args:
        make: gets the model, and whether it is torch's turn.
        changes: made to both optimizers one after the other, each after three steps.
    """
    model, call = build(mode, **options)
    shadow = twin_of(model)
    optimizers = make(model, False), make(shadow, True)
    before = snapshot(model)
    for phase, change in enumerate((lambda optimizer: None, *changes)):
        for optimizer in optimizers:
            change(optimizer)
        for step in range(3 * phase, 3 * phase + 3):
            backward(call, step)
            copy_gradients(model, shadow)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert_close(model, shadow)
    assert_managed(model, mode)
    assert any(not torch.equal(before[name], p) for name, p in model.named_parameters())


@pytest.mark.parametrize("name", ALL_OPTIMIZERS)
def test_help_names_every_argument_and_torch_s_in_their_order(name: str) -> None:
    ours, theirs = (inspect.signature(kind).parameters for kind in ALL_OPTIMIZERS[name])
    positional = [p.name for p in theirs.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in ours.values() if p.kind is p.POSITIONAL_OR_KEYWORD] == positional
    own = {p.name for p in ours.values() if p.kind is p.KEYWORD_ONLY} - theirs.keys() - {"decoupled_weight_decay"}
    assert own == {
        *("update_on", "overlap", "undoable"),
        *("moments_dtype", "master_weights", "stochastic_rounding", "rounding_seed"),
    }
    assert theirs.keys() - {"decoupled_weight_decay"} <= ours.keys()
    assert all(ours[name].default == p.default for name, p in theirs.items() if name in ours)


def test_adam_and_adamw_differ_in_one_default() -> None:
    adam, adamw = (inspect.signature(kind).parameters for kind in (chunkc.optim.Adam, chunkc.optim.AdamW))
    assert [name for name in adamw if adam[name] != adamw[name]] == ["weight_decay"]
    assert [name for name in adam if name != "decoupled_weight_decay"] == list(adamw)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_several_groups_follow_torch(mode: str, name: str) -> None:
    follow_torch(mode, lambda model, is_torch: OPTIMIZERS[name][is_torch](several_groups(model), lr=1e-3))


@pytest.mark.parametrize("mode", MODES)
def test_without_gradient_nothing_happens(mode: str) -> None:
    """No state is made, either, and no step counted."""
    model, call = build(mode, **TWO_PER_CHUNK)
    optimizer = chunkc.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.5)
    for step, left_out in enumerate((("layers.0.weight",), (), ("layers.1.weight", "layers.2.bias"))):
        backward(call, step)
        before, states_before = snapshot(model), states(model, optimizer)
        for name in left_out:
            model.get_parameter(name).grad = None
        optimizer.step()
        optimizer.zero_grad()
        for name, p in model.named_parameters():
            assert torch.equal(p, before[name]) == (name in left_out), name
            assert bool(optimizer.state[p]) == (step > 0 or name not in left_out)
            for kind, value in optimizer.state[p].items():
                former = states_before.get(f"{name}.{kind}")
                assert (former is not None and torch.equal(value, former)) == (name in left_out), (name, kind)
    counts = {name: int(optimizer.state[p]["step"]) for name, p in model.named_parameters()}
    assert {name: count for name, count in counts.items() if count != 3} == dict.fromkeys(
        ("layers.0.weight", "layers.1.weight", "layers.2.bias"), 2
    )


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


# ---------------------------------------------------------------- momentum


def mixed(model: MLP) -> list[dict[str, Any]]:
    """Weights that share chunks have momentum or none, each with a rate of its own; biases have none."""
    weights, biases = [layer.weight for layer in model.layers], [layer.bias for layer in model.layers]
    return [
        {"params": weights[::2], "momentum": 0.9, "dampening": 0.2},
        {"params": weights[1::2], "lr": 0.02},
        {"params": biases, "weight_decay": 0.1, "maximize": True},
    ]


def exchange(optimizer: Optimizer) -> None:
    first, second, third = optimizer.param_groups
    first["momentum"], second["momentum"], second["dampening"], third["lr"] = 0.0, 0.8, 0.5, 0.01
    third["momentum"], third["nesterov"] = 0.9, True


def give_back(optimizer: Optimizer) -> None:
    """Its buffer is what it was."""
    optimizer.param_groups[0]["momentum"] = 0.9


@pytest.mark.parametrize("mode", MODES)
def test_groups_with_and_without_momentum_change_places(mode: str) -> None:
    """In chunks of two."""
    options = TWO_PER_CHUNK if mode != "plain" else {}
    follow_torch(
        mode, lambda model, torch: ALL_OPTIMIZERS["SGD"][torch](mixed(model), lr=0.05), exchange, give_back, **options
    )


@pytest.mark.parametrize("mode", MODES)
def test_momentum_that_comes_later(mode: str) -> None:
    """Chunks were laid out without states; the first update with momentum makes the buffer the gradient."""

    def begin(optimizer: Optimizer) -> None:
        optimizer.param_groups[0] |= {"momentum": 0.9, "dampening": 0.4}

    follow_torch(mode, lambda model, torch: ALL_OPTIMIZERS["SGD"][torch](model.parameters(), lr=0.05), begin)


def test_a_buffer_of_none_is_no_buffer() -> None:
    """As `torch.optim.SGD` saves a step without gradients."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = chunkc.optim.SGD([weight], lr=0.1, momentum=0.9, dampening=0.5)
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: {"momentum_buffer": None}}})
    weight.grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(optimizer.state[weight]["momentum_buffer"], torch.ones(3))


# ---------------------------------------------------------------- parameters that were frozen when they were laid out


@pytest.mark.second_tier
@pytest.mark.parametrize(
    ("mode", "update_on", "two_per_chunk"),
    [
        ("plain", "device", False),
        ("placed", "device", False),
        ("placed", "cpu", True),
        ("adopted", "device", True),
        ("adopted", "cpu", False),
    ],
)
def test_what_is_unfrozen_is_trained(mode: str, update_on: str, two_per_chunk: bool) -> None:
    model, call = build(mode, **(TWO_PER_CHUNK if two_per_chunk else {}))
    shadow = twin_of(model)
    for of in (model, shadow):
        for layer in of.layers[:2]:
            layer.weight.requires_grad_(False)
            layer.bias.requires_grad_(False)
    optimizer = chunkc.optim.AdamW(model.parameters(), lr=1e-2, update_on=update_on)
    expected = torch.optim.AdamW(shadow.parameters(), lr=1e-2)
    for step, thaw in enumerate((None, 0, 1)):
        for of in (model, shadow):
            if thaw is not None:
                of.layers[thaw].requires_grad_(True)
        train(call, optimizer, range(2 * step, 2 * step + 2))
        train(shadow, expected, range(2 * step, 2 * step + 2))
        assert_close(model, shadow, atol=1e-5)
    assert_managed(model, mode)


def test_a_gradient_that_nobody_planned_is_used() -> None:
    """Of a parameter that was frozen when it was placed, and that no compiled code has trained."""
    model, _ = build("plain")
    shadow = twin_of(model)
    model.requires_grad_(False)
    chunkc.place(model)
    model.requires_grad_(True)
    optimizer, expected = chunkc.optim.AdamW(model.parameters()), torch.optim.AdamW(shadow.parameters())
    for of in (model, shadow):
        backward(of, 0)
    optimizer.step()
    expected.step()
    assert_managed(model, "placed")
    assert_close(model, shadow)


# ---------------------------------------------------------------- chunks and tiles under a step, and what surrounds it


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
