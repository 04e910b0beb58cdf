"""Models of the ladder on ranks, in each stage, with homes in RAM and on disks; see `ladder_cases`."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_ranks import ranks

NAMES = ("gpt2", "bert", "vit", "llama", "mixtral", "t5")


@pytest.mark.second_tier
def test_a_model_of_the_ladder(tmp_path: Path) -> None:
    ranks(tmp_path, "few", script="ladder_cases.py")


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_the_ladder(name: str, num_ranks: int, tmp_path: Path) -> None:
    ranks(tmp_path, name, num_ranks=num_ranks, script="ladder_cases.py")
