"""Late copies change no bit while every wait is there."""

from __future__ import annotations

import random
from typing import Any

import pytest
from harness import (
    Result,
    assert_same_training,
    everything_fits,
    minimum_nbytes,
    train,
)
from late_tiers import Factory, LateTier, tier_of_new_sessions
from zoo import CASES

from chunkc.runtime.device.tier import CpuTier

pytestmark = pytest.mark.timeout(120)


NAME = "short_gpt"


CASE = CASES[NAME]


def random_delays(seed: int) -> Factory:
    """Worker threads that sleep 0 to 5 ms before every copy."""
    generator = random.Random(seed)
    return lambda: CpuTier(delay=lambda: generator.uniform(0, 0.005))


def train_late(factory: Factory, **options: Any) -> Result:
    with tier_of_new_sessions(factory):
        return train(CASE, debug=True, whole_graph="never", **options)


@pytest.mark.second_tier
@pytest.mark.parametrize(
    ("factory", "home"),
    [(LateTier, "cpu"), (LateTier, "disk"), (random_delays(0), "cpu"), (random_delays(1), "disk")],
    ids=["late-cpu", "late-disk", "random-cpu", "random-disk"],
)
def test_late_copies_change_no_bit_under_the_minimum(factory: Factory, home: str) -> None:
    """Three steps with many chunks, each in its slot only while it is needed."""
    result = train_late(factory, memory_budget=minimum_nbytes(NAME, home), home=home)
    assert result.num_chunks >= 3
    assert_same_training(result, everything_fits(NAME))


@pytest.mark.second_tier
@pytest.mark.parametrize("factory", [LateTier, random_delays(2)], ids=["late", "random"])
def test_late_copies_change_no_bit_where_much_is_under_way_at_once(factory: Factory) -> None:
    """Small chunks and room to spare: the more prefetches and write-backs overlap."""
    budget = everything_fits(NAME).predicted_peak_nbytes * 7 // 10
    result = train_late(factory, memory_budget=budget, chunk_size="64KiB")
    assert result.num_chunks >= 8
    assert_same_training(result, everything_fits(NAME))
