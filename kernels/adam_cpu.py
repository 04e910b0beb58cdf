"""Adam and AdamW on the CPU for one run of elements with fp32 moments (see `chunkc.kernels.elementwise_cpu`)."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from chunkc.kernels.elementwise_cpu import prepare, warm_up_format
from chunkc.kernels.formats import AdamFormat
from chunkc.kernels.hyper import GRAD_DTYPES, LOW_PRECISION, AdamHyper, check_adam_span


@torch.compiler.disable
def adam_update(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    master: Tensor | None,
    hyper: AdamHyper,
) -> None:
    """One Adam or AdamW update of `[n]` elements in CPU memory, in place, in one pass.

    Computes what `torch.optim.AdamW` and `Adam` do, up to fp32 rounding (no fused multiply-adds here); with a master,
    `param` is the master rounded to nearest even, exactly. Allocates nothing through PyTorch. The first short and the
    first long run of each combination of dtypes compile, for seconds (see `warm_up`). `n` may be 0 or 1, and the
    tensors may lie anywhere in larger buffers or mapped files. `grad` may be `param`'s very memory where their dtypes
    are equal; no other overlap is allowed.

    Args:
        param: `[n]`, fp32 (then `master` is None), bf16 or fp16.
        grad: `[n]`, fp32, bf16 or fp16. Left alone, unless it shares `param`'s memory.
        exp_avg, exp_avg_sq: `[n]`, fp32.
        master: `[n]`, fp32; or int16, the lower bits of a split one (see `chunkc.kernels.split`); or None.

    Raises:
        ValueError: a tensor is not on the CPU, or see `check_adam_span`.
    """
    tensors = check_adam_span(param, grad, exp_avg, exp_avg_sq, master)
    for tensor in tensors:
        if not tensor.is_cpu:
            raise ValueError(f"adam_cpu needs tensors on the CPU, got {[str(t.device) for t in tensors]}")
    fmt = _format(param.dtype, grad.dtype, split=master is not None and master.dtype == torch.int16)
    prepare(fmt, hyper)([*tensors])
    torch.autograd.graph.increment_version((param, *tensors[2:]))


def warm_up(param_dtype: torch.dtype, grad_dtype: torch.dtype, *, l2: bool = False, split: bool = False) -> None:
    """Compile both kernels, for short and long runs, ahead of the first `adam_update`. Idempotent.

    Args:
        l2: for Adam with a weight decay that is not 0, rather than AdamW or no weight decay.

    Raises:
        ValueError: `adam_update` takes no such dtypes.
    """
    if param_dtype not in GRAD_DTYPES or grad_dtype not in GRAD_DTYPES:
        raise ValueError(f"no Adam kernel for {param_dtype} parameters and {grad_dtype} gradients")
    warm_up_format(_format(param_dtype, grad_dtype, split=split), l2=l2)


@functools.cache
def _format(param_dtype: torch.dtype, grad_dtype: torch.dtype, *, split: bool) -> AdamFormat:
    return AdamFormat(param_dtype, grad_dtype, master=param_dtype in LOW_PRECISION, split=split)
