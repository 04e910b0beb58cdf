"""Batches whose shapes differ between ranks: see `shape_cases` for what they do."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_ranks import ranks


@pytest.mark.second_tier
@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_each_rank_has_shapes_of_its_own(num_ranks: int, tmp_path: Path) -> None:
    """Or slices of one batch whose size changes; another program, or a batch that does not fit, is an error of all
    ranks. All cases in one go: importing PyTorch takes longer than each of them."""
    cases = ("uneven", "sliced", "another_graph", "too_large_on_one")
    ranks(tmp_path, *cases, num_ranks=num_ranks, script="shape_cases.py")
