"""Tests on a real GPU. Blocks are split exactly, so that what is measured is what was asked for, rounded.

Attention is not cuDNN's, whose backward adds in any order: bits are compared here. FlashAttention's does too, but over
two blocks, as in these tests, the order does not matter.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from chunkc.kernels import elementwise_triton

for _name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
    os.environ.setdefault(_name, "expandable_segments:True")


@pytest.fixture(autouse=True)
def without_cudnn_attention() -> Iterator[None]:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.fixture(autouse=True)
def blocks_for_an_interpreter() -> Iterator[None]:
    """On the GPU made of RAM with arithmetic (`tests/gpu_in_ram`) Triton is interpreted, block by block."""
    if importlib.util.find_spec("cuda_in_ram") is None or "CUDA_IN_RAM_ARITHMETIC" not in os.environ:
        yield
        return
    with mock.patch.object(elementwise_triton, "BLOCK", 1 << 14):
        yield
