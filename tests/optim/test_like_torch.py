"""Dtypes, flags and states that `torch.optim` has: `chunkc.optim` gives its results, and its parameter groups."""

from __future__ import annotations

import copy
import logging
from typing import Any

import numpy as np
import pytest
import torch
from optim_models import (
    MLP,
    TWO_PER_CHUNK,
    assert_equal,
    assert_managed,
    build,
    snapshot,
    states,
    through_a_file,
    train,
)
from torch import Tensor, nn

import chunkc
from chunkc.optim import stepping

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
KINDS = {
    "AdamW": (chunkc.optim.AdamW, torch.optim.AdamW),
    "Adam": (chunkc.optim.Adam, torch.optim.Adam),
    "SGD": (chunkc.optim.SGD, torch.optim.SGD),
}
ADAMS: list[dict[str, Any]] = [
    {},
    {"amsgrad": True},
    {"amsgrad": True, "weight_decay": 0.1, "maximize": True, "betas": (0.5, 0.6)},
    {"weight_decay": 1, "eps": 1e-3, "betas": (np.float64(0.5), 0.75), "lr": torch.tensor(0.01, dtype=FP64)},
]
SGDS: list[dict[str, Any]] = [
    {},
    {"momentum": 0.9, "weight_decay": 0.1, "dampening": 0.5},
    {"momentum": 0.9, "nesterov": True, "maximize": True},
]
CASES = [
    *[(name, settings) for name in ("AdamW", "Adam") for settings in ADAMS],
    ("Adam", {"decoupled_weight_decay": True, "weight_decay": 0.3}),
    *[("SGD", settings) for settings in SGDS],
]
ULP = {FP32: 1e-6, FP64: 1e-14, torch.complex64: 1e-6, torch.complex128: 1e-14}
"""Relative, after twelve steps: arithmetic is the same but for the order in which scalars are rounded."""


@pytest.mark.parametrize("dtype", ULP, ids=str)
@pytest.mark.parametrize(("name", "settings"), CASES, ids=str)
def test_updates_are_torch_s(name: str, settings: dict[str, Any], dtype: torch.dtype) -> None:
    """Of a dense parameter, one in another order, and a scalar; a rate in a tensor changes in place."""
    (ours, theirs), settings = KINDS[name], copy.deepcopy(settings)
    shapes = [(7, 5), (6, 4), ()]
    values = [torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(3)) for shape in shapes]
    values[1] = values[1].t()
    mine, shadow_copies = ([nn.Parameter(value.clone()) for value in values] for _ in range(2))
    optimizer, other = ours(mine, **settings), theirs(shadow_copies, foreach=False, **settings)
    for step in range(12):
        generator = torch.Generator().manual_seed(step)
        for p, q in zip(mine, shadow_copies):
            gradient = torch.randn(p.shape, dtype=dtype, generator=generator)
            if step % 3 == 2 and dtype.is_complex:
                gradient = gradient.conj()
            p.grad, q.grad = gradient, gradient.clone()
        optimizer.step()
        other.step()
        if "lr" in settings:
            settings["lr"].mul_(0.9)
    for p, q in zip(mine, shadow_copies):
        torch.testing.assert_close(p, q, rtol=ULP[dtype], atol=ULP[dtype])
        for kind in other.state[q]:
            if kind != "step":
                found, wanted = optimizer.state[p][kind], other.state[q][kind]
                torch.testing.assert_close(found, wanted, rtol=ULP[dtype], atol=ULP[dtype])


