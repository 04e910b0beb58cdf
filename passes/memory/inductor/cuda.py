"""Configure Inductor for CUDA devices, so that it measures nothing on the device.

So it allocates nothing there outside the plan, and the same segment has the same bits whatever the budget. By default
it times variants of kernels and of padded matrix products on the device, on buffers of its own (one of them as large as
the device's cache), at the first run or while it traces; by their times it may choose other orders of summation on
every run.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterable
from typing import Any

import torch

from chunkc.torch_private.inductor import option, patched

logger = logging.getLogger(__name__)

_STEADY: dict[str, Any] = {
    "deterministic": True,
    "shape_padding": False,
    "triton.autotune_pointwise": False,
    "benchmark_epilogue_fusion": False,
}
"""Otherwise than Inductor's defaults."""

_AS_BY_DEFAULT: dict[str, Any] = {
    "max_autotune": False,
    "max_autotune_gemm": False,
    "max_autotune_pointwise": False,
    "coordinate_descent_tuning": False,
    "benchmark_kernel": False,
    "benchmark_combo_kernel": False,
    "benchmark_fusion": False,
    "force_shape_pad": False,
    "triton.multi_kernel": 0,
    "triton.cudagraphs": False,
}
"""As Inductor has them unless a user has set them: each would measure on the device, or keep memory of its own."""


def steady_inductor(tensors: Iterable[object]) -> contextlib.AbstractContextManager[Any]:
    """Set Inductor's options inside the block, if any of the tensors is on a CUDA device.

    Options that a user has set have no effect there, of which a warning tells once.
    """
    if not any(isinstance(tensor, torch.Tensor) and tensor.device.type == "cuda" for tensor in tensors):
        return contextlib.nullcontext()
    overridden = tuple(name for name, value in _AS_BY_DEFAULT.items() if option(name) != value)
    if overridden:
        _say(overridden)
    return patched({**_STEADY, **_AS_BY_DEFAULT})


@functools.cache
def _say(names: tuple[str, ...]) -> None:
    logger.warning(
        "Inductor's option%s %s without effect under chunkc on a GPU: it would measure there, or keep memory there, "
        "outside the budget",
        "s" if len(names) > 1 else "",
        f"{', '.join(names)} {'are' if len(names) > 1 else 'is'}",
    )
