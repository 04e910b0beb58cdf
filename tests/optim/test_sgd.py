"""`chunkc.optim.SGD`: torch's values, the same bits under every budget, states that come and go, refusals."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from optim_models import (
    BUDGET_NBYTES,
    MLP,
    MODES,
    TWO_PER_CHUNK,
    assert_close,
    assert_equal,
    assert_managed,
    backward,
    batch,
    build,
    copy_gradients,
    is_managed,
    snapshot,
    states,
    train,
    twin_of,
)
from torch import nn

import chunkc
from chunkc.optim import SGD
from chunkc.session.session import owner

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

BF16 = torch.bfloat16
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "decay": {"weight_decay": 0.1, "maximize": True},
    "momentum": {"momentum": 0.9, "weight_decay": 0.1},
    "dampening": {"momentum": 0.9, "dampening": 0.3},
    "nesterov": {"momentum": 0.9, "nesterov": True, "maximize": True},
}


def mixed(model: MLP) -> list[dict[str, Any]]:
    """Weights that share chunks have momentum or none, each with a rate of its own; biases have none."""
    weights, biases = [layer.weight for layer in model.layers], [layer.bias for layer in model.layers]
    return [
        {"params": weights[::2], "momentum": 0.9, "dampening": 0.2},
        {"params": weights[1::2], "lr": 0.02},
        {"params": biases, "weight_decay": 0.1},
    ]


def follow_torch(model: MLP, call: Any, shadow: MLP, ours: Any, theirs: Any, steps: range) -> None:
    for step in steps:
        backward(call, step)
        copy_gradients(model, shadow)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        assert_close(model, shadow)


@pytest.mark.quick(7, second=0)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SETTINGS)
def test_one_group_follows_torch(mode: str, name: str) -> None:
    model, call = build(mode)
    shadow = twin_of(model)
    ours, theirs = (
        kind(m.parameters(), lr=0.05, **SETTINGS[name]) for kind, m in ((SGD, model), (torch.optim.SGD, shadow))
    )
    follow_torch(model, call, shadow, ours, theirs, range(4))
    assert_managed(model, mode)
    kinds = {kind for state in ours.state.values() for kind in state}
    assert kinds == ({"step", "momentum_buffer"} if "momentum" in SETTINGS[name] else {"step"})


@pytest.mark.parametrize("mode", MODES)
def test_groups_may_differ_and_change(mode: str) -> None:
    """In chunks of two, one with momentum and one without; in the middle they change places."""
    model, call = build(mode, **(TWO_PER_CHUNK if mode != "plain" else {}))
    shadow = twin_of(model)
    ours, theirs = SGD(mixed(model), lr=0.05), torch.optim.SGD(mixed(shadow), lr=0.05)
    follow_torch(model, call, shadow, ours, theirs, range(3))
    for optimizer in (ours, theirs):
        first, second, third = optimizer.param_groups
        first["momentum"], second["momentum"], second["dampening"], third["lr"] = 0.0, 0.8, 0.5, 0.01
    follow_torch(model, call, shadow, ours, theirs, range(3, 6))
    for optimizer in (ours, theirs):
        optimizer.param_groups[0]["momentum"] = 0.9  # its buffer is what it was
    follow_torch(model, call, shadow, ours, theirs, range(6, 8))


@pytest.mark.parametrize("mode", MODES)
def test_momentum_that_comes_later(mode: str) -> None:
    """Chunks were laid out without states; the first update with momentum makes the buffer the gradient."""
    model, call = build(mode)
    shadow = twin_of(model)
    ours, theirs = SGD(model.parameters(), lr=0.05), torch.optim.SGD(shadow.parameters(), lr=0.05)
    follow_torch(model, call, shadow, ours, theirs, range(2))
    for optimizer in (ours, theirs):
        optimizer.param_groups[0] |= {"momentum": 0.9, "dampening": 0.4}
    follow_torch(model, call, shadow, ours, theirs, range(2, 5))
    assert_managed(model, mode)


@pytest.mark.quick(5, second=0)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["plain", "dampening"])
@pytest.mark.parametrize("num_steps", [0, 2])
def test_states_go_to_torch_and_back(mode: str, name: str, num_steps: int) -> None:
    model, call = build(mode)
    shadow = twin_of(model)
    ours, theirs = (
        kind(m.parameters(), lr=0.05, **SETTINGS[name]) for kind, m in ((SGD, model), (torch.optim.SGD, shadow))
    )
    follow_torch(model, call, shadow, ours, theirs, range(num_steps))
    other, back = SGD(model.parameters(), lr=1.0), torch.optim.SGD(shadow.parameters(), lr=1.0)
    other.load_state_dict(theirs.state_dict())
    back.load_state_dict(copy.deepcopy(ours.state_dict()))
    assert other.param_groups[0]["lr"] == back.param_groups[0]["lr"] == 0.05
    follow_torch(model, call, shadow, other, back, range(num_steps, num_steps + 3))


def test_a_buffer_of_none_is_no_buffer() -> None:
    """As `torch.optim.SGD` saves a step without gradients."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = SGD([weight], lr=0.1, momentum=0.9, dampening=0.5)
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: {"momentum_buffer": None}}})
    weight.grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(optimizer.state[weight]["momentum_buffer"], torch.ones(3))


