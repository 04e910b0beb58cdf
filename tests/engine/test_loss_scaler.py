"""The loss scale, beside what DeepSpeed's own classes gave (`tests/golden/deepspeed.json`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import chunkc
from chunkc.engine import DynamicLossScaler, LossScaler

GOLDEN = json.loads((Path(__file__).resolve().parents[1] / "golden" / "deepspeed.json").read_text())


def made(arguments: dict[str, Any]) -> DynamicLossScaler:
    return DynamicLossScaler(
        2.0**16,
        window=arguments["scale_window"],
        min_scale=arguments["min_scale"],
        hysteresis=arguments["delayed_shift"],
        consecutive=arguments["consecutive_hysteresis"],
    )


@pytest.mark.parametrize("case", GOLDEN["scalers"], ids=lambda case: case["overflows"])
def test_scales_are_deepspeeds(case: dict[str, Any]) -> None:
    scaler, scales = made(case["arguments"]), []
    for step in case["overflows"]:
        scaler.update(step == "o")
        scales.append(scaler.loss_scale)
    assert scales == case["scales"]


def test_it_is_an_error_at_the_minimum() -> None:
    scaler = DynamicLossScaler(4.0, min_scale=2.0, hysteresis=1)
    scaler.update(True)
    assert scaler.loss_scale == 2
    before = scaler.state_dict()
    with pytest.raises(chunkc.ChunkcError, match="loss scale is at its minimum, 2"):
        scaler.update(True)
    assert scaler.state_dict() == before


def test_state_goes_on_where_it_was() -> None:
    case = GOLDEN["scalers"][1]
    scaler = made(case["arguments"])
    for step, scale in zip(case["overflows"], case["scales"], strict=True):
        state = json.loads(json.dumps(scaler.state_dict()))
        scaler = made(case["arguments"])
        scaler.load_state_dict(state)
        scaler.update(step == "o")
        assert scaler.loss_scale == scale


def test_the_state_of_another_kind_is_refused() -> None:
    scaler = LossScaler(8.0)
    with pytest.raises(chunkc.OptionsError, match="loss scaler"):
        scaler.load_state_dict(DynamicLossScaler().state_dict())
    assert scaler.loss_scale == 8


def test_a_static_scale_stays() -> None:
    scaler = LossScaler(8.0)
    scaler.update(True)
    assert scaler.loss_scale == 8