def test_amsgrad_in_chunks_where_one_group_has_it() -> None:
    def run(mode: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        model, call = build(mode, **TWO_PER_CHUNK | {"memory_budget": 700 * 1024})
        groups = [{"params": layer.parameters(), "amsgrad": bool(i % 2)} for i, layer in enumerate(model.layers)]
        optimizer = chunkc.optim.AdamW(groups, lr=1e-2)
        train(call, optimizer, range(3))
        assert_managed(model, mode)
        assert [["max_exp_avg_sq" in optimizer.state[layer.weight]] for layer in model.layers] == [
            [False], [True], [False], [True]
        ]  # fmt: skip
        return snapshot(model), states(model, optimizer)

    (weights, kept), (other_weights, other_kept) = run("plain"), run("placed")
    assert_equal(other_weights, weights)
    assert_equal(other_kept, kept)


def test_amsgrad_that_begins_later_counts_from_then_on() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = chunkc.optim.AdamW([parameter], lr=0.1)
    for step in range(4):
        optimizer.param_groups[0]["amsgrad"] = step > 1
        parameter.grad = torch.full((3,), 1.0 / (step + 1))
        optimizer.step()
    state = optimizer.state[parameter]
    assert int(state["step"]) == 4
    assert torch.equal(state["max_exp_avg_sq"], state["exp_avg_sq"])


@pytest.mark.parametrize("dtype", [FP64, torch.complex64, torch.complex128], ids=str)
def test_norms(dtype: torch.dtype) -> None:
    """A gradient in another order, and a conjugate view; the next step multiplies by the factor."""
    values = [torch.randn(40, 30, dtype=dtype, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    gradients = [values[0], values[1].t().contiguous().t(), values[2].conj()]
    mine, shadow_copies = ([nn.Parameter(torch.zeros_like(value)) for value in values] for _ in range(2))
    for p, q, gradient in zip(mine, shadow_copies, gradients):
        p.grad, q.grad = gradient, gradient.clone()
    optimizer, other = chunkc.optim.SGD(mine, lr=1.0), torch.optim.SGD(shadow_copies, lr=1.0, foreach=False)
    norm, wanted = optimizer.clip_grad_norm_(1e-2), torch.nn.utils.clip_grad_norm_(shadow_copies, 1e-2)
    torch.testing.assert_close(norm, wanted.float())
    optimizer.step()
    other.step()
    torch.testing.assert_close(mine, shadow_copies, rtol=1e-6, atol=0)


def test_the_norm_of_fp64_is_not_rounded_to_fp32() -> None:
    parameter = nn.Parameter(torch.zeros(2, dtype=FP64))
    parameter.grad = torch.tensor([1e60, 1.0], dtype=FP64)
    assert float(chunkc.optim.AdamW([parameter]).grad_norm()) == 1e60


# ---------------------------------------------------------------- what is refused, and when


@pytest.mark.parametrize("optimizer", [chunkc.optim.AdamW, chunkc.optim.SGD])
def test_a_dtype_that_no_update_takes_is_refused_by_name(optimizer: Any) -> None:
    bad = torch.ones(3).to(torch.float8_e4m3fn)
    named = [("head.bias", nn.Parameter(torch.ones(3))), ("head.weight", nn.Parameter(bad))]
    message = r"updates fp64, .* not torch.float8_e4m3fn \(the parameter head.weight\)"
    with pytest.raises(chunkc.UnsupportedError, match=message):
        optimizer(named)
    frozen = nn.Parameter(bad, requires_grad=False)
    made = optimizer([nn.Parameter(torch.ones(3)), frozen])
    before = [p.detach().clone() for p in made.param_groups[0]["params"]]
    for parameter in made.param_groups[0]["params"]:
        parameter.requires_grad_()
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(chunkc.UnsupportedError, match=r"float8_e4m3fn \(parameter 1 of parameter group 0 of shape"):
        made.step()
    assert torch.equal(before[0], made.param_groups[0]["params"][0])


def test_a_frozen_parameter_is_refused_at_the_step_once_it_is_trained() -> None:
    half = nn.Parameter(torch.ones(3, dtype=FP16), requires_grad=False)
    optimizer = chunkc.optim.AdamW([half], master_weights=False)
    half.requires_grad_()
    half.grad = torch.ones(3, dtype=FP16)
    with pytest.raises(chunkc.OptionsError, match=r"float16 parameters need master_weights=True.*parameter 0"):
        optimizer.step()


def test_lamb_s_dtypes_are_named() -> None:
    with pytest.raises(chunkc.UnsupportedError, match=r"LAMB updates fp32, bf16 and fp16, not torch\.float64"):
        chunkc.optim.LAMB([nn.Parameter(torch.ones(3, dtype=FP64))])


# ---------------------------------------------------------------- parameter groups and saved states


@pytest.mark.parametrize("name", KINDS)
def test_groups_and_what_is_printed_are_torch_s(name: str) -> None:
    ours, theirs = KINDS[name]
    settings: dict[str, Any] = {"maximize": True, "foreach": False, "fused": None, "differentiable": False}
    for arguments in ({}, settings):
        mine, other = (
            ours([nn.Parameter(torch.ones(3))], **arguments),
            theirs([nn.Parameter(torch.ones(3))], **arguments),
        )
        assert repr(mine) == repr(other)
        assert mine.defaults == other.defaults
        assert mine.state_dict()["param_groups"] == other.state_dict()["param_groups"]


SAVED: list[tuple[str, dict[str, Any]]] = [("AdamW", {"amsgrad": True}), ("Adam", {}), ("SGD", {"momentum": 0.9})]


@pytest.mark.parametrize("dtype", [FP32, FP64, torch.complex64], ids=str)
@pytest.mark.parametrize(("name", "settings"), SAVED, ids=str)
def test_states_go_both_ways(name: str, settings: dict[str, Any], dtype: torch.dtype) -> None:
    """Saved by one, loaded by the other, which goes on as the first does."""
    ours, theirs = KINDS[name]

    def step(parameter: Tensor, optimizer: torch.optim.Optimizer, number: int) -> None:
        parameter.grad = torch.randn(20, dtype=dtype, generator=torch.Generator().manual_seed(number))
        optimizer.step()

    for saver, loader in ((ours, theirs), (theirs, ours)):
        first = nn.Parameter(torch.ones(20, dtype=dtype))
        one = saver([first], lr=0.1, **settings)
        for number in range(3):
            step(first, one, number)
        second = nn.Parameter(first.detach().clone())
        other = loader([second])
        other.load_state_dict(through_a_file(one.state_dict()))
        assert other.state[second].keys() >= one.state[first].keys() - {"step"}
        for number in range(3, 6):
            step(first, one, number)
            step(second, other, number)
        torch.testing.assert_close(second, first, rtol=1e-5, atol=1e-6)
        assert other.param_groups[0]["lr"] == 0.1


def test_a_state_without_the_largest_moment_is_refused_where_a_group_uses_it() -> None:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    plain, amsgrad = chunkc.optim.AdamW([parameter]), chunkc.optim.AdamW([parameter], amsgrad=True)
    plain.step()
    amsgrad.step()
    saved = plain.state_dict()
    saved["param_groups"][0]["amsgrad"] = True
    with pytest.raises(chunkc.OptionsError, match="lacks max_exp_avg_sq"):
        plain.load_state_dict(saved)
    saved = amsgrad.state_dict()
    saved["param_groups"][0]["amsgrad"] = False
    plain.load_state_dict(saved)
    assert "max_exp_avg_sq" not in plain.state[parameter]


def test_a_group_saved_before_these_arguments_were_has_the_optimizer_s() -> None:
    model = MLP()
    optimizer = chunkc.optim.AdamW(model.parameters())
    saved = optimizer.state_dict()
    for name in ("amsgrad", "decoupled_weight_decay", "foreach", "capturable", "differentiable", "fused", "maximize"):
        del saved["param_groups"][0][name]
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0].keys() == chunkc.optim.AdamW(MLP().parameters()).param_groups[0].keys()
    assert optimizer.param_groups[0]["decoupled_weight_decay"] is True


def test_an_adam_s_state_makes_no_adam_of_adamw() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = chunkc.optim.AdamW([parameter])
    optimizer.load_state_dict(torch.optim.Adam([nn.Parameter(torch.ones(3))], weight_decay=0.1).state_dict())
    assert optimizer.param_groups[0]["decoupled_weight_decay"] is True


def test_arguments_without_effect_are_said_once(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    monkeypatch.setattr(stepping, "_told", set())
    with caplog.at_level(logging.INFO, logger="chunkc"):
        for _ in range(2):
            optimizer = chunkc.optim.AdamW([nn.Parameter(torch.ones(3))], capturable=True, fused=True)
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "foreach": True, "fused": None})
    told = [record.getMessage() for record in caplog.records if "has no effect" in record.getMessage()]
    assert [message.split("=")[0] for message in told] == ["fused", "capturable", "foreach"]
