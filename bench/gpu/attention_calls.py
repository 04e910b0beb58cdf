"""Calls of attention's kernels on a CUDA device by name, and what a call takes of the allocator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from chunkc.passes.graphs.cuda_memory import rounded_nbytes

aten = torch.ops.aten
Call = tuple[Any, tuple[Any, ...]]


def attention(
    kind: str,
    *,
    backward: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    shape: tuple[int, int, int, int] = (4, 8, 512, 64),
) -> Call:
    """A call of one kernel, causal, without dropout.

    Args:
        kind: "flash", "efficient" or "cudnn".
        shape: batch, heads, rows, width.
    """
    query, key, value = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(3))
    if kind == "flash":
        op, arguments = aten._scaled_dot_product_flash_attention, (query, key, value, 0.0, True, False)
    elif kind == "efficient":
        op, arguments = aten._scaled_dot_product_efficient_attention, (query, key, value, None, True, 0.0, True)
    else:
        op, arguments = aten._scaled_dot_product_cudnn_attention, (query, key, value, None, True, 0.0, True, False)
    if not backward:
        return op.default, arguments
    out, lse, *rest = op.default(*arguments)
    if kind == "flash":
        *lengths, seed, offset, _ = rest
        given = (out, query, key, value, out, lse, *lengths, 0.0, True, seed, offset)
        return aten._scaled_dot_product_flash_attention_backward.default, given
    if kind == "efficient":
        given = (out, query, key, value, None, out, lse, *rest, 0.0, [True, True, True, False], True)
        return aten._scaled_dot_product_efficient_attention_backward.default, given
    cum_q, cum_k, max_q, max_k, seed, offset, _ = rest
    given = (out, query, key, value, out, lse, seed, offset, None, cum_q, cum_k, max_q, max_k, 0.0, True)
    return aten._scaled_dot_product_cudnn_attention_backward.default, given


def taken_nbytes(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, Any]:
    """What a call takes beyond its results; these, too. It is made twice: what libraries keep is there by then."""
    op(*args, **kwargs)
    torch.cuda.synchronize()
    before_nbytes = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = op(*args, **kwargs)
    peak_nbytes = torch.cuda.max_memory_allocated() - before_nbytes
    given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
    made = {
        t.untyped_storage().data_ptr(): rounded_nbytes(t.untyped_storage().nbytes())
        for t in tree_leaves(results)
        if isinstance(t, Tensor) and t.device.type == "cuda"
    }
    return peak_nbytes - sum(nbytes for address, nbytes in made.items() if address not in given), results
