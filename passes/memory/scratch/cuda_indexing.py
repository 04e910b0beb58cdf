"""Bound the scratch of operators that index and scatter on CUDA devices: rules as in `cuda_rules`."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from chunkc.passes.memory.scratch import indexing
from chunkc.passes.memory.scratch.copies import nbytes_of
from chunkc.passes.memory.scratch.cuda_rules import is_dense, largest, whole_reduction
from chunkc.passes.memory.scratch.cuda_sorting import sort_nbytes
from chunkc.passes.memory.scratch.rules import Call, cast_nbytes, contiguous

_FEW_INDICES = 3072
_ROWS_PER_PART = 10
_FEW, _MAX_THREADS = 96, 1024
_UNIQUE_NBYTES = 2048
"""The most that CUB takes to find equal ones among as few as it sorts without a workspace."""
_MIB = 1 << 20


def embedding_backward(call: Call) -> list[int]:
    """Bound the larger of two phases: indices sorted, and equal ones found; their gradients summed.

    Up to 3,072 indices are not sorted, unless gradients are scaled by frequency. More are sorted together with their
    positions. A run of equal indices is a segment: its start is kept, its count if that scales, then its number of
    parts and where they begin, and for each part where it begins, its segment and its sum. If few segments would leave
    the device idle, parts are added to the result itself, or in low precision to an fp32 copy of it. Sources:
    `Embedding.cu`, `EmbeddingBackwardKernel.cu`.
    """
    indices, grad, num_weights = call["indices"], call["grad_output"], call["num_weights"]
    num, size = indices.numel(), indices.itemsize
    copies = [nbytes_of(tensor) for tensor in (grad, indices) if not tensor.is_contiguous()]
    counts = [size * num] if call.arguments.get("scale_grad_by_freq") else []
    if num <= _FEW_INDICES and not counts:
        return copies
    width = grad.shape[-1] if grad.dim() else 1
    num_segments = min(num, num_weights)
    num_parts = num // _ROWS_PER_PART + num_segments
    num_blocks = num_segments * -(-width // _MAX_THREADS)
    is_added = 4 * num_blocks < min(_FEW, num_parts) and not torch.are_deterministic_algorithms_enabled()
    sums = max(4, grad.itemsize) * width * (num_segments if is_added else num_parts)
    sorting = [size * num, _UNIQUE_NBYTES, sort_nbytes(num, size, size)]
    summing = [*(2 * [size * num_segments]), 8, *(2 * [size * num_parts]), sums]
    return [*copies, *counts, *(3 * [size * num]), 8, *largest(sorting, summing)]


def index(call: Call) -> list[int]:
    """Count indices converted to int64, and contiguous copies if their strides differ after broadcasting.

    Source: `ATen/native/TensorAdvancedIndexing.cpp`, `make_info`.
    """
    indices = _indices(call)
    if not indices:
        return []
    if any(map(_is_mask, indices)):
        return [*_expanded(indices), *contiguous(call)]
    together = torch.broadcast_tensors(*indices)
    converted = [tensor.dtype != torch.int64 for tensor in together]
    in_rows = [
        tensor.is_contiguous() or (is_new and not is_dense(tensor)) for tensor, is_new in zip(together, converted)
    ]
    alike = all(in_rows) or not (any(in_rows) or any(tensor.stride() != together[0].stride() for tensor in together))
    return [8 * together[0].numel()] * (sum(converted) + (0 if alike else in_rows.count(False)))


def masked_index(call: Call) -> list[int]:
    """Bound clamped indices, the inverted mask, the result before it is masked or masked values, and `index_put`.

    Source: `ATen/native/TensorAdvancedIndexing.cpp`, `_unsafe_masked_index` and `_unsafe_masked_index_put_accumulate`.
    """
    values, indices = call.arguments.get("values"), _indices(call)
    moved = call.outputs[0] if values is None else values
    adding = _expanded(indices) if values is None else _added(call, call["indices"], values)
    return [*map(nbytes_of, indices), call["mask"].numel(), nbytes_of(moved), *adding]


def scatter(call: Call) -> list[int]:
    """Count contiguous copies, indices in int64, and for means the terms; in deterministic mode, bound an index put.

    That has an index for each dimension of the result, or one flat index, sorted. For means there are ones, their sums
    and a mask of zero counts. Source: `ATen/native/TensorAdvancedIndexing.cpp`, `_scatter_via_index_put` and
    `scatter_reduce_two`.
    """
    found = [*_counted(call, "src"), *contiguous(call), *gather(call)]
    if not torch.are_deterministic_algorithms_enabled():
        return found
    num, result = call["index"].numel(), call.outputs[0]
    sorting = sort_nbytes(num, 8, 8)
    return [*found, *([8 * num] * (2 * result.dim() + 5)), result.itemsize * num, sorting]


def _counted(call: Call, source: str) -> list[int]:
    if call.arguments.get("reduce") != "mean":
        return []
    result = call.outputs[0]
    return [nbytes_of(call[source]), nbytes_of(result), result.numel()]


def gather(call: Call) -> list[int]:
    """Count indices converted to int64: `ATen/native/TensorAdvancedIndexing.cpp`."""
    return [cast_nbytes(call["index"], torch.int64)]


def search(call: Call) -> list[int]:
    """Bound `searchsorted`, `bucketize` as on the CPU, and the reduction of a sorter to its ends."""
    sorter = call.arguments.get("sorter")
    return [*indexing.search(call), *([] if sorter is None else whole_reduction(sorter))]


def index_reduce(call: Call) -> list[int]:
    """Count as `index_add`, with int64 indices for the result's fill, and for means the terms (see `scatter`).

    Source: `Indexing.cu`, `index_reduce_func_cuda_impl`.
    """
    return [*_counted(call, "source"), *gather(call), *index_add(call)]


def index_put(call: Call) -> list[int]:
    """Count a number copied to the device, and a sort (see `_added`) if values accumulate, else as `index`.

    In deterministic mode more than one value is sorted without accumulation, too. Source:
    `ATen/native/TensorAdvancedIndexing.cpp`, `_index_put_impl_`.
    """
    values, given = call["values"], call["indices"]
    moved = [values.itemsize] if values.device != call.outputs[0].device else []
    if call.arguments.get("accumulate") or (torch.are_deterministic_algorithms_enabled() and values.numel() > 1):
        return [*moved, *_added(call, given, values)]
    return [*moved, *index(call)]


def index_add(call: Call) -> list[int]:
    """Count `index_add` and `index_copy`: in deterministic mode a sort, of the former also the scaled source.

    Sources: `Indexing.cu`, `index_add_cuda_impl`; `ATen/native/TensorAdvancedIndexing.cpp`, `index_copy_out`.
    """
    if not torch.are_deterministic_algorithms_enabled():
        return []
    source, position = call["source"], call["index"]
    scaled = [] if call.name.startswith("index_copy") else [nbytes_of(source), 8 * position.numel()]
    return [*scaled, *_added(call, [None] * call["dim"] + [position], source)]


def _added(call: Call, given: Sequence[Tensor | None], values: Tensor) -> list[int]:
    """Bound a sort of flat int64 indices with their positions, and copies of indices, of the result and of values.

    The result is made contiguous, and copied again with indexed dimensions first if these are not adjacent. A mask may
    select all its elements. Source: `Indexing.cu`, `index_put_with_sort_kernel`.
    """
    result, positions = call.outputs[0], [tensor for tensor in given if tensor is not None]
    num = _num_indexed(positions)
    if num == 0 or result.numel() == 0:
        return []
    if any(map(_is_mask, positions)):
        copies = [*([8 * num] * 2 * result.dim()), *(2 * [nbytes_of(result)]), max(map(nbytes_of, (result, values)))]
        return [*copies, *(4 * [8 * num]), _MIB + num // 8, sort_nbytes(num, 8, 8)]
    indexed = [dim for dim, tensor in enumerate(given) if tensor is not None]
    before = [size for dim, size in enumerate(result.shape[: indexed[-1]]) if dim not in indexed]
    moved = len(indexed) <= indexed[-1] - indexed[0] and prod(before) > 1
    written = num * prod(size for dim, size in enumerate(result.shape) if dim not in indexed)
    copies = [8 * tensor.numel() for tensor in positions if tensor.dtype != torch.int64]
    copies += [nbytes_of(result)] * ((not result.is_contiguous()) + moved)
    copies += [] if values.is_contiguous() and values.numel() == written else [written * values.itemsize]
    return [*copies, *(4 * [8 * num]), sort_nbytes(num, 8, 8)]


def _indices(call: Call) -> list[Tensor]:
    given = call.arguments.get("indices", call.arguments.get("index"))
    return [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]


def _num_indexed(indices: Sequence[Tensor]) -> int:
    """Bound the elements of the indices after broadcasting; a mask may select all its elements."""
    if not indices:
        return 0
    shape = torch.broadcast_shapes(*(index.shape for index in indices if not _is_mask(index)))
    return prod(shape) * max((index.numel() for index in indices if _is_mask(index)), default=1)


def _expanded(indices: Sequence[Tensor]) -> list[int]:
    """Count int64 indices: a mask becomes one for each of its dimensions."""
    return [8 * _num_indexed(indices)] * sum(tensor.dim() if _is_mask(tensor) else 1 for tensor in indices)


def _is_mask(index: Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8)
