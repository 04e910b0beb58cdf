"""Losses and weights of the end-to-end ladder on late streams: small budgets against an unlimited one.

With arithmetic. Each model trains in a way of its own, so that together they have every home, place and time of
updates, and dtype. Updates are the CPU's where nothing else is said, which is quick: Triton's kernels are interpreted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cuda_in_ram
import pytest
import torch
from device_ladder import NOT_CAPTURED, LadderRun, in_the_smallest_budget, train
from zoo import LADDER

pytestmark = pytest.mark.arithmetic

HUGE = 1 << 34
BF16, FP16 = torch.bfloat16, torch.float16
OVERFLOWS = 2.0**24

AS_ON_THE_CPU = ("convnext", "resnet", "unet", "lstm_cells")
"""Eager code of these has the bits that the CPU has, too: no attention, and no dropout."""

WAYS: dict[str, dict[str, Any]] = {
    "convnext": {},
    "resnet": {"home": "disk", "update_on": "device"},
    "unet": {"overlap": "forward"},
    "lstm_cells": {"overlap": "both"},
    "dropout": {"update_on": "device"},
    "short_gpt": {"dtype": BF16},
    "t5": {"overlap": "backward"},
    "gpt2": {"dtype": BF16, "home": "disk", "update_on": "device"},
    "mixtral": {"dtype": BF16, "overlap": "both"},
    "gpt2_dropout": {"dtype": FP16, "loss_scale": OVERFLOWS},
    "bert": {"autocast": BF16},
    "bert_dropout": {"overlap": "both"},
    "vit": {"dtype": BF16, "overlap": "forward"},
    "llama": {"dtype": BF16, "overlap": "backward"},
    "llama_tied": {"dtype": FP16, "loss_scale": 1024.0, "home": "disk", "update_on": "device"},
    "convnet": {"autocast": BF16},
    "byte_gpt": {"update_on": "device", "overlap": "backward"},
    "frozen_mlp": {"update_on": "device", "dtype": BF16},
    "called_twice": {"autocast": BF16, "overlap": "forward"},
    "encoder": {"autocast": FP16, "loss_scale": OVERFLOWS},
    "sometimes_unused": {"overlap": "forward"},
    "graph_breaks": {"update_on": "device"},
    "breaks_in_loop": {"overlap": "both"},
    "big_embedding": {"home": "disk", "update_on": "device"},
    "whisper": {"autocast": BF16},
    "clip": {"dtype": FP16, "loss_scale": 1024.0},
    "checkpointed_gpt": {"home": "disk", "update_on": "device", "overlap": "backward"},
    "autocast_gpt": {"overlap": "both"},
    "autocast_convnet": {"home": "disk", "update_on": "device"},
    "odd_layouts": {"update_on": "device"},
}
"""How each model trains in eager code."""

INDUCTOR = ("frozen_mlp",)
"""Triton's kernels are interpreted, program by program."""


def assert_same(found: LadderRun, expected: LadderRun) -> None:
    assert all(map(torch.equal, found.losses, expected.losses))
    assert all(map(torch.equal, found.weights, expected.weights))


def test_all_of_the_ladder_is_here() -> None:
    assert set(WAYS) == set(LADDER) - {NOT_CAPTURED}


@pytest.mark.parametrize(
    ("name", "codegen"), [*((name, "eager") for name in WAYS), *((name, "inductor") for name in INDUCTOR)]
)
def test_the_budget_changes_no_bit(name: str, codegen: str, tmp_path: Path) -> None:
    case = LADDER[name]
    how = {"update_on": "cpu"} | (WAYS[name] if codegen == "eager" else {})
    expected = train(case, HUGE, codegen, **how | {"home": "cpu"})
    assert all(loss.isfinite() for loss in expected.losses)
    assert expected.losses[0] != expected.losses[1]
    if how.get("home") == "disk":
        how["home"] = f"disk:{tmp_path}"
    with cuda_in_ram.choose(late=1):
        found, budget_nbytes = in_the_smallest_budget(case, codegen, **how)
    assert_same(found, expected)
    assert found.report.measured_peak_nbytes <= budget_nbytes
    roomy_nbytes = (budget_nbytes + expected.report.predicted_peak_nbytes) // 2
    if roomy_nbytes > budget_nbytes:
        with cuda_in_ram.choose(late=2):
            found = train(case, roomy_nbytes, codegen, **how)
        assert_same(found, expected)
        assert found.report.measured_peak_nbytes <= roomy_nbytes
    if codegen == "eager" and name in AS_ON_THE_CPU:
        assert_same(found, train(case, HUGE, device="cpu", **how))
