"""Losses and weights of the end-to-end ladder on late streams: the smallest budget against an unlimited one.

With arithmetic. Updates are the CPU's, which is quick; `test_bits.py` has Triton's.
"""

from __future__ import annotations

import cuda_in_ram
import pytest
import torch
from device_ladder import LadderRun, in_the_smallest_budget, train
from zoo import LADDER

pytestmark = pytest.mark.arithmetic

HUGE = 1 << 34

AS_ON_THE_CPU = ("convnext", "resnet", "unet", "lstm_cells")
"""Eager code of these has the bits that the CPU has, too: no attention, and no dropout."""

EAGER = (*AS_ON_THE_CPU, "dropout", "short_gpt", "t5", "gpt2", "mixtral")

INDUCTOR = ("frozen_mlp",)
"""Triton's kernels are interpreted, program by program."""


def assert_same(found: LadderRun, expected: LadderRun) -> None:
    assert all(map(torch.equal, found.losses, expected.losses))
    assert all(map(torch.equal, found.weights, expected.weights))


@pytest.mark.parametrize(
    ("name", "codegen"), [*((name, "eager") for name in EAGER), *((name, "inductor") for name in INDUCTOR)]
)
def test_the_budget_changes_no_bit(name: str, codegen: str) -> None:
    case = LADDER[name]
    expected = train(case, HUGE, codegen, update_on="cpu")
    assert all(loss.isfinite() for loss in expected.losses)
    assert expected.losses[0] != expected.losses[1]
    with cuda_in_ram.choose(late=1):
        found, budget_nbytes = in_the_smallest_budget(case, codegen, update_on="cpu")
    assert_same(found, expected)
    assert found.report.measured_peak_nbytes <= budget_nbytes
    if codegen == "eager" and name in AS_ON_THE_CPU:
        assert_same(found, train(case, HUGE, device="cpu", update_on="cpu"))
