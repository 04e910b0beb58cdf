"""What is opened for a device; and how torch's CUDA allocator is configured, as far as plans depend on it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from chunkc.runtime.homes import DiskHome, MemoryHome
from chunkc.runtime.open_compute import open_compute, splits_exactly


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64, expandable_segments:true"}, True),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, False),
        ({"PYTORCH_ALLOC_CONF": "", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, False),
    ],
)
def test_only_expandable_segments_split_large_blocks_exactly(environment: dict[str, str], expected: bool) -> None:
    assert splits_exactly(environment) is expected


def test_homes_of_a_cpu(tmp_path: Path) -> None:
    for home, everything, kinds in (
        ("cpu", True, (MemoryHome, type(None))),
        (f"disk:{tmp_path}", True, (DiskHome, type(None))),
        (f"disk:{tmp_path}", False, (MemoryHome, DiskHome)),
    ):
        _, arena = open_compute(torch.device("cpu"), home, everything)
        assert (type(arena.home), type(arena.state_home)) == kinds
