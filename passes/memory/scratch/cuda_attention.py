"""Predict the scratch of attention's kernels on a CUDA device, as `cuda_rules` has it of other operators."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from chunkc.passes.memory.scratch.cuda_reduction import MULTIPROCESSORS
from chunkc.passes.memory.scratch.cuda_rules import Call, contiguous, nbytes_of

MAX_SPLITS = 128
"""FlashAttention splits keys into at most so many parts (`num_splits_heuristic`, `flash_api.cpp`)."""

_CUDNN_NBYTES = 32 << 20
_ROWS_MULTIPLE = 128
_TILE = 64
_WIDEST_IN_REGISTERS = 128


def _rows(tensor: Tensor, dim: int) -> int:
    return _up(tensor.shape[dim], _ROWS_MULTIPLE)


def _padded_operands(call: Call, names: tuple[str, ...], multiple: int = 8) -> list[int]:
    """Copies of operands with a padded last dimension, or with strides that a kernel does not take."""
    found = []
    for name in names:
        value = call.arguments.get(name)
        if isinstance(value, Tensor):
            width = value.shape[-1]
            found.append(value.numel() // max(1, width) * (-(-width // multiple) * multiple) * value.itemsize)
    return found


def flash_forward(call: Call) -> list[int]:
    """`flash_attn/flash_api.cpp`, `mha_fwd`: copies of operands with an odd head size, the padded output, and where
    keys are split, fp32 partial outputs and their log-sum-exps per split. It splits only where batch, heads and blocks
    of queries leave multiprocessors idle, so all splits together are no more than two waves of blocks."""
    query = call.tensor("query")
    batch, heads, _, width = query.shape
    blocks = batch * heads * (_rows(query, 2) // 64)
    splits = min(MAX_SPLITS, max(1, 2 * MULTIPROCESSORS // max(1, blocks)))
    partial = [] if splits == 1 else [splits * batch * heads * _rows(query, 2) * (_padded(width) + 1) * 4]
    copies = _padded_operands(call, ("query", "key", "value")) if width % 8 or not _last_dense(call) else []
    return [*copies, *(copies[:1]), *partial, 64]


def flash_backward(call: Call) -> list[int]:
    """`mha_bwd`: fp32 sums of the query's gradient (in deterministic code as many as keep each multiprocessor at work,
    which are added up in order), row sums of `grad * out`, gradients of keys and values per query head where heads are
    shared, copies as in the forward, and of `grad_out` and `out` where heads do not come behind rows in memory
    (`attention_backward.cu`)."""
    query, key = call.tensor("query"), call.tensor("key")
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
    given = [call.tensor(name) for name in ("grad_out", "out")]
    copies = [tensor.numel() * tensor.itemsize for tensor in given if not tensor.transpose(1, 2).is_contiguous()]
    return [dq_sum, row_sums, expanded, *copies]


def efficient_forward(call: Call) -> list[int]:
    """`mem_eff_attention/kernel_forward.h`: in 16 bits, an fp32 accumulator of outputs too wide for registers."""
    query, value = call.tensor("query"), call.tensor("value")
    is_kept = query.itemsize > 2 or value.shape[-1] <= _WIDEST_IN_REGISTERS
    return [] if is_kept else [4 * query.numel() // query.shape[-1] * value.shape[-1]]


def efficient_backward(call: Call) -> list[int]:
    """`mem_eff_attention/kernel_backward.h`: `delta` per row; a workspace of tiles of the query's gradient in fp32,
    with locks; in 16 bits also gradients of wide keys and values, which some devices need. Before that, a copy of the
    gradient if it does not lie row by row with all heads of each (`attention_backward.cu`)."""
    query, key, gradient = call.tensor("query"), call.tensor("key"), call.tensor("grad_out_")
    by_heads = call.name.startswith("_scaled")  # [batch, heads, rows, width]; else [batch, rows, heads, width]
    num_rows, num_keys = (tensor.shape[2 if by_heads else 1] for tensor in (query, key))
    num_heads, lengths = query.shape[0] * query.shape[1 if by_heads else 2], call.arguments.get("cu_seqlens_q")
    if isinstance(lengths, Tensor):  # sequences one behind the other
        num_heads *= lengths.numel() - 1
        num_rows, num_keys = call.arguments["max_seqlen_q"], call.arguments["max_seqlen_k"]
    width = max(query.shape[-1], call.tensor("value").shape[-1])
    copied = not (gradient.transpose(1, 2) if by_heads else gradient).is_contiguous()
    workspace = _query_sums(query.itemsize, num_rows, num_keys, width)
    if query.itemsize == 2 and width > _TILE:
        workspace += 2 * 4 * _up(num_keys, _ROWS_MULTIPLE) * _up(width, _ROWS_MULTIPLE)
    return [num_heads * workspace, 4 * num_heads * num_rows, *([nbytes_of(gradient)] if copied else [])]


def _query_sums(itemsize: int, num_rows: int, num_keys: int, width: int) -> int:
    """Bytes of one head's tiles; exact up to a width of 64."""
    aligned = itemsize == 4 and not (width % _TILE or num_rows % _TILE or num_keys % _TILE)
    if width <= _TILE:
        return -(-num_rows // _TILE) * (4 * _TILE**2 + (256 if aligned else 16))
    return -(-num_rows // _ROWS_MULTIPLE) * -(-width // _TILE) * (8 * _TILE**2 + (256 if aligned else 32))


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def efficient_outputs(call: Call) -> dict[int, int]:
    """`attention.cu`: seed and offset are on the CPU, unless a CUDA graph is captured."""
    return {2: 0, 3: 0}


def cudnn_forward(call: Call) -> list[int]:
    """`cudnn/MHA.cpp`: the workspace of cuDNN's graph. The frontend (`node/scaled_dot_product_flash_attention.h`) takes
    nothing of it in the forward; what the engine that cuDNN chooses takes, it says when it runs. 32 MiB stand for that
    here and in the backward: a policy, as for `cuda_rules.convolution`, and no bound.
    """
    return [_CUDNN_NBYTES, *contiguous(call)]


def cudnn_backward(call: Call) -> list[int]:
    """`cudnn/MHA.cpp`; the frontend's `CompositeSDPABackwardNode`: a workspace with fp32 sums of the query's gradient
    and row sums, gradients of keys and values per query head where heads are shared, and the engine's own. Since cuDNN
    9 there is none for the gradient of probabilities. `grad_out` is copied where its last dimension has gaps; before
    cuDNN 9.5.1, where it does not lie as `out` does."""
    query, key, value, gradient = (call.tensor(name) for name in ("query", "key", "value", "grad_out"))
    rows = query.numel() // max(1, query.shape[-1])
    shared = key.shape[1] != query.shape[1] or value.shape[1] != query.shape[1]
    per_head = query.shape[0] * query.shape[1] * _rows(key, 2) * (_padded(key.shape[-1]) + _padded(value.shape[-1]))
    expanded = 4 * per_head if shared else 0
    is_copied = gradient.stride(-1) != 1 or gradient.stride() != call.tensor("out").stride()
    copies = [nbytes_of(gradient)] if is_copied else []
    return [_CUDNN_NBYTES, 4 * _padded_numel(query), 8 * rows, expanded, *copies]


def _padded_numel(tensor: Tensor) -> int:
    return prod(tensor.shape[:-2]) * _rows(tensor, -2) * _padded(tensor.shape[-1])


def _padded(width: int) -> int:
    """A head size as FlashAttention rounds it: to 32, or to 64 above 128."""
    multiple = 32 if width <= 128 else 64
    return _up(width, multiple)


def _last_dense(call: Call) -> bool:
    return all(call.tensor(name).stride(-1) == 1 for name in ("query", "key", "value"))
