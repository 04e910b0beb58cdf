"""LAMB and Lion: the papers' updates. That they have the same bits everywhere is in `test_formats`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from harness import TINY, compile_case
from lamb_reference import StraightforwardLamb
from optim_models import assert_close, copy_gradients
from plain_modules import Stack
from torch import nn
from zoo import Case, floats

import chunkc
from chunkc.kernels.lamb import LambHyper

WIDTH = 160


def case() -> Case:
    """Weights of 25,600 elements, two to a chunk: no multiple of a row of sums."""
    return Case("lamb stack", lambda: Stack(width=WIDTH), lambda seed: {"x": floats(seed, (4, WIDTH))})


OPTIONS: dict[str, Any] = {"whole_graph": "never", "chunk_size": 2 * WIDTH * WIDTH * 4}


def minimum() -> int:
    """The smallest budget where the optimizer, and with it the form of its states, is known before the first call."""
    model, compiled = compile_case(case(), memory_budget=TINY, **OPTIONS)
    optimizer = lamb(model)
    with pytest.raises(chunkc.BudgetError) as caught:
        compiled(**case().batch(0))
    assert optimizer.state_dict()["state"] == {}
    return caught.value.minimum_nbytes


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Biases without weight decay, and weights: one maximizes, one adapts without decay, and two within limits."""
    weights = [layer.weight for layer in model.layers]  # type: ignore[union-attr]
    return [
        {"params": [layer.bias for layer in model.layers], "weight_decay": 0.0},  # type: ignore[union-attr]
        {"params": weights[:1], "maximize": True},
        {"params": weights[1:2], "weight_decay": 0.0, "always_adapt": True},
        {"params": weights[2:3], "lr": 0.03, "betas": (0.8, 0.95), "max_coeff": 0.01},
        {"params": weights[3:], "lr": 1e-3, "min_coeff": 3.0, "eps": 1e-3},
    ]


def lamb(model: nn.Module) -> chunkc.optim.LAMB:
    return chunkc.optim.LAMB(groups(model), lr=1e-2, weight_decay=0.1)


def hyper(group: dict[str, Any], step: int) -> LambHyper:
    (beta1, beta2), decay = group["betas"], group["weight_decay"]
    limits = {name: group[name] for name in ("maximize", "min_coeff", "max_coeff")}
    adapt = bool(decay or group["always_adapt"])
    return LambHyper(group["lr"], beta1, beta2, group["eps"], decay, step, adapt=adapt, **limits)


def test_steps_follow_the_paper() -> None:
    of = case()
    model, compiled = compile_case(of, memory_budget=minimum(), **OPTIONS)
    optimizer, parameters = lamb(model), list(model.parameters())
    expected = StraightforwardLamb([p.detach() for p in parameters])
    group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
    for step in range(1, 31):
        compiled(**of.batch(step)).backward()
        before = [value.clone() for value in expected.values]
        hypers = [hyper(group_of[p], step) for p in parameters]
        expected.step([p.grad for p in parameters if p.grad is not None], hypers)
        optimizer.step()
        optimizer.zero_grad()
        for p, value, old in zip(parameters, expected.values, before, strict=True):
            torch.testing.assert_close(p.double(), value, rtol=0, atol=1e-6)
            assert not torch.equal(value, old)


def test_schedulers_and_groups_are_torch_s() -> None:
    model = Stack(width=WIDTH)
    optimizer = chunkc.optim.LAMB(model.layers[0].parameters())
    assert optimizer.defaults["eps"] == 1e-6
    assert optimizer.defaults["weight_decay"] == 0.01
    optimizer.add_param_group({"params": model.layers[1].parameters(), "lr": 1.0})
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [5e-4, 0.5]
    model(torch.ones(1, WIDTH)).backward()
    optimizer.step()
    scheduler.step()
    assert not optimizer.state_dict()["state"].keys() ^ range(4)
    with pytest.raises(chunkc.OptionsError, match="amsgrad"):
        optimizer.add_param_group({"params": model.layers[2].parameters(), "amsgrad": True})


# ---------------------------------------------------------------- Lion


@torch.no_grad()
def lion_step(
    parameter: torch.Tensor, mean: torch.Tensor, lr: float, betas: tuple[float, float], weight_decay: float
) -> None:
    """Algorithm 2 of arXiv:2302.06675, as the authors' `lion_pytorch.py` has it."""
    assert parameter.grad is not None
    parameter.mul_(1 - lr * weight_decay)
    update = mean * betas[0] + parameter.grad * (1 - betas[0])
    parameter.add_(update.sign_(), alpha=-lr)
    mean.mul_(betas[1]).add_(parameter.grad, alpha=1 - betas[1])


def test_lion_s_steps_follow_the_paper() -> None:
    settings: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.98), "weight_decay": 0.1}
    model = case().build()
    expected = copy.deepcopy(model)
    optimizer = chunkc.optim.Lion(model.parameters(), **settings)
    means = [torch.zeros_like(parameter) for parameter in expected.parameters()]
    for step in range(10):
        model(**case().batch(step)).backward()
        copy_gradients(model, expected)
        optimizer.step()
        optimizer.zero_grad()
        for parameter, mean in zip(expected.parameters(), means, strict=True):
            lion_step(parameter, mean, **settings)
    assert_close(model, expected)
    for parameter, mean in zip(model.parameters(), means, strict=True):
        torch.testing.assert_close(optimizer.state[parameter]["exp_avg"], mean)
