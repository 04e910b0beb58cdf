"""Runs a suite in small form and looks at what it wrote, for tests."""

from __future__ import annotations

import io
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import run
from report import markdown
from rich.console import Console


def run_small(suite: str, folder: Path) -> list[dict[str, Any]]:
    """The suite's sections, as they were written to `folder`; also made into Markdown.

    Raises:
        AssertionError: the run is not complete, chunkc failed in it, or a section is not shown.
        SubjectFailed: see the suite.
    """
    out = folder / f"{suite}.json"
    run.run_suite(suite, is_small=True, out=out, console=Console(file=io.StringIO()), now=datetime.now(UTC))
    result = json.loads(out.read_text())
    assert result["is_complete"], f"{suite} is not complete"
    assert not run.failures(result), run.failures(result)
    text = markdown(result)
    assert all(section["title"] in text for section in result["sections"]), text
    return result["sections"]


def medians(section: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Collect every metric and the note by the row's first label."""
    return {
        next(iter(row["labels"].values())): {name: metric["median"] for name, metric in row["metrics"].items()}
        | {"note": row["note"]}
        for row in section["rows"]
    }
