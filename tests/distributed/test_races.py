"""Exchanges that come at any time; each wait and each agreement left out once. See `race_cases` for what ranks do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from run_ranks import ranks

AGREEMENTS = {
    "of models": "ranks differ in zero_stage: rank 1 of 2",
    "of a compilation": "ranks differ in the options: rank 1 of 2",
    "of a phase": "ranks differ in the phase: rank 1 of 2",
    "of what is outdated": "changed",
    "of a plan": "ranks differ in the plan: rank 1 of 2",
}
"""What all ranks come to where they agree."""


def found_by(folder: Path, *cases: str) -> dict[str, list[dict[str, Any]]]:
    return ranks(folder, *cases, script="race_cases.py")


@pytest.mark.second_tier
def test_random_delays_of_every_exchange_change_no_bit(tmp_path: Path) -> None:
    for rank in found_by(tmp_path, "delayed")["delayed"]:
        of_stages = [run for stage in ("1", "2", "3") for run in rank[stage]]
        assert len(of_stages) == 6
        assert all(run == of_stages[0] for run in of_stages)


@pytest.mark.second_tier
def test_every_wait_for_an_exchange_matters(tmp_path: Path) -> None:
    """Each left out once: NaN or stale data in the result of some rank."""
    first, *others = found_by(tmp_path, "every_wait")["every_wait"]
    for stage, found in first.items():
        if stage == "seconds":
            continue
        assert found["repeatable"]
        assert found["waits"] > 6, "in forward and backward"
        seen_by_none = set(found["unseen"]).intersection(*(rank[stage]["unseen"] for rank in others))
        assert not seen_by_none, stage


@pytest.mark.second_tier
def test_every_agreement_matters(tmp_path: Path) -> None:
    """Where it is left out, some rank does not come to what the tests of it expect."""
    cases = [f"{how} that {agreement}" for agreement in AGREEMENTS for how in ("with", "without")]
    found = found_by(tmp_path, *cases)
    for agreement, expected in AGREEMENTS.items():
        told, untold = ([rank["outcome"] for rank in found[f"{how} that {agreement}"]] for how in ("with", "without"))
        assert all(expected in outcome for outcome in told), told
        assert not all(expected in outcome for outcome in untold), untold
