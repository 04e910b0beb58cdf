"""Count the scratch bytes of lookups, gathers and scatters on the CPU: converted indices, float32 copies.

Sources: ATen's `TensorAdvancedIndexing.cpp` and `ScatterGatherKernel.cpp`; checked by measuring.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from chunkc.passes.memory.scratch.copies import LOW_PRECISION, contiguous_copy_nbytes, copy_block_nbytes, nbytes_of
from chunkc.passes.memory.scratch.iterator import number_dtype, number_nbytes
from chunkc.passes.memory.scratch.rules import Call


def embedding_rule(call: Call) -> int:
    return contiguous_copy_nbytes(call["indices"])


def converted_nbytes(index: Tensor) -> int:
    """Count the bytes of indices converted to int64; 0 if they are int64."""
    return nbytes_of(index, 8) if index.dtype != torch.int64 else 0


def scatter_rule(call: Call) -> int:
    """Count a float32 copy of a result in low precision, and converted indices."""
    low = nbytes_of(call["self"], 4) if call["self"].dtype in LOW_PRECISION else 0
    return low + converted_nbytes(call["index"])


def scatter_reduce_rule(call: Call) -> int:
    """Count as for a scatter; a mean also has an array of counts, ones to count with, and a mask of zero counts."""
    source = call["self"]
    if call["reduce"] != "mean":
        return scatter_rule(call)
    zero = source.numel() + 8 + source.itemsize
    return nbytes_of(source) + nbytes_of(call["src"]) + max(scatter_rule(call), zero)


def index_reduce_rule(call: Call) -> int:
    """Count a contiguous copy of the indices; a mean also has an array of counts, and ones that are added to it.

    Without `include_self`, the values that the result starts from are written by converted indices.
    """
    source = call["self"]
    indices = contiguous_copy_nbytes(call["index"])
    filling = 0 if call["include_self"] else converted_nbytes(call["index"])
    filling += 0 if source.dim() > 1 else nbytes_of(source)  # computed in a copy
    if call["reduce"] != "mean":
        return indices + filling
    zero = source.numel() + 8 + source.itemsize
    counting = nbytes_of(source) + max(nbytes_of(call["source"]) + index_add_rule(call), zero)
    return indices + max(filling, counting)


def gather_rule(call: Call) -> int:
    """Count a float32 copy of a result in low precision, and converted indices."""
    low = nbytes_of(call.outputs[0], 4) if call["self"].dtype in LOW_PRECISION else 0
    return low + converted_nbytes(call["index"])


def index_select_rule(call: Call) -> int:
    """Count a contiguous copy of the indices and, along dimension 1, of the operand."""
    source = call["self"]
    copy = contiguous_copy_nbytes(source) if source.dim() > 1 and call["dim"] % source.dim() == 1 else 0
    return max(copy, 0) + contiguous_copy_nbytes(call["index"])


def index_add_rule(call: Call) -> int:
    """Count a contiguous copy of the indices, and what sums in low precision take; before, what a copy of `self` takes.

    Along the first dimension that is a float32 slice per thread, along the last or with slices of fewer than 16
    elements a float32 copy; neither if indices are not int64.
    """
    source, dim = call["self"], call["dim"] % max(1, call["self"].dim())
    nbytes = contiguous_copy_nbytes(call["index"])
    if source.dtype in LOW_PRECISION and source.dim() > 1 and call["index"].dtype == torch.int64:
        slice_numel = math.prod(source.shape[1:])
        if dim == 0 and slice_numel >= 16:
            nbytes += call.num_threads * slice_numel * 4
        elif dim in (0, source.dim() - 1):
            nbytes += nbytes_of(source, 4)
    return max(nbytes, copy_block_nbytes(source))


def bincount_rule(call: Call) -> int:
    """Count contiguous copies, of weights as float64 unless they are float32, and that is cast before it is copied."""
    values, weights = call["self"], call["weights"]
    nbytes = contiguous_copy_nbytes(values)
    if weights is None:
        return nbytes
    if weights.dtype not in (torch.float32, torch.float64):
        return nbytes + nbytes_of(weights, 8) * (1 if weights.is_contiguous() else 2)
    return nbytes + contiguous_copy_nbytes(weights)


def search_rule(call: Call) -> int:
    """Count `searchsorted`, `bucketize`: the two ends of a sorter; then contiguous copies, then casts."""
    number, casts = search_casts(call.arguments)
    sorter = call.arguments.get("sorter")
    held, peak = 0, 2 * 8 - nbytes_of(call.outputs[0]) if sorter is not None else 0
    for tensor in (call["self"], _sequence(call.arguments), sorter):
        if isinstance(tensor, Tensor) and not tensor.is_contiguous():
            peak = max(peak, held + contiguous_copy_nbytes(tensor))
            held += nbytes_of(tensor)
    return number + max(peak, held + sum(casts))


def _sequence(arguments: Mapping[str, Any]) -> Tensor:
    found = arguments["boundaries" if "boundaries" in arguments else "sorted_sequence"]
    assert isinstance(found, Tensor)
    return found


def search_casts(arguments: Mapping[str, Any]) -> tuple[int, list[int]]:
    """Return the bytes of a number that becomes a tensor, and of casts to the common dtype (`BucketizationUtils.h`)."""
    sequence, values = _sequence(arguments), arguments["self"]
    common = torch.result_type(sequence, values)
    is_tensor = isinstance(values, Tensor)
    given = [(sequence.numel(), sequence.dtype)]
    given.append((values.numel(), values.dtype) if is_tensor else (1, number_dtype(values)))
    casts = [numel * common.itemsize for numel, dtype in given if dtype != common]
    return 0 if is_tensor else number_nbytes(values), casts


def index_rule(call: Call) -> int:
    """Count indices that are not int64, broadcast and converted; and for a mask, one index per dimension.

    A mask's number of hits is unknown: a bound. One number written by one mask takes nothing.
    """
    indices = [leaf for leaf in call["indices"] if isinstance(leaf, Tensor)]
    masks = [index for index in indices if index.dtype in (torch.bool, torch.uint8)]
    values = call.arguments.get("values")
    if values is not None and values.numel() == 1 and len(masks) == len(indices) == 1 and not call["accumulate"]:
        return 0
    shape = torch.broadcast_shapes(*(index.shape for index in indices)) if not masks else ()
    converted = sum(index.dtype != torch.int64 for index in indices) if not masks else 0
    return converted * math.prod(shape) * 8 + sum(mask.numel() * 8 * (1 + 2 * mask.dim()) for mask in masks)


def masked_index_rule(call: Call) -> int:
    """Bound the bytes of the elements that are moved, and of their indices, masked."""
    indices = sum(nbytes_of(leaf, 8) for leaf in call["indices"] if isinstance(leaf, Tensor))
    values = call.arguments.get("values")
    moved = call.outputs[0] if values is None else values
    return nbytes_of(moved) + 2 * indices + 2 * moved.numel() + 128


def closeness_rule(call: Call) -> int:
    """Bound `allclose`: the error and what is allowed, in two steps each, and booleans."""
    source, other = call["self"], call["other"]
    numel = max(math.prod(torch.broadcast_shapes(source.shape, other.shape)), source.numel(), other.numel())
    return numel * (3 * max(4, source.itemsize) + 4) + 32


def masked_select_rule(call: Call) -> int:
    """Bound `masked_select`: the mask in int64, and its sums up to each element."""
    return 16 * math.prod(torch.broadcast_shapes(call["self"].shape, call["mask"].shape)) + 8 * call.num_threads + 16


def nonzero_static_rule(call: Call) -> int:
    """Bound `nonzero_static`: the positions of all elements, in int64, and the number of each thread."""
    source = call["self"]
    return 8 * source.dim() * source.numel() + 8 * call.num_threads


def to_sparse_rule(call: Call) -> int:
    """Bound `_to_sparse`: values and positions of all elements; with dense dimensions, of these positions three times.

    Which elements are not zero only the values say.
    """
    source, num_sparse = call["self"], call.arguments.get("sparse_dim")
    is_hybrid = num_sparse is not None and num_sparse < source.dim()
    return source.numel() * (source.itemsize + 8 * (3 * source.dim() + 2 if is_hybrid else source.dim())) + 32


def sparse_mask_rule(call: Call) -> int:
    """Bound `sparse_mask`: of each element a value, twice its position and where it is, and a boolean."""
    source = call["self"]
    return source.numel() * (source.itemsize + 8 * (2 * source.dim() + 1) + 1) + 32


def masked_scatter_rule(call: Call) -> int:
    return contiguous_copy_nbytes(call["source"])


def masked_scatter_backward_rule(call: Call) -> int:
    """Bound the bytes of selected elements, at most all, and of their positions, two 64-bit integers each."""
    grad = call["grad_output"]
    return nbytes_of(grad) + max(nbytes_of(grad), nbytes_of(call.outputs[0])) + nbytes_of(grad, 16) + 64
