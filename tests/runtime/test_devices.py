"""How torch's CUDA allocator is configured, as far as plans depend on it."""

from __future__ import annotations

import pytest

from chunkc.runtime.devices import splits_exactly


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
