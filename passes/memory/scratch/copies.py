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


def channels_come_last(tensor: Tensor) -> bool:
    """Whether the strides of images or volumes are in channels-last order by `c10/core/MemoryFormat.h`.

    This is true also for tensors with gaps, and for some that are contiguous as well.
    """
    if tensor.dim() not in (4, 5) or tensor.stride(1) == 0:
        return False
    least = 0
    for dim in (1, *range(tensor.dim() - 1, 1, -1), 0):
        size, stride = tensor.shape[dim], tensor.stride(dim)
        if size == 0 or stride < least or (dim == 0 and least == tensor.stride(1)):
            return False
        least = stride * size
    return True
