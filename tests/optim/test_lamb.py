"""LAMB: the paper's update. That it has the same bits everywhere is in `test_formats`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import HUGE, TINY, compile_case, differences, take_step
from lamb_reference import StraightforwardLamb
from optim_models import results
from plain_modules import Stack
from torch import nn
from zoo import Case, floats

import chunkc
from chunkc.kernels.lamb_formats import LambHyper
from chunkc.passes.planning import updates as update_planning

WIDTH = 160
STEPS = 3


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
    """Biases without weight decay, one weight with a rate of its own, and one that adapts without weight decay."""
    weights = [layer.weight for layer in model.layers]  # type: ignore[union-attr]
    return [
        {"params": [layer.bias for layer in model.layers], "weight_decay": 0.0},  # type: ignore[union-attr]
        {"params": weights[:2]},
        {"params": weights[2:3], "lr": 0.03, "betas": (0.8, 0.95)},
        {"params": weights[3:], "weight_decay": 0.0, "always_adapt": True},
    ]


def lamb(model: nn.Module) -> chunkc.optim.LAMB:
    return chunkc.optim.LAMB(groups(model), lr=1e-2, weight_decay=0.1)


def run(budget_nbytes: int) -> list[Any]:
    model, compiled = compile_case(case(), memory_budget=budget_nbytes, **OPTIONS)
    optimizer = lamb(model)
    for step in range(STEPS):
        take_step(compiled(**case().batch(step)), optimizer)
    return results(model, optimizer)


@pytest.mark.second_tier
def test_tiles_in_wrong_places_would_change_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `test_formats` relies on: it sees where sums are cut."""
    expected = run(HUGE)
    for name in ("MIN_TILE_NUMEL", "MAX_TILE_NUMEL"):
        monkeypatch.setattr(update_planning, name, 10_000)
    assert differences(run(minimum()), expected)


def hyper(group: dict[str, Any], step: int) -> LambHyper:
    (beta1, beta2), decay = group["betas"], group["weight_decay"]
    return LambHyper(group["lr"], beta1, beta2, group["eps"], decay, step, adapt=bool(decay or group["always_adapt"]))


@pytest.mark.second_tier
def test_a_hundred_steps_follow_the_paper() -> None:
    of = case()
    model, compiled = compile_case(of, memory_budget=minimum(), **OPTIONS)
    optimizer, parameters = lamb(model), list(model.parameters())
    expected = StraightforwardLamb([p.detach() for p in parameters])
    group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
    for step in range(1, 101):
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
