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
@pytest.mark.parametrize("case", ["delayed", "every_wait"])
def test_exchanges_that_come_late(case: str, tmp_path: Path) -> None:
    """Random delays change no bit, and every wait matters."""
    found_by(tmp_path, case)


@pytest.mark.second_tier
def test_every_agreement_matters(tmp_path: Path) -> None:
    """Where it is left out, some rank does not come to what the tests of it expect."""
    cases = [f"{how} that {agreement}" for agreement in AGREEMENTS for how in ("with", "without")]
    found = found_by(tmp_path, *cases)
    for agreement, expected in AGREEMENTS.items():
        told, untold = ([rank["outcome"] for rank in found[f"{how} that {agreement}"]] for how in ("with", "without"))
        assert all(expected in outcome for outcome in told), told
        assert not all(expected in outcome for outcome in untold), untold
