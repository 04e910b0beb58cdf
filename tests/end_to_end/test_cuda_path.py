"""Training end to end on a fake GPU: host, computation and copies in three orders, the optimizer by Triton interpreted.

The cases are in `cuda_path_cases.py`. What needs a real GPU is in `tests/gpu`.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from interpreting import interpret, needs_triton

SCRIPT = Path(__file__).with_name("cuda_path_cases.py")
CASES = [
    node.name
    for node in ast.parse(SCRIPT.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
]


@pytest.mark.second_tier
@needs_triton
@pytest.mark.parametrize("name", CASES)
def test_on_a_fake_gpu(name: str) -> None:
    interpret(SCRIPT, name)
