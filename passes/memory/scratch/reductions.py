"""Count the scratch bytes of reductions on the CPU: casts, float32 copies of low precision, partial results per thread.

Source: ATen's `ReduceOps.cpp`, `TensorCompare.cpp`, `Sorting.cpp` and `TensorIteratorReduce.cpp`.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from chunkc.passes.memory.scratch.copies import LOW_PRECISION, contiguous_copy_nbytes, copy_block_nbytes, nbytes_of
from chunkc.passes.memory.scratch.iterator import reduces_two_inner_dimensions
from chunkc.passes.memory.scratch.rules import SCALAR_NBYTES, Call

_SPLIT_NUMEL = 32768
"""From so many elements on, a reduction to one element is shared out among the threads."""


def _partial_nbytes(call: Call, source: Tensor, itemsize: int) -> int:
    """Count a partial result per thread, if everything is reduced to one element."""
    shared = call.outputs[0].numel() == 1 and source.numel() >= _SPLIT_NUMEL and call.num_threads > 1
    return call.num_threads * itemsize if shared else 0


def _reduced_dims(call: Call) -> set[int]:
    source, dims = call["self"], call.arguments.get("dim")
    if dims is None or dims == []:
        return set(range(source.dim()))
    return {dim % max(1, source.dim()) for dim in ([dims] if isinstance(dims, int) else dims)}


def _sum_nbytes(call: Call, source: Tensor, dtype: torch.dtype) -> int:
    """Count a sum in `dtype`: a cast, or a float32 copy if two inner dimensions of low precision are reduced."""
    if dtype in LOW_PRECISION and source.dim() and reduces_two_inner_dimensions(source, _reduced_dims(call)):
        return nbytes_of(source, 4) + nbytes_of(call.outputs[0], 4) + _partial_nbytes(call, source, 4)
    cast = nbytes_of(source, dtype.itemsize) if dtype != source.dtype else 0
    return cast + _partial_nbytes(call, source, dtype.itemsize)


def sum_rule(call: Call) -> int:
    return _sum_nbytes(call, call["self"], call.outputs[0].dtype)


def prod_rule(call: Call) -> int:
    """Count `prod`, `nansum`: a cast."""
    source, result = call["self"], call.outputs[0]
    cast = nbytes_of(source, result.itemsize) if result.dtype != source.dtype else 0
    return cast + _partial_nbytes(call, source, result.itemsize)


def mean_rule(call: Call) -> int:
    """Count a sum (of a float32 copy for low precision), and the number that divides it."""
    source, result = call["self"], call.outputs[0]
    if result.dtype in LOW_PRECISION:
        copy = nbytes_of(source, 4) if source.dtype != torch.float32 else 0
        divisor = 8 + 4
        return nbytes_of(result, 4) + max(copy + _partial_nbytes(call, source, 4), divisor)
    return max(_sum_nbytes(call, source, result.dtype), _divisor_nbytes(result.dtype))


def _divisor_nbytes(dtype: torch.dtype) -> int:
    return 8 + (dtype.itemsize if dtype != torch.int64 else 0)


def truth_rule(call: Call) -> int:
    """Count `any`, `all`: a copy as bool."""
    source = call["self"]
    cast = source.numel() if source.dtype not in (torch.bool, torch.uint8) else 0
    return cast + _partial_nbytes(call, source, 1)


def extreme_rule(call: Call) -> int:
    """Count `amax`, `amin`: partial results; `aminmax` of everything: a contiguous copy."""
    if call.target._schema.name == "aten::aminmax":
        everything = call["dim"] is None
        return contiguous_copy_nbytes(call["self"]) if everything else 0
    return _partial_nbytes(call, call["self"], call.outputs[0].itemsize)


def extreme_with_index_rule(call: Call) -> int:
    """Count `max`, `min`, `argmax`, `argmin`: a contiguous copy, if everything is reduced."""
    source = call["self"]
    if "dim" in call.arguments:
        return 0 if call["dim"] is not None or _is_flat(source) else contiguous_copy_nbytes(source)
    return contiguous_copy_nbytes(source)


def _is_flat(source: Tensor, num_dims: int | None = None) -> bool:
    """Whether a view can have all of the tensor's dimensions, or the first `num_dims`, as one."""
    dims = [(n, s) for n, s in zip(source.shape[:num_dims], source.stride()) if n != 1]
    return all(stride == inner * step for (_, stride), (inner, step) in pairwise(dims))


def variance_rule(call: Call) -> int:
    """Count the mean of everything, where its variance is one element in full precision.

    Of complex numbers, real and imaginary parts have variances (and means) of their own, which are added up.
    """
    source, result, has_mean = call["self"], call.outputs[0], len(call.outputs) > 1
    mean = 0
    if result.numel() == 1 and not has_mean and result.dtype in (torch.float32, torch.float64):
        parts = _partial_nbytes(call, source, result.itemsize)
        mean = result.itemsize + max(parts, _divisor_nbytes(result.dtype))
    if not source.is_complex():
        return mean
    return max((4 if has_mean else 2) * nbytes_of(result), nbytes_of(result) + mean)


