"""`bench/plans/planning.py` in small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "plans" / "planning.py"


@pytest.mark.slow
def test_a_case_is_planned_alike_in_each_round(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    command = [sys.executable, str(SCRIPT), "--small", "--rounds", "2", "--out", str(out)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (found,) = json.loads(out.read_text())["cases"]
    assert found["digest"] in shown
    assert all(found[name] > 0 for name in ("first_s", "dry_run_s", "plans_s", "step_s"))
