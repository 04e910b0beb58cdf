"""What is opened for a device; and how torch's CUDA allocator is configured, as far as plans depend on it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

import chunkc.runtime.storage.open_compute
from chunkc.runtime.storage.homes import DiskHome, MemoryHome
from chunkc.runtime.storage.open_compute import open_compute, split_exactly


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "set"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, "set"),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, ""),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64, expandable_segments:true"}, ""),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, "warned"),
        ({"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}, "warned"),
        ({"PYTORCH_ALLOC_CONF": "", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, ""),
        (
            {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"},
            "warned",
        ),
    ],
)
def test_large_blocks_are_split_exactly_unless_the_user_has_decided_otherwise(
    environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    done: list[str] = []
    monkeypatch.setattr(chunkc.runtime.storage.open_compute, "use_expandable_segments", lambda: done.append("set"))
    with caplog.at_level(logging.WARNING):
        split_exactly(environment)
    assert [*done, *("warned" for record in caplog.records if "PYTORCH_ALLOC_CONF" in record.message)] == (
        [expected] if expected else []
    )


def test_homes_of_a_cpu(tmp_path: Path) -> None:
    for home, everything, kinds in (
        ("cpu", True, (MemoryHome, type(None))),
        (f"disk:{tmp_path}", True, (DiskHome, type(None))),
        (f"disk:{tmp_path}", False, (MemoryHome, DiskHome)),
    ):
        _, arena = open_compute(torch.device("cpu"), home, everything)
        assert (type(arena.home), type(arena.state_home)) == kinds
