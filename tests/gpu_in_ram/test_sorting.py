"""Operators that sort, index and scatter take no more than rules say, and half of it at least.

The rules are those of `passes/memory/scratch/cuda_sorting.py` and `cuda_indexing.py`.
"""

from __future__ import annotations

import pytest
import torch
from device_process import on_a_device
from device_sorting import FAMILIES, others


@pytest.mark.parametrize("name", FAMILIES)
def test_no_more_than_rules_say(name: str) -> None:
    assert not others(name)


@pytest.mark.parametrize("capability", [75, 80, 89])
def test_on_other_generations(capability: int) -> None:
    """Which sort in blocks of other sizes."""
    script = "from device_sorting import FAMILIES, others; print(sum(map(others, FAMILIES), []))"
    found = on_a_device(f"capability={capability}", script, PYTORCH_ALLOC_CONF="expandable_segments:True")
    assert found.strip() == "[]"


def test_in_deterministic_code() -> None:
    """There, all that is written by index is sorted."""
    torch.use_deterministic_algorithms(True)
    try:
        assert not others("places")
    finally:
        torch.use_deterministic_algorithms(False)
