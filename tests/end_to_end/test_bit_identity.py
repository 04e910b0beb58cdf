"""Losses, gradients and weights are the same bits: twice, in chunks of any size, and where a graph is run whole.

Under every budget: `tests/properties/test_ladder.py`.
"""

from __future__ import annotations

import pytest
from harness import (
    everything_fits,
    minimum_nbytes,
)


@pytest.mark.parametrize("name", [pytest.param("gpt2", marks=pytest.mark.slow), "byte_gpt", "big_embedding"])
def test_small_budgets_are_small(name: str) -> None:
    """The other tests mean something: the minimum is well below what everything takes."""
    assert minimum_nbytes(name) < 0.7 * everything_fits(name).predicted_peak_nbytes
