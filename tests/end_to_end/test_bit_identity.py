"""Losses, gradients and weights are the same bits: twice, in chunks of any size, and where a graph is run whole.

Under every budget: `tests/properties/test_ladder.py`.
"""

from __future__ import annotations

import pytest
from harness import (
    HUGE,
    assert_same_training,
    differences,
    everything_fits,
    minimum_nbytes,
    train,
)
from zoo import CASES


@pytest.mark.parametrize("name", [pytest.param("gpt2", marks=pytest.mark.slow), "byte_gpt", "big_embedding"])
def test_small_budgets_are_small(name: str) -> None:
    """The other tests mean something: the minimum is well below what everything takes."""
    assert minimum_nbytes(name) < 0.7 * everything_fits(name).predicted_peak_nbytes


@pytest.mark.second_tier
@pytest.mark.parametrize("name", ["byte_gpt", pytest.param("bert_dropout", marks=pytest.mark.slow)])
def test_a_budget_is_repeatable(name: str) -> None:
    """The same budget twice gives the same bits and the same plan; another seed does not."""
    nbytes = minimum_nbytes(name)
    first, again = (train(CASES[name], memory_budget=nbytes, steps=2, whole_graph="never") for _ in range(2))
    assert_same_training(first, again)
    assert first.predicted_peak_nbytes == again.predicted_peak_nbytes
    other = train(CASES[name], memory_budget=nbytes, steps=2, seed=1, whole_graph="never")
    assert differences(first.losses, other.losses)


def test_the_fast_path_trains_to_the_same_bits_without_code_generation() -> None:
    """Node by node, a graph run whole and the same graph in segments are the same operations."""
    result = train(CASES["byte_gpt"], memory_budget=HUGE, limit=False, whole_graph="auto")
    assert_same_training(result, everything_fits("byte_gpt"))