FORMATS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "no momentum": (torch.float32, {"momentum": 0.0}),
    "bf16 buffer": (torch.float32, {"moments_dtype": BF16}),
    "8-bit buffer": (torch.float32, {"moments_dtype": "int8"}),
    "split": (BF16, {}),
    "split, no momentum": (BF16, {"momentum": 0.0}),
    "whole masters": (BF16, {"master_weights": "float32"}),
    "bf16 only": (BF16, {"moments_dtype": BF16, "stochastic_rounding": True}),
    "bf16 only, no momentum": (BF16, {"momentum": 0.0, "stochastic_rounding": True}),
}
KINDS = {
    "no momentum": set[str](),
    "split, no momentum": {"master_low"},
    "whole masters": {"master", "momentum_buffer"},
    "bf16 only, no momentum": set[str](),
    "8-bit buffer": {"momentum_buffer", "momentum_buffer_scale"},
}


def trained(mode: str, dtype: torch.dtype, **settings: Any) -> tuple[MLP, torch.optim.Optimizer]:
    torch._dynamo.reset()
    where = {key: settings.pop(key) for key in ("memory_budget",) if key in settings}
    model, call = build(mode, dtype=dtype, **where)
    optimizer = SGD(model.parameters(), **{"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1, **settings})
    train(call, optimizer, range(3), dtype)
    optimizer.synchronize()
    return model, optimizer


@pytest.mark.quick(3, second=2)
@pytest.mark.parametrize("name", FORMATS)
def test_every_budget_has_the_same_bits(name: str) -> None:
    dtype, chosen = FORMATS[name]
    kept, kept_optimizer = trained("adopted", dtype, memory_budget=1 << 30, **chosen)
    with pytest.raises(chunkc.BudgetError) as refused:
        trained("adopted", dtype, memory_budget=4096, **chosen)
    tight = refused.value.minimum_nbytes * 21 // 20
    moved, optimizer = trained("adopted", dtype, memory_budget=tight, **chosen)
    assert not is_managed(kept.layers[0].weight)
    assert is_managed(moved.layers[0].weight)
    assert_equal(snapshot(kept), snapshot(moved))
    assert_equal(states(kept, kept_optimizer), states(moved, optimizer))
    (session, _) = owner(moved.layers[0].weight)  # type: ignore[misc]
    wanted = KINDS.get(name, {"momentum_buffer"} | ({"master_low"} if name == "split" else set()))
    wanted |= {"master"} if "8-bit" in name and dtype == BF16 else set()
    for group in session.store.layout.groups:
        assert set(group.state_kinds) == wanted


@pytest.mark.quick(2, second=4)
@pytest.mark.parametrize("name", ["fp32", "no momentum", "split"])
@pytest.mark.parametrize("overlap", ["none", "forward", "backward", "both"])
def test_updates_at_home_have_the_same_bits(name: str, overlap: str) -> None:
    dtype, chosen = FORMATS[name]
    expected, _ = trained("adopted", dtype, **chosen)
    found, _ = trained("adopted", dtype, update_on="cpu", overlap=overlap, **chosen)
    all_fits_without_gradients = name == "no momentum" and overlap in ("backward", "both")
    assert is_managed(found.layers[0].weight) != all_fits_without_gradients
    assert_equal(snapshot(expected), snapshot(found))


@pytest.mark.parametrize("name", ["fp32", "no momentum"])
def test_gradients_are_accumulated_unscaled_and_left_out(name: str) -> None:
    """A GradScaler's loss scale, an overflow in the first step, and two backwards a step: as without a budget."""
    results = []
    for nbytes in (1 << 30, BUDGET_NBYTES):
        torch._dynamo.reset()
        model, call = build("adopted", memory_budget=nbytes)
        optimizer = SGD(model.parameters(), lr=0.05, **({"momentum": 0.9, "dampening": 0.5} if name == "fp32" else {}))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(4):
            for part in range(2):
                scaler.scale(call(batch(2 * step + part))).backward()
            if step == 0:
                model.layers[0].bias.grad[0] = float("inf")
            before = snapshot(model)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if step == 0:
                assert_equal(before, snapshot(model))
        results.append(snapshot(model))
        assert [float(state["step"]) for state in optimizer.state.values()] == [3.0] * len(list(model.parameters()))
    assert_equal(*results)


@pytest.mark.parametrize(("momentum", "nbytes"), [(0.0, 8), (0.9, 12)])
def test_explained_is_what_trains(momentum: float, nbytes: int) -> None:
    """Home has parameters and gradients, and buffers where there is momentum."""
    told = {"memory_budget": BUDGET_NBYTES, "whole_graph": "never", "activations": "keep"}
    found = chunkc.explain(MLP(), batch(), optimizer="sgd", momentum=momentum, **told)
    model, optimizer = trained("adopted", torch.float32, momentum=momentum)
    report = chunkc.report(model)
    own = chunkc.explain(model, batch())
    for explained in (found, own):
        assert explained.predicted_peak_nbytes == report.predicted_peak_nbytes
        assert explained.minimum_budget_nbytes == report.minimum_budget_nbytes
        assert explained.home_nbytes == report.home_nbytes == nbytes * 4 * 128 * 128
    kept = "a float32 momentum buffer" if momentum else "no states"
    note = f"SGD keeps {kept} for float32 parameters: an update reads {nbytes} and writes {nbytes - 4} bytes of each"
    assert note in found.notes
    assert optimizer.state_dict()["state"]


def test_pickled_and_copied() -> None:
    model, call = build("adopted")
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    train(call, optimizer, range(2))
    other = copy.deepcopy(optimizer)
    assert other.states == optimizer.states
    assert [list(state) for state in other.state.values()] == [list(state) for state in optimizer.state.values()]


def test_a_group_with_momentum_may_be_added() -> None:
    model, call = build("adopted")
    shadow = twin_of(model)
    pairs = []
    for kind, m in ((SGD, model), (torch.optim.SGD, shadow)):
        weights = [layer.weight for layer in m.layers]
        optimizer = kind(weights[:2], lr=0.05)
        optimizer.add_param_group({"params": weights[2:], "momentum": 0.9})
        pairs.append(optimizer)
    follow_torch(model, call, shadow, *pairs, range(3))


def test_help_names_every_argument_and_torch_s_in_their_order() -> None:
    ours, theirs = (inspect.signature(kind).parameters for kind in (SGD, torch.optim.SGD))
    positional = [p.name for p in theirs.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in ours.values() if p.kind is p.POSITIONAL_OR_KEYWORD] == positional
    assert theirs.keys() <= ours.keys()
    assert all(ours[name].default == theirs[name].default for name in theirs)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"lr": -1.0}, "lr must not be negative"),
        ({"lr": float("nan")}, "lr must not be negative"),
        ({"momentum": -0.1}, "momentum must not be negative"),
        ({"momentum": None}, "momentum is None"),
        ({"dampening": float("nan")}, "dampening must be a number"),
        ({"weight_decay": -1}, "weight_decay must not be negative"),
        ({"nesterov": True}, "nesterov needs a momentum above 0"),
        ({"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "dampening 0"),
        ({"nesterov": 1}, "nesterov is 1"),
        ({"differentiable": True}, "SGD does not support differentiable=True"),
        ({"foreach": True, "fused": True}, "foreach and fused cannot both be True"),
        ({"moments_dtype": "int4"}, "moments_dtype is 'int4'"),
        ({"master_weights": "split", "stochastic_rounding": True}, "needs parameters rounded to nearest"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(chunkc.OptionsError, match=text):
        SGD([nn.Parameter(torch.ones(3))], **settings)


def test_what_has_no_kernel_is_refused() -> None:
    half, eighth = (nn.Parameter(torch.ones(3).to(dtype)) for dtype in (torch.float16, torch.float8_e5m2))
    with pytest.raises(chunkc.OptionsError, match="float16 parameters need master_weights=True"):
        SGD([half], master_weights=False)
    with pytest.raises(
        chunkc.UnsupportedError, match="SGD updates fp64, fp32, bf16, fp16, complex64 and complex128, not"
    ):
        SGD([eighth])
    with pytest.raises(TypeError, match="capturable"):
        SGD([half], capturable=True)


def test_states_of_another_optimizer_are_refused() -> None:
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    adam = torch.optim.Adam([weight])
    adam.step()
    optimizer = SGD([weight], momentum=0.9)
    saved = {"state": adam.state_dict()["state"], "param_groups": optimizer.state_dict()["param_groups"]}
    with pytest.raises(chunkc.OptionsError, match="SGD cannot use the state exp_avg"):
        optimizer.load_state_dict(saved)
    with pytest.raises(chunkc.OptionsError, match="momentum_buffer has the shape"):
        optimizer.load_state_dict({**saved, "state": {0: {"momentum_buffer": torch.ones(2)}}})
