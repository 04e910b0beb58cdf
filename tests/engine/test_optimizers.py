"""Optimizers of a configuration: DeepSpeed's defaults, mistakes, and what a user is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_cases import config, engine, small_model
from optim_models import WIDTH, batch

import chunkc

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
second_tier = pytest.mark.second_tier


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"type": "Adamm"}, "optimizer.type is 'Adamm'; allowed: Adam, AdamW"),
        ({"type": "OneBitAdam"}, "optimizer.type is 'OneBitAdam'"),
        ({"type": "Adam", "params": {"learning_rate": 1}}, "unknown key 'optimizer.params.learning_rate'"),
        ({"type": "Adam", "params": {"beta": [0.9, 0.99]}}, "did you mean 'optimizer.params.betas'?"),
        ({"type": "Adam", "params": {"betas": [0.9]}}, "optimizer.params.betas is [0.9]"),
        ({"type": "Adam", "params": {"lr": -1}}, "optimizer.params.lr is -1"),
        ({"type": "Adam", "params": {"max_grad_norm": 1.0}}, "set the top-level key gradient_clipping"),
        ({"type": "Adam", "params": {"bias_correction": False}}, "bias_correction is False"),
        ({"type": "Lamb", "params": {"amsgrad": True}}, "amsgrad is True"),
        ({"type": "Lamb", "params": {"eps_inside_sqrt": True}}, "eps_inside_sqrt is True"),
        ({"type": "RMSprop", "params": {"alfa": 0.9}}, "did you mean 'optimizer.params.alpha'?"),
    ],
)
def test_mistakes_in_the_optimizer(section: dict[str, Any], message: str) -> None:
    with pytest.raises(chunkc.ChunkcError) as caught:
        engine(optimizer=section)
    assert message in str(caught.value)


OF_LAMB = {"eps": 1e-8, "weight_decay": 0.0, "always_adapt": True, "min_coeff": 0.01, "max_coeff": 10.0}


@pytest.mark.parametrize(
    ("name", "params", "kind", "values"),
    [
        ("Adam", {}, chunkc.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.0, "eps": 1e-8}),
        ("adam", {"adam_w_mode": False}, chunkc.optim.Adam, {"weight_decay": 0.0}),
        ("AdamW", {"adam_w_mode": False}, chunkc.optim.AdamW, {}),
        ("AdamW", {"amsgrad": True}, chunkc.optim.AdamW, {"amsgrad": True}),
        ("AdamW", {"torch_adam": True}, chunkc.optim.AdamW, {"weight_decay": 1e-2}),
        ("Adam", {"torch_adam": True, "adam_w_mode": False}, chunkc.optim.Adam, {"weight_decay": 0}),
        ("SGD", {"lr": 0.1, "momentum": 0.9}, chunkc.optim.SGD, {"momentum": 0.9, "nesterov": False}),
        ("RMSprop", {"alpha": 0.9}, torch.optim.RMSprop, {"alpha": 0.9}),
        ("Lamb", {}, chunkc.optim.LAMB, OF_LAMB),
        ("Lamb", {"max_coeff": 0.3}, chunkc.optim.LAMB, {"min_coeff": 0.01, "max_coeff": 0.3}),
        ("Lion", {}, chunkc.optim.Lion, {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.0}),
    ],
)
def test_optimizers_have_deepspeeds_defaults(
    name: str, params: dict[str, Any], kind: type, values: dict[str, Any]
) -> None:
    _, optimizer = engine(optimizer={"type": name, "params": params} if params else {"type": name})
    assert type(optimizer) is kind
    assert {name: optimizer.defaults[name] for name in values} == values


@second_tier
def test_adams_decay_is_told_apart_where_patrickstar_differs(caplog: pytest.LogCaptureFixture) -> None:
    for section, num_told in (({"weight_decay": 0.1}, 1), ({"weight_decay": 0.1, "adam_w_mode": False}, 1), ({}, 1)):
        engine(optimizer={"type": "Adam", "params": section}, use_cpu_embedding=False)
        assert len([r for r in caplog.records if "PatrickStar's does not" in r.getMessage()]) == num_told


@second_tier
def test_a_plain_optimizer_is_told_once_what_it_takes(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.compile(small_model(), backend="chunkc", options=config()["chunkc"])
    for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.AdamW):
        optimizer = kind(model.parameters(), lr=1e-3)
        model(batch()).backward()
        optimizer.step()
    (record,) = [r for r in caplog.records if "outside of the memory budget" in r.getMessage()]
    nbytes = 2 * 4 * WIDTH * WIDTH * 4
    assert f"torch.optim.AdamW keeps 512.00 KiB ({nbytes:,} bytes)" in record.getMessage()
    assert "chunkc.optim.AdamW keeps them at home" in record.getMessage()
