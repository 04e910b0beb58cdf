"""Meshes of two dimensions, scalars, models from the meta device: see `mesh_cases` for what they do."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_ranks import ranks


@pytest.mark.second_tier
def test_two_ranks_with_copies_or_random_numbers_or_an_overflow(tmp_path: Path) -> None:
    """In one go: importing PyTorch takes longer than each of them."""
    ranks(tmp_path, "copies", "drops", "overflow_behind_a_scalar", script="mesh_cases.py")


@pytest.mark.slow
def test_two_rows_of_two_ranks_train_as_one_process_does(tmp_path: Path) -> None:
    ranks(tmp_path, "copies", num_ranks=4, script="mesh_cases.py")
