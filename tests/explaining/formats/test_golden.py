"""Text, graph and diff of a small explanation, against files that a person has read.

To accept a change, delete the file under `tests/golden/` and run this file twice: the first run writes it and fails.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from synthetic import EVENTS, MIB, PLAN, large, measured, not_fitting, small

from chunkc.explaining.formats import diff, render_graph, render_text

GOLDEN = Path(__file__).resolve().parents[2] / "golden"

DUMPS = {
    "explain_fits.txt": lambda: render_text(small()),
    "explain_does_not_fit.txt": lambda: render_text(not_fitting()),
    "explain_measured.txt": lambda: render_text(small(measured=measured())),
    "explain_large.txt": lambda: render_text(large(12)),
    "explain_graph.py.txt": lambda: render_graph(small()),
    "explain_diff.txt": lambda: diff(
        small(),
        not_fitting(events=EVENTS[2:], home_nbytes=180 * MIB, plan_text=PLAN.replace("groups: [0]", "groups: none")),
    ),
}


@pytest.mark.parametrize("name", DUMPS)
def test_dumps_are_as_they_were(name: str) -> None:
    dump, path = DUMPS[name](), GOLDEN / name
    if not path.exists():
        path.write_text(dump)
        pytest.fail(f"{path} was missing and has been written: read it")
    assert dump == path.read_text()


def test_nothing_is_left_over() -> None:
    assert {path.name for path in GOLDEN.glob("explain_*")} == set(DUMPS)
