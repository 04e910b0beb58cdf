"""Count the scratch bytes of lookups, gathers and scatters on the CPU: converted indices, float32 copies.

Sources: ATen's `TensorAdvancedIndexing.cpp` and `ScatterGatherKernel.cpp`; checked by measuring.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from chunkc.passes.memory.scratch.bounds import Bound
from chunkc.passes.memory.scratch.copies import LOW_PRECISION, contiguous_copy_nbytes, copy_block_nbytes, nbytes_of
from chunkc.passes.memory.scratch.iterator import number_nbytes
from chunkc.passes.memory.scratch.rules import Call, cast_nbytes, contiguous, copies


def embedding(call: Call) -> list[int]:
    """List a contiguous copy of the indices."""
    return copies(call, call["indices"])


def gather(call: Call) -> int:
    """Count, of gathers and scatters, a float32 copy of a result in low precision, and converted indices."""
    low = nbytes_of(call.outputs[0], 4) if call["self"].dtype in LOW_PRECISION else 0
    return low + cast_nbytes(call["index"], torch.int64)


def scatter_reduce(call: Call) -> int:
    """Count as for a scatter; a mean also has an array of counts, ones to count with, and a mask of zero counts."""
    source = call["self"]
    if call["reduce"] != "mean":
        return gather(call)
    zero = source.numel() + 8 + source.itemsize
    return nbytes_of(source) + nbytes_of(call["src"]) + max(gather(call), zero)


def index_select(call: Call) -> int:
    """Count a contiguous copy of the indices and, along dimension 1, of the operand."""
    source = call["self"]
    copy = contiguous_copy_nbytes(source) if source.dim() > 1 and call["dim"] % source.dim() == 1 else 0
    return copy + contiguous_copy_nbytes(call["index"])


def index_add(call: Call) -> int:
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


def index_reduce(call: Call) -> int:
    """Bound `index_reduce`: a mean adds up the counts by `index_add`."""
    return index_add(call) + Bound(operands=4, sums=1, integers=2)(call)


def search(call: Call) -> list[int]:
    """Bound `searchsorted`, `bucketize`: copies, contiguous and in the common dtype, of a number too; a sorter's ends.

    Sources: `Bucketization.cu`, `BucketizationUtils.h`.
    """
    sequence, values = call["boundaries" if "boundaries" in call.arguments else "sorted_sequence"], call["self"]
    dtype = torch.result_type(sequence, values)
    casts = [cast_nbytes(tensor, dtype) for tensor in (sequence, values) if isinstance(tensor, Tensor)]
    number = [] if isinstance(values, Tensor) else [number_nbytes(values), dtype.itemsize]
    return [*number, *casts, *contiguous(call), *([] if call.arguments.get("sorter") is None else [8, 8])]


def index(call: Call) -> int:
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


def masked_index(call: Call) -> int:
    """Bound the bytes of the elements that are moved, and of their indices, masked."""
    indices = sum(nbytes_of(leaf, 8) for leaf in call["indices"] if isinstance(leaf, Tensor))
    values = call.arguments.get("values")
    moved = call.outputs[0] if values is None else values
    return nbytes_of(moved) + 2 * indices + 2 * moved.numel() + 128


def sparse(call: Call) -> int:
    """Bound `nonzero_static`: positions of all elements; `_to_sparse`, `sparse_mask`: these three times, and values."""
    source = call["self"]
    times = source.dim() if call.name == "nonzero_static" else 3 * source.dim() + 3
    return 8 * source.numel() * times + 8 * call.num_threads + 32


def masked_scatter(call: Call) -> int:
    return contiguous_copy_nbytes(call["source"])
