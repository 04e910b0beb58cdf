"""What any user's loop has, on ranks: see `loop_cases` for what they do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from run_ranks import ranks

LOOPS = ("scaler", "scaler in step", "lamb", "lamb beside", "forward", "both", "backward", "undone")


def check_as_one_process(found: list[dict[str, Any]]) -> None:
    for rank in found:
        for run in rank["runs"]:
            assert run["losses"] == pytest.approx(rank["expected"], rel=1e-6)
            assert run["difference"] < 1e-6
        assert len({run["bits"] for run in rank["runs"]}) == 1, "a budget or a stage changed the result"


@pytest.mark.second_tier
def test_loops_of_all_kinds_train_as_in_one_process(tmp_path: Path) -> None:
    """A loss scale that overflows on one rank, norms of whole tensors, updates beside forward and backward."""
    loops = [loop for loop in LOOPS if loop != "both"]  # of LAMB it is in "lamb beside"
    for found in ranks(tmp_path, *loops, script="loop_cases.py").values():
        check_as_one_process(found)


@pytest.mark.slow
def test_loops_of_all_kinds_train_as_in_one_process_on_four_ranks(tmp_path: Path) -> None:
    for found in ranks(tmp_path, *LOOPS, num_ranks=4, script="loop_cases.py").values():
        check_as_one_process(found)
