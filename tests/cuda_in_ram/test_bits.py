"""Losses and weights on late streams, with arithmetic: the same bits under every budget, home and place of updates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import cuda_in_ram
import pytest
import torch
from device_gpt import SMALL, Trained, smallest_budget, train

from chunkc.kernels import elementwise_triton

pytestmark = pytest.mark.arithmetic

HUGE = 1 << 34


@pytest.fixture(autouse=True)
def large_blocks() -> Iterator[None]:
    """Triton's interpreter takes its time per block."""
    with mock.patch.object(elementwise_triton, "BLOCK", 1 << 16):
        yield


def different(found: Trained, expected: Trained) -> list[str]:
    return [
        f"{what} {i}"
        for what in ("losses", "weights")
        for i, pair in enumerate(zip(getattr(found, what), getattr(expected, what), strict=True))
        if not torch.equal(*pair)
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(("home", "update_on"), [("cpu", "device"), ("cpu", "cpu"), ("disk", "device")])
def test_the_budget_changes_no_bit(dtype: torch.dtype, home: str, update_on: str, tmp_path: Path) -> None:
    where = home if home == "cpu" else f"disk:{tmp_path}"
    expected = train(SMALL, dtype, HUGE, update_on=update_on)
    assert expected.losses[-1] != expected.losses[0]
    budget_nbytes = smallest_budget(SMALL, dtype)
    for seed in (1, 2):
        with cuda_in_ram.choose(late=seed):
            waits = cuda_in_ram.num_waits()
            found = train(SMALL, dtype, budget_nbytes, home=where, update_on=update_on)
            assert cuda_in_ram.num_waits() > waits
        assert not different(found, expected)
        assert found.report.measured_peak_nbytes <= budget_nbytes


@pytest.mark.slow
def test_a_wait_that_is_missing_shows() -> None:
    """Waits of one stream for another are left out one at a time, until one changes a bit; many do not."""
    shape = SMALL | {"layers": 2}
    budget_nbytes = smallest_budget(shape, torch.float32)
    expected = train(shape, torch.float32, HUGE, steps=2)
    with cuda_in_ram.choose(late=1, late_us=0):
        before = cuda_in_ram.num_waits()
        assert not different(train(shape, torch.float32, budget_nbytes, steps=2), expected)
        num_waits = cuda_in_ram.num_waits() - before
    for wait in range(1, num_waits + 1, 3):
        with cuda_in_ram.choose(late=1, late_us=0, drop_wait=wait):
            if different(train(shape, torch.float32, budget_nbytes, steps=2), expected):
                return
    raise AssertionError(f"none of {num_waits} waits shows when it is missing")
