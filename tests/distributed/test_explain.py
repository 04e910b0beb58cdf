"""What `chunkc.explain` says of ranks is what ranks do; see `explain_cases` for what they run."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_ranks import ranks


@pytest.mark.second_tier
@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_plan_and_measure_what_was_explained(num_ranks: int, tmp_path: Path) -> None:
    ranks(tmp_path, "explained", num_ranks=num_ranks, script="explain_cases.py")
