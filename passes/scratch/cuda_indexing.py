"""Rules of CUDA devices for operators that index, scatter and sort; see `cuda_rules`."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from chunkc.passes.scratch.cuda_rules import Call, contiguous, nbytes_of

_FEW_INDICES = 3072
_MIB = 1 << 20


def embedding_backward(call: Call) -> list[int]:
    """`Embedding.cu`, `EmbeddingBackwardKernel.cu`: up to 3,072 indices, unless gradients are scaled, are added as they
    come. More are sorted, with their origins; counts, and CUB's scratch; sums in fp32 per part of a segment of equal
    indices: `max_partial_segment`, a tenth of the indices and as many again as there can be segments."""
    indices, grad = call.tensor("indices"), call.tensor("grad_output")
    num = indices.numel()
    copies = [nbytes_of(tensor) for tensor in (grad, indices) if not tensor.is_contiguous()]
    if num <= _FEW_INDICES and not call.arguments.get("scale_grad_by_freq"):
        return copies
    width = grad.shape[-1] if grad.dim() else 1
    num_segments = min(num, max((tensor.shape[0] for tensor in call.outputs), default=num))
    num_parts = num // 10 + num_segments
    return [*_sorting(num), 8 * num_parts, 4 * num_parts * width, *copies]


def _sorting(num: int) -> list[int]:
    """Of `num` int64 keys with int64 origins: both, sorted, CUB's second pair of buffers and its bookkeeping."""
    return [8 * num] * 8 + [_MIB + num // 8]


def index(call: Call) -> list[int]:
    """`IndexKernel.cpp`, `make_info`: indices as int64, once more where they are brought to one shape."""
    return [*_expanded_indices(call), *contiguous(call)]


def masked_index(call: Call) -> list[int]:
    """`ATen/native/TensorAdvancedIndexing.cpp`, `_unsafe_masked_index`: indices in bounds, what is not selected, and
    the result before that is filled in."""
    clamped = [nbytes_of(tensor) for tensor in _indices(call)]
    return [*clamped, call.tensor("mask").numel(), nbytes_of(call.outputs[0]), *index(call)]


def scatter_reduce(call: Call) -> list[int]:
    """`ATen/native/TensorAdvancedIndexing.cpp`, `scatter_reduce_two`: for means, ones to be counted, counts, and which
    of them are none."""
    counted = []
    if call.arguments["reduce"] == "mean":
        result = call.outputs[0]
        counted = [nbytes_of(call.tensor("src")), nbytes_of(result), result.numel()]
    return [*counted, *contiguous(call)]


def embedding(call: Call) -> list[int]:
    """`ATen/native/Embedding.cpp`: indices in a row."""
    indices = call.tensor("indices")
    return [] if indices.is_contiguous() else [nbytes_of(indices)]


def index_put(call: Call) -> list[int]:
    """`Indexing.cu`, `index_put_with_sort_kernel`: linear indices, sorted, with their origins, and CUB's scratch; the
    values expanded and made contiguous."""
    num = _num_indexed(call)
    values = call.arguments.get("values", call.arguments.get("source"))
    expanded = []
    if isinstance(values, Tensor):
        slice_numel = max(tensor.numel() for tensor in (*call.inputs, *call.outputs)) if values.dim() == 0 else 0
        expanded = [max(values.numel(), slice_numel) * values.itemsize]
    return [*_sorting(num), *(2 * _expanded_indices(call)), *expanded, *contiguous(call)]


def _indices(call: Call) -> list[Tensor]:
    given = call.arguments.get("indices", call.arguments.get("index"))
    return [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]


def _num_indexed(call: Call) -> int:
    """Elements of the indices once they have one shape. A mask may select all, and each with each of the others."""
    indices = _indices(call)
    if not indices:
        return 0
    shape = torch.broadcast_shapes(*(index.shape for index in indices if not _is_mask(index)))
    return prod(shape) * max((index.numel() for index in indices if _is_mask(index)), default=1)


def _expanded_indices(call: Call) -> list[int]:
    """A mask becomes an index for each of its dimensions."""
    num_indices = sum(tensor.dim() if _is_mask(tensor) else 1 for tensor in _indices(call))
    return [8 * _num_indexed(call)] * num_indices


def _is_mask(index: Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8)


def sort(call: Call) -> list[int]:
    """`Sort.cpp`, `Sort.cu`, `TensorTopK.cu`: values and int64 indices once more, doubled by CUB's segmented sort."""
    numel = max(tensor.numel() for tensor in call.inputs)
    itemsize = max(tensor.itemsize for tensor in call.inputs)
    return [numel * (itemsize + 8)] * 4 + [_MIB + numel // 8]


def sample(call: Call) -> list[int]:
    """`ATen/native/Distributions.cpp`, `MultinomialKernel.cu`: normalised weights, sums or random keys, sorted."""
    return [4 * tensor.numel() for tensor in call.inputs for _ in range(4)] + sort(call)


def permutation(call: Call) -> list[int]:
    """`Randperm.cu`: random keys and numbers in order, sorted."""
    return _sorting(max(tensor.numel() for tensor in call.outputs))


def masked_scatter(call: Call) -> list[int]:
    """`IndexKernel.cpp`, `masked_scatter_cuda`: the mask expanded, and an int64 sum up to each of its elements."""
    numel = max(tensor.numel() for tensor in call.inputs)
    return [numel, 8 * numel, _MIB + numel // 8, *contiguous(call)]
