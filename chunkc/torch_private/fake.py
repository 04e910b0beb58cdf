"""Fake tensors, which have no data, and the contexts in which they are traced."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import LocalSource
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "LocalSource",
    "TorchDispatchMode",
    "TracingContext",
    "detect_fake_mode",
    "disable_current_modes",
    "enable_python_dispatcher",
    "is_traceable_wrapper_subclass",
    "tracing",
    "without_values",
]

_T = TypeVar("_T", bound=torch.Tensor)


def without_values(cls: type[_T], tensor: torch.Tensor) -> _T:
    """Make a tensor of a wrapper subclass with the metadata of `tensor`, and without memory."""
    return torch.Tensor._make_wrapper_subclass(
        cls, tensor.shape, strides=tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )


def like(tensor: FakeTensor, base: torch.Tensor | None) -> FakeTensor:
    """Make a fake tensor with the same metadata in the storage of `base`, or in a new one as large as the tensor's.

    Call it outside of all dispatch modes: the fake mode is not needed here, and is slow for each operator.
    """
    if base is None:
        base = torch.empty((tensor.untyped_storage().nbytes(),), dtype=torch.uint8, device="meta")
    values = torch.empty(0, dtype=tensor.dtype, device="meta")
    values.set_(base.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    return FakeTensor(tensor.fake_mode, values, tensor.device)
