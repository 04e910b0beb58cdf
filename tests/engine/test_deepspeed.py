"""Schedules and loss scales, beside what classes of DeepSpeed gave (`tests/golden/deepspeed.json`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import chunkc
from chunkc.engine import DynamicLossScaler, LossScaler
from chunkc.engine.schedules import SCHEDULES, ScheduledLR, make_schedule

# --- schedules ---


GOLDEN = json.loads((Path(__file__).resolve().parents[1] / "golden" / "deepspeed.json").read_text())
NUM_GROUPS = 2


def optimizer() -> torch.optim.Optimizer:
    first, second = (nn.Parameter(torch.zeros(2)) for _ in range(NUM_GROUPS))
    return torch.optim.AdamW([{"params": [first]}, {"params": [second], "lr": 5e-4}], lr=1e-3)


def scheduled(case: dict[str, Any]) -> tuple[torch.optim.Optimizer, ScheduledLR]:
    made = optimizer()
    return made, ScheduledLR(made, make_schedule(case["type"], case["params"], NUM_GROUPS))


def seen(made: torch.optim.Optimizer) -> list[list[float]]:
    return [[group["lr"] for group in made.param_groups], [group["betas"][0] for group in made.param_groups]]


@pytest.mark.parametrize("case", GOLDEN["schedules"], ids=lambda case: f"{case['type']}-{len(case['params'])}")
def test_rates_and_momenta_are_deepspeeds_to_the_bit(case: dict[str, Any]) -> None:
    made, scheduler = scheduled(case)
    for values in case["values"]:
        assert seen(made) == values
        assert scheduler.get_last_lr() == values[0] or scheduler.last_epoch == 0
        made.step()
        scheduler.step()


def test_each_type_is_compared() -> None:
    assert {case["type"] for case in GOLDEN["schedules"]} == set(SCHEDULES)


@pytest.mark.parametrize("case", GOLDEN["schedules"][::4], ids=lambda case: case["type"])
def test_a_saved_scheduler_goes_on(case: dict[str, Any]) -> None:
    made, scheduler = scheduled(case)
    for _ in range(5):
        made.step()
        scheduler.step()
    state = json.loads(json.dumps(scheduler.state_dict()))
    groups = made.state_dict()
    made, scheduler = scheduled(case)
    scheduler.load_state_dict(state)
    made.load_state_dict(groups)
    for values in case["values"][5:]:
        assert seen(made) == values
        made.step()
        scheduler.step()


@pytest.mark.parametrize(
    ("kind", "params", "message"),
    [
        ("Warmup", {}, "scheduler.type is 'Warmup'; allowed: WarmupLR"),
        ("WarmupLR", {"warmup_step": 3}, "did you mean 'scheduler.params.warmup_"),
        ("WarmupLR", {"warmup_num_steps": 0}, "scheduler.params.warmup_num_steps is 0"),
        ("WarmupLR", {"warmup_type": "cubic"}, "scheduler.params.warmup_type is 'cubic'"),
        ("WarmupLR", {"warmup_max_lr": [1e-3]}, "has 1 values; the optimizer has 2 parameter groups"),
        ("WarmupDecayLR", {}, "scheduler.params.total_num_steps: Field required"),
        ("WarmupDecayLR", {"total_num_steps": "auto"}, 'scheduler.params.total_num_steps is "auto"'),
        ("OneCycle", {"cycle_max_lr": 1.0}, "scheduler.params.cycle_min_lr: Field required"),
    ],
)
def test_what_makes_no_sense_is_refused(kind: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(chunkc.OptionsError) as caught:
        make_schedule(kind, params, NUM_GROUPS)
    assert message in str(caught.value)


# --- loss scaler ---


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
