"""Models of the ladder on ranks, in each stage, with homes in RAM and on disks; see `ladder_cases`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from run_ranks import ranks

NUMBERS_NBYTES = 64  # as in `rank_cases`
NAMES = ("gpt2", "bert", "vit", "llama", "mixtral", "t5")


def check(found: list[dict[str, Any]]) -> None:
    for rank in found:
        for run in rank["runs"]:
            assert run["losses"] == pytest.approx(rank["expected"], rel=1e-6, abs=1e-6)
            assert run["difference"] < 1e-5
            measured, predicted = run["peaks"]
            assert measured - predicted <= NUMBERS_NBYTES, "less, where outputs are dropped before the next step"
            assert predicted <= run["budget"]
        assert len({run["bits"] for run in rank["runs"]}) == 1, "a budget, a stage or a home changed the result"
    num_ranks = len(found)
    for runs in zip(*(rank["runs"] for rank in found), strict=True):
        trained = runs[0]["trained"]
        assert sum(run["own"] for run in runs) == trained, "each rank has its part, and no more"
        assert max(run["own"] for run in runs) <= 1.1 * trained / num_ranks
        for run in runs:
            others = num_ranks - 1
            assert run["sent"]["gathers"] == others * (run["gathered"] + run["standing"])
            assert run["sent"]["scatters"] == trained - run["own"]
        of_all = sum(run["sent"]["gathers"] + run["sent"]["scatters"] for run in runs)
        times = of_all / (trained * (num_ranks - 1))
        if runs[0]["stage"] in (1, 2):
            assert times == pytest.approx(2, rel=0.01), "as plain data parallelism"
        assert times <= 3.03, "half as much more in stage 3"


@pytest.mark.second_tier
def test_a_model_of_the_ladder(tmp_path: Path) -> None:
    check(ranks(tmp_path, "few", script="ladder_cases.py")["few"])


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_the_ladder(name: str, num_ranks: int, tmp_path: Path) -> None:
    check(ranks(tmp_path, name, num_ranks=num_ranks, script="ladder_cases.py")[name])
