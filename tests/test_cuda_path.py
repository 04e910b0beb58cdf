"""Training end to end on a fake GPU: host, computation and copies in three orders, the optimizer by Triton interpreted.

The cases are in `cuda_path_cases.py` and run in a process of their own. What needs a real GPU is in `tests/gpu`.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("cuda_path_cases.py")
CASES = [
    node.name
    for node in ast.parse(SCRIPT.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
]
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable[[str], str]]:
    """Runs a case where Triton is interpreted; returns why it failed, or ""."""
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(SCRIPT)]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def run(name: str) -> str:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{name}\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield run
        process.stdin.close()


@pytest.mark.second_tier
@pytest.mark.parametrize("name", CASES)
def test_on_a_fake_gpu(name: str, interpreted: Callable[[str], str]) -> None:
    failure = interpreted(name)
    assert not failure, failure


def test_a_failing_case_is_reported(interpreted: Callable[[str], str]) -> None:
    assert "KeyError" in interpreted("no such case")
