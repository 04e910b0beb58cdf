"""Scratch bytes of lookups, gathers and scatters on the CPU: converted indices, float32 copies of low precision.

Sources: ATen's `TensorAdvancedIndexing.cpp` and `ScatterGatherKernel.cpp`; checked by measuring.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from chunkc.passes.memory.scratch.copies import LOW_PRECISION, contiguous_copy_nbytes, nbytes_of
from chunkc.passes.memory.scratch.iterator import number_dtype, number_nbytes
from chunkc.passes.memory.scratch.rules import Call


def embedding_rule(call: Call) -> int:
    return contiguous_copy_nbytes(call["indices"])


def converted_nbytes(index: Tensor) -> int:
    """Bytes of indices as int64, where they are not."""
    return nbytes_of(index, 8) if index.dtype != torch.int64 else 0


def scatter_rule(call: Call) -> int:
    """Low precision is scattered into a float32 copy; indices are converted."""
    low = nbytes_of(call["self"], 4) if call["self"].dtype in LOW_PRECISION else 0
    return low + converted_nbytes(call["index"])


def scatter_reduce_rule(call: Call) -> int:
    """A mean also counts: an array of counts, ones to count with, and which counts are zero."""
    source = call["self"]
    if call["reduce"] != "mean":
        return scatter_rule(call)
    zero = source.numel() + 8 + source.itemsize
    return nbytes_of(source) + nbytes_of(call["src"]) + max(scatter_rule(call), zero)


def index_reduce_rule(call: Call) -> int:
    """A contiguous copy of the indices. A mean also counts: an array of counts, and ones that are added to it. What the
    result starts from is written by converted indices, unless that is the operand itself."""
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
    """Low precision is gathered into a float32 copy; indices are converted."""
    low = nbytes_of(call.outputs[0], 4) if call["self"].dtype in LOW_PRECISION else 0
    return low + converted_nbytes(call["index"])


def index_select_rule(call: Call) -> int:
    """Along dimension 1 contiguous memory is read."""
    source = call["self"]
    copy = contiguous_copy_nbytes(source) if source.dim() > 1 and call["dim"] % source.dim() == 1 else 0
    return max(copy, 0) + contiguous_copy_nbytes(call["index"])


def index_add_rule(call: Call) -> int:
    """A contiguous copy of the indices. Sums in low precision: along the first dimension a float32 slice per thread,
    along the last a float32 copy; by indices that are not int64, neither."""
    source, dim = call["self"], call["dim"] % max(1, call["self"].dim())
    indices = contiguous_copy_nbytes(call["index"])
    if source.dtype not in LOW_PRECISION or source.dim() < 2 or call["index"].dtype != torch.int64:
        return indices
    if dim == 0:
        return indices + call.num_threads * math.prod(source.shape[1:]) * 4
    return indices + (nbytes_of(source, 4) if dim == source.dim() - 1 else 0)


def search_rule(call: Call) -> int:
    """`searchsorted`, `bucketize`: contiguous copies, then casts. Before that, the two ends of a sorter."""
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
    """Bytes of a number that is searched for as a tensor, and of what is searched and searched for in the dtype of both
    (`BucketizationUtils.h`)."""
    sequence, values = _sequence(arguments), arguments["self"]
    common = torch.result_type(sequence, values)
    is_tensor = isinstance(values, Tensor)
    given = [(sequence.numel(), sequence.dtype)]
    given.append((values.numel(), values.dtype) if is_tensor else (1, number_dtype(values)))
    casts = [numel * common.itemsize for numel, dtype in given if dtype != common]
    return 0 if is_tensor else number_nbytes(values), casts


def membership_rule(call: Call) -> int:
    """Bound of `isin`: both are sorted together, after what repeats has gone. A few elements are looked for instead."""
    elements, test = call["elements"], call["test_elements"]
    if test.numel() < 10:
        return 0
    sorting = 16 + 2 * elements.itemsize
    finding = 0 if call["assume_unique"] else 8
    return (sorting + finding) * elements.numel() + sorting * test.numel()


def index_rule(call: Call) -> int:
    """Indices that are not int64 are broadcast and converted; a mask becomes one index per dimension.

    Bound for masks, of which the number of hits is unknown; one number written where a mask says takes nothing.
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
    """Bound: what is moved and its indices, masked."""
    indices = sum(nbytes_of(leaf, 8) for leaf in call["indices"] if isinstance(leaf, Tensor))
    values = call.arguments.get("values")
    moved = call.outputs[0] if values is None else values
    return nbytes_of(moved) + 2 * indices + 2 * moved.numel() + 128


def masked_scatter_rule(call: Call) -> int:
    return contiguous_copy_nbytes(call["source"])


def masked_scatter_backward_rule(call: Call) -> int:
    """Bound: what the mask selects, at most all; of many elements also their positions, as two 64-bit integers."""
    grad = call["grad_output"]
    return nbytes_of(grad) + max(nbytes_of(grad), nbytes_of(call.outputs[0])) + nbytes_of(grad, 16) + 64
