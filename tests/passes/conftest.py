"""Fixtures of this room."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from chunkc.runtime.device import cpu_allocator


@pytest.fixture
def metered() -> Iterator[None]:
    """Bytes are counted, random tensors are the same in every run, and the number of threads may be changed."""
    cpu_allocator.install()
    torch.manual_seed(0)
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)
