"""Count the bytes of tensor copies on the CPU, and of the buffers that ATen makes them with (ATen's `Copy.cpp`)."""

from __future__ import annotations

import torch
from torch import Tensor

LOW_PRECISION = (torch.bfloat16, torch.float16)
"""Dtypes that ATen accumulates in float32."""


def nbytes_of(tensor: Tensor, itemsize: int | None = None) -> int:
    """Count the bytes of a dense copy of `tensor`, in its own or another item size."""
    return tensor.numel() * (tensor.itemsize if itemsize is None else itemsize)


def contiguous_copy_nbytes(*tensors: Tensor | None) -> int:
    """Count the bytes of contiguous copies of the strided tensors, and of the largest block for transposing one."""
    strided = [t for t in tensors if t is not None and not t.is_contiguous()]
    return sum(map(nbytes_of, strided)) + max(map(copy_block_nbytes, strided), default=0)


def copy_block_nbytes(source: Tensor) -> int:
    """Count the bytes of the square block through which ATen copies a transposed matrix; 0 for any other copy."""
    matrix = source.dim() == 2 and source.stride(0) == 1 and source.stride(1) == source.shape[0]
    if not matrix or source.numel() < 60 * 60:
        return 0
    return 120 * 120 if source.itemsize == 1 else 60 * 60 * source.itemsize
