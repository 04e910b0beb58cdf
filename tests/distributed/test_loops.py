"""What any user's loop has, on ranks: see `loop_cases` for what they do."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_ranks import ranks

LOOPS = ("scaler", "scaler in step", "lamb", "lamb beside", "forward", "both", "backward", "undone")


@pytest.mark.second_tier
def test_loops_of_all_kinds_train_as_in_one_process(tmp_path: Path) -> None:
    """A loss scale that overflows on one rank, norms of whole tensors, updates beside forward and backward."""
    elsewhere = ("lamb", "forward", "both")  # LAMB is in `test_meshes`, updates beside both in "lamb beside"
    ranks(tmp_path, *(loop for loop in LOOPS if loop not in elsewhere), script="loop_cases.py")


@pytest.mark.slow
def test_loops_of_all_kinds_train_as_in_one_process_on_four_ranks(tmp_path: Path) -> None:
    ranks(tmp_path, *LOOPS, num_ranks=4, script="loop_cases.py")
