"""How Inductor is to compile for CUDA devices here: nothing is measured on the device, so nothing is allocated there
beside the plan, and the same segment has the same bits whatever the budget.

Inductor's defaults time variants of kernels and of padded matrix products on the device, on buffers of their own (one
of them as large as the device's cache) at the first run or while it traces; by their times it may choose other orders
of summation on every run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch

from chunkc.torch_private.inductor import patched

_STEADY: dict[str, Any] = {
    "deterministic": True,
    "shape_padding": False,
    "triton.autotune_pointwise": False,
    "benchmark_epilogue_fusion": False,
}


def steady_inductor(tensors: Iterable[object]) -> contextlib.AbstractContextManager[Any]:
    """Inductor's options inside the block, if any of the tensors is on a CUDA device."""
    on_cuda = any(isinstance(tensor, torch.Tensor) and tensor.device.type == "cuda" for tensor in tensors)
    return patched(_STEADY) if on_cuda else contextlib.nullcontext()
