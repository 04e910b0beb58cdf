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
    WIDTH,
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
from chunkc.ir.states import EXP_AVG, EXP_AVG_SQ, MASTER, MASTER_LOW
from chunkc.kernels import reference
from chunkc.kernels.formats import AdamFormat, AdamSlots, Span
from chunkc.kernels.hyperparameters import AdamHyper, scalar_table
from chunkc.passes.planning import updates as update_planning

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


ADAMS: list[dict[str, Any]] = [{"weight_decay": 0.0}, {"weight_decay": 0.1}, {"maximize": True}]
SGDS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.1, "maximize": True},
    {"momentum": 0.9, "weight_decay": 0.1},
    {"momentum": 0.9, "dampening": 0.3},
    {"momentum": 0.9, "nesterov": True, "maximize": True},
]
SETTINGS = [*((name, settings) for name in OPTIMIZERS for settings in ADAMS), *(("SGD", settings) for settings in SGDS)]


@pytest.mark.quick(11, second=5)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("name", "settings"), SETTINGS, ids=str)
def test_one_group_follows_torch(mode: str, name: str, settings: dict[str, Any]) -> None:
    def make(model: MLP, is_torch: bool) -> Optimizer:
        return ALL_OPTIMIZERS[name][is_torch](model.parameters(), lr=1e-2, **settings)

    follow_torch(mode, make)


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


@pytest.mark.quick(4, second=3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("masters", ["split", "float32"])
def test_bf16_parameters_have_fp32_masters(mode: str, name: str, masters: str) -> None:
    settings = {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.1}  # eps: where L2 cancels a gradient, rounding is all
    model, call = build(mode, dtype=torch.bfloat16)
    optimizer = OPTIMIZERS[name][0](model.parameters(), **settings, master_weights=masters)
    flat = {n: p.detach().clone().flatten() for n, p in model.named_parameters()}
    fmt = AdamFormat(torch.bfloat16, torch.bfloat16, master=True)
    wide = {n: (torch.zeros(p.numel()), torch.zeros(p.numel()), p.float()) for n, p in flat.items()}
    for step in range(3):
        backward(call, step, torch.bfloat16)
        hyper = AdamHyper(**settings, step=step + 1, decoupled=name == "AdamW")
        for n, p in model.named_parameters():
            slots = AdamSlots(flat[n], p.grad.detach().clone().flatten(), *wide[n])
            reference.chunk_update(fmt, slots, [Span(0, p.numel(), 0)], scalar_table([hyper]))
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
        {"params": biases, "weight_decay": 0.1},
    ]


def exchange(optimizer: Optimizer) -> None:
    first, second, third = optimizer.param_groups
    first["momentum"], second["momentum"], second["dampening"], third["lr"] = 0.0, 0.8, 0.5, 0.01


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
