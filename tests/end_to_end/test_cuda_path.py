"""Training end to end on a fake GPU: host, computation and copies in three orders, the optimizer by Triton interpreted.

The cases are in `cuda_path_cases.py` and run in a process of their own. What needs a real GPU is in `tests/gpu`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from interpreting import asked, needs_triton

SCRIPT = Path(__file__).with_name("cuda_path_cases.py")
CASES = [
    node.name
    for node in ast.parse(SCRIPT.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
]
pytestmark = needs_triton


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable[[str], str]]:
    with asked(SCRIPT, warnings="ignore") as ask:
        yield ask


@pytest.mark.second_tier
@pytest.mark.parametrize("name", CASES)
def test_on_a_fake_gpu(name: str, interpreted: Callable[[str], str]) -> None:
    failure = interpreted(name)
    assert not failure, failure


@pytest.mark.second_tier
def test_a_failing_case_is_reported(interpreted: Callable[[str], str]) -> None:
    assert "KeyError" in interpreted("no such case")
