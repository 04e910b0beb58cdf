"""A run that is killed at any moment goes on with the bits of one that never was."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def run(*arguments: str) -> dict[str, Any]:
    program = str(Path(__file__).with_name("killed_runs.py"))
    done = subprocess.run([sys.executable, program, *arguments], text=True, capture_output=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["never"]  # and each step was said once
    return found


@pytest.mark.second_tier
def test_at_every_call_of_the_system(tmp_path: Path) -> None:
    found = run("calls", str(tmp_path))
    assert found["num_kills"] > 80
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