def norm_rule(call: Call) -> int:
    result = call.outputs[0]
    order = call.arguments.get("ord", call.arguments.get("p"))
    return _norm_nbytes(call["self"], result.numel(), result.dtype, order)


def _norm_nbytes(source: Tensor, num_results: int, dtype: torch.dtype, order: float | None) -> int:
    """Count a cast; and all magnitudes of complex numbers, as complex numbers first, for the largest or the least.

    The norm of single elements also takes the magnitudes of complex ones; or in order 0, a number to compare with.
    """
    is_single = source.numel() == num_results
    compared = 8 + source.itemsize if is_single and order == 0 else 0
    if not source.is_complex():
        return compared + (nbytes_of(source, dtype.itemsize) if source.dtype != dtype else 0)
    cast = nbytes_of(source, 2 * dtype.itemsize) if source.itemsize != 2 * dtype.itemsize else 0
    if order is not None and math.isinf(order):
        return cast + nbytes_of(source, 3 * dtype.itemsize)
    return cast + compared + (nbytes_of(source, 2 * dtype.itemsize) if is_single else 0)


def logsumexp_rule(call: Call) -> int:
    """Count maxima and exponentials while they are summed; or, before that, a mask of infinite maxima."""
    source, result = call["self"], call.outputs[0]
    cast = nbytes_of(source, result.itemsize) if source.dtype != result.dtype else 0
    exponentials = torch.empty_like(source, dtype=result.dtype, device="meta")
    infinite = result.numel() + 8 + result.itemsize
    summing = nbytes_of(exponentials) + _sum_nbytes(call, exponentials, result.dtype)
    return cast + nbytes_of(result) + max(infinite, summing)


def median_rule(call: Call) -> int:
    """Count a copy to rearrange, unless the dimension is the innermost in memory."""
    source = call["self"]
    dim = call.arguments.get("dim")
    if dim is None or not source.dim():
        return nbytes_of(source)
    if source.stride(dim) in (0, 1):
        return 0
    return nbytes_of(source) + copy_block_nbytes(source.transpose(dim, -1))


def kthvalue_rule(call: Call) -> int:
    """Count a copy to rearrange, and its indices."""
    return nbytes_of(call["self"]) + nbytes_of(call["self"], 8)


def histogram_rule(call: Call) -> int:
    """Count for `histc` a flat copy, edges, and the larger of counts per thread and the search for a range.

    The search, if no range is given, takes a contiguous copy and its minimum and maximum.
    """
    source, counts = call["self"], nbytes_of(call.outputs[0])
    copy = contiguous_copy_nbytes(source)
    looking = copy + 2 * source.itemsize if call["min"] == call["max"] else 0
    counting = counts + source.itemsize + max(looking, call.num_threads * counts)
    return counting if _is_flat(source) else max(copy - counts, nbytes_of(source) + counting)


def histograms_rule(call: Call) -> int:
    """Bound `histogram`: counts per thread, contiguous copies; of several dimensions also edges, once or twice."""
    counts, name = call.outputs[0], call.target._schema.name
    in_rows = "histogramdd" in name and call["self"].dim() <= 2
    copied = [t for t in call.tensors if t is not call["self"]] if in_rows else call.tensors
    edges = (sum(counts.shape) + counts.dim()) * (2 if name.endswith("_cts") else 1) if "histogramdd" in name else 0
    numel = call.num_threads * counts.numel() + edges
    return numel * counts.itemsize + contiguous_copy_nbytes(*copied) + SCALAR_NBYTES


def bin_edges_rule(call: Call) -> int:
    """Count `_histogramdd_bin_edges`: a copy of points that no view has in rows; the extremes end before the edges."""
    source = call["self"]
    return 0 if _is_flat(source, source.dim() - 1) else contiguous_copy_nbytes(source)


def segments_rule(call: Call) -> int:
    """Count contiguous copies for `segment_reduce`; between these, and before the result, lengths summed up."""
    lengths = call["lengths"]
    checking = 0 if lengths is None or call["unsafe"] else 8 + 9 * max(1, lengths.numel() // max(1, lengths.shape[-1]))
    copies = contiguous_copy_nbytes(lengths, call["offsets"])
    return contiguous_copy_nbytes(call["data"]) + max(copies, checking - nbytes_of(call.outputs[0]))


def renorm_rule(call: Call) -> int:
    """Count a norm per slice; and after it, a factor that has another dtype, computed in the norm's."""
    source, num_slices = call["self"], call["self"].shape[call["dim"]]
    dtype = torch.float32 if source.dtype in LOW_PRECISION else source.dtype.to_real()
    factor = num_slices * (source.itemsize + dtype.itemsize) if source.dtype != dtype else 0
    norms = _norm_nbytes(source, num_slices, dtype, call["p"])
    return num_slices * dtype.itemsize + max(norms, factor)


def count_nonzero_rule(call: Call) -> int:
    """Count, along dimensions, a mask of elements that are not zero, and its int64 copy, which is summed."""
    source = call["self"]
    if call.target._overloadname != "dim_IntList" and call["dim"] is None:
        return 0
    return max(9 * source.numel(), source.numel() + 8 + source.itemsize)
