"""Names that Inductor's wrappers for CUDA use, as stand-ins that need no GPU: tensors are fake ones, of whichever GPU.

What wrappers call is in `torch/_inductor/codegen/wrapper.py` and `torch/_inductor/codegen/cuda/device_op_overrides.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from chunkc.ir.errors import UnsupportedError

MARK = "empty_strided_cuda("
"""Only wrappers that compute on a CUDA device call this; all of them define the name."""


def computes_on_cuda(call_source: str, inputs: Any) -> bool:
    """Whether a wrapper's `call` is for a CUDA device, by what it allocates and what it is given."""
    if MARK in call_source or "torch.cuda._DeviceGuard(" in call_source:
        return True
    return any(isinstance(value, torch.Tensor) and value.device.type == "cuda" for value in inputs)


class Kernel:
    """Stands for a generated kernel: C++ ones are called, Triton's run on a stream. Calls `step` and nothing else."""

    def __init__(self, name: str, step: Callable[[str], None]) -> None:
        self._name, self._step = name, step

    def __call__(self, *args: Any) -> None:
        self._step(self._name)

    def run(self, *args: Any, stream: Any = None, **kwargs: Any) -> None:
        self._step(self._name)


class _Torch:
    """torch, but with a `cuda` that does nothing."""

    cuda = SimpleNamespace(_DeviceGuard=lambda index: contextlib.nullcontext(), set_device=lambda index: None)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def cuda_names() -> dict[str, Any]:
    """Return the names in a wrapper for CUDA that a wrapper for the CPU does not have, or has for something else."""

    def empty_strided_cuda(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device="cuda")

    def device(*args: Any, **kwargs: Any) -> torch.device:
        return torch.device(torch.device(*args, **kwargs).type)

    def no_pinned_memory(*args: Any, **kwargs: Any) -> None:
        raise UnsupportedError(
            "a compiled segment copies through pinned host memory, which chunkc does not plan for; keep the model's "
            'inputs on the device, or compile with options={"codegen": "eager"}'
        )

    return {
        "torch": _Torch(),
        "device": device,
        "empty_strided_cuda": empty_strided_cuda,
        "empty_strided_cpu_pinned": no_pinned_memory,
        "get_raw_stream": lambda index: 0,
    }
