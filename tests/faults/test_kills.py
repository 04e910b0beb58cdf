"""A run that is killed at any moment goes on with the bits of one that never was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import forked
import pytest


def run(*arguments: str) -> dict[str, Any]:
    done = forked.run(Path(__file__).with_name("killed_runs.py"), *arguments)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["never"]  # and each step was said once
    return found


@pytest.mark.second_tier
def test_at_every_call_of_the_system(tmp_path: Path) -> None:
    found = run("calls", str(tmp_path))
    assert found["num_kills"] > 40
    assert found["killed"] == found["never"]


@pytest.mark.second_tier
def test_at_a_few_moments(tmp_path: Path) -> None:
    found = run("moments", str(tmp_path), "5")
    assert found["killed"] == found["never"]


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_at_a_hundred_moments(tmp_path: Path) -> None:
    found = run("moments", str(tmp_path), "100")
    assert found["killed"] == found["never"]
    assert found["last"] > 100  # kills fell into steps and savings, and the run went on
