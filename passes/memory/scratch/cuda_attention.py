"""Bound the scratch of attention kernels on a CUDA device: rules as in `cuda_rules`."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from chunkc.passes.memory.scratch.copies import nbytes_of
from chunkc.passes.memory.scratch.cuda_reduction import MULTIPROCESSORS
from chunkc.passes.memory.scratch.rules import Call, contiguous

MAX_SPLITS = 128
"""Most parts into which FlashAttention splits keys (`num_splits_heuristic`, `flash_api.cpp`)."""

_CUDNN_NBYTES = 32 << 20
_ROWS_MULTIPLE = 128
_TILE = 64
_WIDEST_IN_REGISTERS = 128


def _rows(tensor: Tensor, dim: int) -> int:
    return _up(tensor.shape[dim], _ROWS_MULTIPLE)


def _padded_operands(call: Call, names: tuple[str, ...]) -> list[int]:
    """Count the bytes of each operand's copy, with the last dimension padded to a multiple of 8."""
    found = []
    for name in names:
        value = call.arguments.get(name)
        if isinstance(value, Tensor):
            width = value.shape[-1]
            found.append(value.numel() // max(1, width) * _up(width, 8) * value.itemsize)
    return found


def flash_forward(call: Call) -> list[int]:
    """Bound padded copies of operands and output, and if keys are split, fp32 outputs and log-sum-exps per split.

    Operands are copied and the output is padded if the head size is no multiple of 8, or if an operand's last dimension
    has gaps. Keys are split only if batch, heads and blocks of queries leave multiprocessors idle, so all splits
    together are at most two waves of blocks. Source: `flash_attn/flash_api.cpp`, `mha_fwd`.
    """
    query = call["query"]
    batch, heads, _, width = query.shape
    blocks = batch * heads * (_rows(query, 2) // 64)
    splits = min(MAX_SPLITS, max(1, 2 * MULTIPROCESSORS // max(1, blocks)))
    partial = [] if splits == 1 else [splits * batch * heads * _rows(query, 2) * (_padded(width) + 1) * 4]
    copies = _padded_operands(call, ("query", "key", "value")) if width % 8 or not _last_dense(call) else []
    return [*copies, *(copies[:1]), *partial, 64]


def flash_backward(call: Call) -> list[int]:
    """Bound fp32 sums of the query's gradient, row sums of `grad * out`, gradients per query head, and copies.

    In deterministic mode the query's gradient has several sums, to keep all multiprocessors busy. Gradients of keys and
    values are per query head if heads are shared. Operands are copied as in the forward; else `grad_out` and `out` are,
    unless they are contiguous as [batch, rows, heads, width]. Sources: `flash_api.cpp`, `mha_bwd`;
    `attention_backward.cu`.
    """
    query, key = call["query"], call["key"]
    batch, heads, _, width = query.shape
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    num_sums = max(1, -(-MULTIPROCESSORS // max(1, batch * heads))) if is_deterministic else 1
    dq_sum = num_sums * batch * heads * _rows(query, 2) * _padded(width) * 4
    row_sums = batch * heads * _rows(query, 2) * 4
    expanded = 2 * batch * heads * key.shape[2] * _padded(width) * key.itemsize if key.shape[1] != heads else 0
    names = ("grad_out", "query", "key", "value", "out")
    if width % 8 or not _last_dense(call):
        copies = _padded_operands(call, names)
        return [dq_sum, row_sums, expanded, *copies, *copies[1:4]]
    given = [call[name] for name in ("grad_out", "out")]
    copies = [tensor.numel() * tensor.itemsize for tensor in given if not tensor.transpose(1, 2).is_contiguous()]
    return [dq_sum, row_sums, expanded, *copies]


def efficient_forward(call: Call) -> list[int]:
    """Count an fp32 accumulator of 16-bit outputs too wide for registers: `mem_eff_attention/kernel_forward.h`."""
    query, value = call["query"], call["value"]
    is_kept = query.itemsize > 2 or value.shape[-1] <= _WIDEST_IN_REGISTERS
    return [] if is_kept else [4 * query.numel() // query.shape[-1] * value.shape[-1]]


def efficient_backward(call: Call) -> list[int]:
    """Bound `delta` per row, a workspace of fp32 gradients, and a copy of `grad_out`.

    The workspace has tiles of the query's gradient, with locks; in 16 bits also of gradients of keys and values wider
    than 64, which some devices need. `grad_out` is copied unless it is contiguous as [batch, rows, heads, width].
    Sources: `mem_eff_attention/kernel_backward.h`, `attention_backward.cu`.
    """
    query, key, gradient = call["query"], call["key"], call["grad_out_"]
    by_heads = call.name.startswith("_scaled")  # [batch, heads, rows, width]; else [batch, rows, heads, width]
    num_rows, num_keys = (tensor.shape[2 if by_heads else 1] for tensor in (query, key))
    num_heads, lengths = query.shape[0] * query.shape[1 if by_heads else 2], call.arguments.get("cu_seqlens_q")
    if isinstance(lengths, Tensor):  # sequences of several lengths, concatenated
        num_heads *= lengths.numel() - 1
        num_rows, num_keys = call["max_seqlen_q"], call["max_seqlen_k"]
    width = max(query.shape[-1], call["value"].shape[-1])
    copied = not (gradient.transpose(1, 2) if by_heads else gradient).is_contiguous()
    workspace = _query_sums(query.itemsize, num_rows, num_keys, width)
    if query.itemsize == 2 and width > _TILE:
        workspace += 2 * 4 * _up(num_keys, _ROWS_MULTIPLE) * _up(width, _ROWS_MULTIPLE)
    return [num_heads * workspace, 4 * num_heads * num_rows, *([nbytes_of(gradient)] if copied else [])]


def _query_sums(itemsize: int, num_rows: int, num_keys: int, width: int) -> int:
    """Bound the bytes of one head's tiles; exact up to a width of 64."""
    aligned = itemsize == 4 and not (width % _TILE or num_rows % _TILE or num_keys % _TILE)
    if width <= _TILE:
        return -(-num_rows // _TILE) * (4 * _TILE**2 + (256 if aligned else 16))
    return -(-num_rows // _ROWS_MULTIPLE) * -(-width // _TILE) * (8 * _TILE**2 + (256 if aligned else 32))


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def efficient_outputs(call: Call) -> dict[int, int]:
    """Count no device bytes for seed and offset: without CUDA graph capture they are on the CPU (`attention.cu`)."""
    return {2: 0, 3: 0}


def cudnn_forward(call: Call) -> list[int]:
    """Estimate the workspace of cuDNN's graph (`cudnn/MHA.cpp`), and count contiguous copies of operands.

    The frontend (`node/scaled_dot_product_flash_attention.h`) takes no workspace in the forward. That of the engine is
    known only when it runs: 32 MiB stand for it here and in the backward, a policy as for `cuda_rules.convolution`, no
    bound.
    """
    return [_CUDNN_NBYTES, *contiguous(call)]


def cudnn_backward(call: Call) -> list[int]:
    """Estimate the workspace of cuDNN's graph, and count a copy of `grad_out`.

    The workspace has fp32 sums of the query's gradient and row sums, gradients of keys and values per query head if
    heads are shared, and the engine's own (see `cudnn_forward`). Since cuDNN 9 the gradient of probabilities takes
    none. `grad_out` is copied if its last dimension has gaps, and before cuDNN 9.5.1, if its strides are not those of
    `out`; either counts here. Sources: `cudnn/MHA.cpp`, the frontend's `CompositeSDPABackwardNode`.
    """
    query, key, value, gradient = (call[name] for name in ("query", "key", "value", "grad_out"))
    rows = query.numel() // max(1, query.shape[-1])
    shared = key.shape[1] != query.shape[1] or value.shape[1] != query.shape[1]
    per_head = query.shape[0] * query.shape[1] * _rows(key, 2) * (_padded(key.shape[-1]) + _padded(value.shape[-1]))
    expanded = 4 * per_head if shared else 0
    is_copied = gradient.stride(-1) != 1 or gradient.stride() != call["out"].stride()
    copies = [nbytes_of(gradient)] if is_copied else []
    return [_CUDNN_NBYTES, 4 * _padded_numel(query), 8 * rows, expanded, *copies]


def _padded_numel(tensor: Tensor) -> int:
    return prod(tensor.shape[:-2]) * _rows(tensor, -2) * _padded(tensor.shape[-1])


def _padded(width: int) -> int:
    """Round a head size up as FlashAttention does: to a multiple of 32, or of 64 above 128."""
    multiple = 32 if width <= 128 else 64
    return _up(width, multiple)


def _last_dense(call: Call) -> bool:
    return all(call[name].stride(-1) == 1 for name in ("query", "key", "value"))
