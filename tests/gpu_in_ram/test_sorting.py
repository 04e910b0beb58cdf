"""Operators that sort, index and scatter take what rules say (`passes/memory/scratch/cuda_sorting.py`)."""

from __future__ import annotations

import pytest
import torch
from device_process import on_a_device
from device_sorting import FAMILIES, others

SLACK = {"embeddings": 0, "int32": 0.02, "places": 0, "sorts": 0.02}
"""What rules may count too much: of other dtypes than int64 CUB's tiles are bounded."""


@pytest.mark.parametrize("name", FAMILIES)
def test_to_the_byte(name: str) -> None:
    assert not others(name, slack=SLACK[name])


@pytest.mark.parametrize("capability", [75, 80, 89])
def test_on_other_generations(capability: int) -> None:
    """Which sort in blocks of other sizes."""
    script = f"from device_sorting import others; print(sum((others(n, slack=s) for n, s in {SLACK}.items()), []))"
    found = on_a_device(f"capability={capability}", script, PYTORCH_ALLOC_CONF="expandable_segments:True")
    assert found.strip() == "[]"


@pytest.mark.parametrize("name", ["places"])
def test_no_more_in_deterministic_code(name: str) -> None:
    """There, all that is written by index is sorted."""
    torch.use_deterministic_algorithms(True)
    try:
        assert not others(name, slack=1)
    finally:
        torch.use_deterministic_algorithms(False)
