"""Bound the scratch of attention kernels on a CUDA device: rules as in `cuda_rules`."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from chunkc.passes.memory.scratch.copies import nbytes_of
from chunkc.passes.memory.scratch.cuda_reduction import MULTIPROCESSORS
from chunkc.passes.memory.scratch.rules import Call, contiguous

_MAX_SPLITS = 128
"""Most parts into which FlashAttention splits keys (`num_splits_heuristic`, `flash_api.cpp`)."""
_CUDNN_NBYTES = 32 << 20
_ROWS_MULTIPLE = 128
_TILE = 64
_WIDEST_IN_REGISTERS = 128


def flash_forward(call: Call) -> list[int]:
    """Bound padded copies of operands and output, and if keys are split, fp32 outputs and log-sum-exps per split.

    Operands are copied and the output is padded if the head size is no multiple of 8, or if an operand's last dimension
    has gaps. Keys are split only if batch, heads and blocks of queries leave multiprocessors idle, so all splits
    together are at most two waves of blocks. Source: `flash_attn/flash_api.cpp`, `mha_fwd`.
    """
    query = call["query"]
    num_rows = _num_rows(query)
    splits = min(_MAX_SPLITS, max(1, 2 * MULTIPROCESSORS // max(1, num_rows // 64)))
    partial = [] if splits == 1 else [splits * 4 * (_padded_numel(query) + num_rows)]
    copies = _copies(call, "query", "key", "value")
    return [*copies, *copies[:1], *partial, 64]


def flash_backward(call: Call) -> list[int]:
    """Bound fp32 sums of the query's gradient, row sums of `grad * out`, gradients per query head, and copies.

    In deterministic mode the query's gradient has several sums, to keep all multiprocessors busy. Gradients of keys and
    values are per query head if heads are shared. Operands are copied as in the forward; else `grad_out` and `out` are,
    unless they are contiguous as [batch, rows, heads, width]. Sources: `flash_api.cpp`, `mha_bwd`;
    `attention_backward.cu`.
    """
    query, key = call["query"], call["key"]
    num_heads, is_deterministic = prod(query.shape[:2]), torch.are_deterministic_algorithms_enabled()
    num_sums = max(1, -(-MULTIPROCESSORS // max(1, num_heads))) if is_deterministic else 1
    width = _padded(query.shape[-1])
    expanded = 2 * num_heads * key.shape[2] * width * key.itemsize if key.shape[1] != query.shape[1] else 0
    padded, given = _copies(call, "grad_out", "query", "key", "value", "out"), (call["grad_out"], call["out"])
    turned = [nbytes_of(tensor) for tensor in given if not tensor.transpose(1, 2).is_contiguous()]
    copies = [*padded, *padded[1:4]] or turned
    return [num_sums * 4 * _padded_numel(query), 4 * _num_rows(query), expanded, *copies]


def _copies(call: Call, *names: str) -> list[int]:
    """Count the bytes of copies of operands, with the last dimension padded to a multiple of 8, if there are any."""
    if call["query"].shape[-1] % 8 == 0 and all(call[name].stride(-1) == 1 for name in ("query", "key", "value")):
        return []
    given = [call[name] for name in names]
    return [prod(tensor.shape[:-1]) * _up(tensor.shape[-1], 8) * tensor.itemsize for tensor in given]


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
    query, gradient = call["query"], call["grad_out"]
    num_heads, shared = query.shape[1], [call[name] for name in ("key", "value")]
    is_shared = any(tensor.shape[1] != num_heads for tensor in shared)
    expanded = [4 * _padded_numel(tensor) // max(1, tensor.shape[1]) * num_heads for tensor in shared if is_shared]
    is_copied = gradient.stride(-1) != 1 or gradient.stride() != call["out"].stride()
    copies = [nbytes_of(gradient)] if is_copied else []
    return [_CUDNN_NBYTES, 4 * _padded_numel(query), 8 * prod(query.shape[:-1]), sum(expanded), *copies]


def _num_rows(tensor: Tensor) -> int:
    """Count the rows of all heads, of each head padded to whole blocks."""
    return prod(tensor.shape[:-2]) * _up(tensor.shape[-2], _ROWS_MULTIPLE)


def _padded_numel(tensor: Tensor) -> int:
    return _num_rows(tensor) * _padded(tensor.shape[-1])


def _padded(width: int) -> int:
    """Round a head size up as FlashAttention does: to a multiple of 32, or of 64 above 128."""
    return _up(width, 32 if width <= 128 else 64)
