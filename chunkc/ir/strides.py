"""Answer questions about a tensor's memory: dense, with gaps, overlapping itself or another tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements fill its span without gaps or overlap, in whatever order of dimensions."""
    if tensor.is_contiguous():
        return True
    order = sorted(range(tensor.dim()), key=lambda d: (tensor.stride(d), tensor.shape[d]), reverse=True)
    return tensor.detach().permute(order).is_contiguous()


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides, in elements, of a dense tensor of that shape; the tensor's own if it is dense.

    Dimensions keep their order in memory, as in `torch.empty_like` and in the states of `torch.optim`.
    """
    if tensor.is_contiguous():
        return tensor.stride()
    return torch.empty_like(tensor, device="meta").stride()


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements of the tensor share a place in memory, as in the result of `expand`."""
    if is_dense(tensor):
        return False
    dims = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape) if size > 1)
    span = 1
    for stride, size in dims:
        if stride < span:  # unless the dimensions interleave, two elements share a place
            return stride == 0 or _places(tensor).unique().numel() < tensor.numel()
        span += (size - 1) * stride
    return False


def span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses `[begin, end)` between which the tensor's elements lie; equal if it has none."""
    begin = tensor.data_ptr()
    if tensor.is_contiguous():
        return begin, begin + tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return begin, begin + (last + 1) * tensor.itemsize if tensor.numel() else begin


def share_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether some byte belongs to an element of both tensors."""
    (begin, end), (second_begin, second_end) = span_of(first), span_of(second)
    if not (begin < second_end and second_begin < end):
        return False
    return np.shares_memory(np.asarray(_Addresses(first)), np.asarray(_Addresses(second)))


def _places(tensor: torch.Tensor) -> torch.Tensor:
    """Return each element's place in memory, in elements from the first."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return torch.arange(last + 1).as_strided(tensor.shape, tensor.stride())


class _Addresses:
    """Array interface of a tensor's addresses for numpy, for any device and dtype; nothing is read there."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "data": (tensor.data_ptr(), True),
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * tensor.itemsize for stride in tensor.stride()),
            "typestr": f"|V{tensor.itemsize}",
        }
