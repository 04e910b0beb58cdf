"""The list of planted faults fits the sources: each can be planted, and the tests that should catch it exist.

`python tests/mutations/run.py` plants them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from file_modules import load

ROOT = Path(__file__).resolve().parents[2]
MUTATIONS = load(Path(__file__).with_name("run.py")).mutations()


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_fault_can_be_planted_in_one_line(mutation) -> None:  # type: ignore[no-untyped-def]
    source = (ROOT / mutation.file).read_text()
    planted = mutation.planted(source)
    assert len(planted.splitlines()) == len(source.splitlines())
    compile(planted, mutation.file, "exec")
    assert all((ROOT / path).exists() for path in mutation.tests)


def test_the_list_has_no_name_twice_and_fifty_faults() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 50
