"""Cases run by ranks in processes of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import forked

CASES = Path(__file__).parents[1] / "distributed" / "rank_cases.py"
TIMEOUT_S = 400


def ranks(folder: Path, *cases: str, num_ranks: int = 2, script: str = CASES.name) -> dict[str, list[dict[str, Any]]]:
    """Run cases on ranks, and return by case the result of each rank; fails where a rank has raised what its case lets
    through."""
    done = forked.run(CASES.with_name(script), folder, num_ranks, TIMEOUT_S, *cases)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, list[dict[str, Any]]] = json.loads(done.stdout)
    for rank in (rank for of_ranks in found.values() for rank in of_ranks):
        assert "traceback" not in rank, rank["traceback"]
    return found
