"""Tests on the GPU made of RAM, which `make test-cuda` runs. Elsewhere they are skipped."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

_STARTUP = str(Path(__file__).parent / "startup")
if _STARTUP not in sys.path:
    sys.path.append(_STARTUP)

import cuda_in_ram  # noqa: E402

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # for tests that allocate without chunkc


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test marked `arithmetic` needs kernels that compute; the others need memory alone, and Triton's compiler."""
    here = Path(__file__).parent
    for item in items:
        if here not in item.path.parents:
            continue
        wanted = item.get_closest_marker("arithmetic") is not None
        if not cuda_in_ram.is_here():
            item.add_marker(pytest.mark.skip(reason="not on the GPU made of RAM: make test-cuda"))
        elif wanted != cuda_in_ram.has_arithmetic():
            item.add_marker(pytest.mark.skip(reason="for the device in its other mode"))


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    gc.collect()
    if cuda_in_ram.is_here() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()  # one for each stream that the test made: the next one's peak has them
        torch.cuda.empty_cache()
