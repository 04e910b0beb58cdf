"""Count the scratch bytes of reductions on the CPU: casts, float32 copies of low precision, partial results per thread.

Source: ATen's `ReduceOps.cpp`, `TensorCompare.cpp`, `Sorting.cpp` and `TensorIteratorReduce.cpp`.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from chunkc.passes.memory.scratch.copies import LOW_PRECISION, contiguous_copy_nbytes, nbytes_of
from chunkc.passes.memory.scratch.iterator import reduces_two_inner_dimensions
from chunkc.passes.memory.scratch.rules import Call, cast, cast_nbytes

_SPLIT_NUMEL = 32768
"""From so many elements on, a reduction to one element is shared out among the threads."""
_DIVISOR_NBYTES = 8
"""The number of elements, by which a sum is divided."""


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
    return cast_nbytes(source, dtype) + _partial_nbytes(call, source, dtype.itemsize)


def total(call: Call) -> int:
    return _sum_nbytes(call, call["self"], call.outputs[0].dtype)


def prod(call: Call) -> int:
    """Count `prod`, `nansum`: a cast."""
    return cast(call) + _partial_nbytes(call, call["self"], call.outputs[0].itemsize)


def mean(call: Call) -> int:
    """Count a sum (of a float32 copy for low precision), and the number that divides it."""
    source, result = call["self"], call.outputs[0]
    if result.dtype in LOW_PRECISION:
        copy = nbytes_of(source, 4) if source.dtype != torch.float32 else 0
        return nbytes_of(result, 4) + max(copy + _partial_nbytes(call, source, 4), _DIVISOR_NBYTES + 4)
    return max(_sum_nbytes(call, source, result.dtype), _DIVISOR_NBYTES + result.itemsize)


def truth(call: Call) -> int:
    """Count `any`, `all`: a copy as bool, of bytes only where there is one."""
    dtype = torch.bool if call["self"].numel() == 1 else call.outputs[0].dtype
    return cast_nbytes(call["self"], dtype) + _partial_nbytes(call, call["self"], 1)


def extreme(call: Call) -> int:
    """Count `amax`, `amin`: partial results; `aminmax` of everything: a contiguous copy."""
    if call.name == "aminmax":
        return contiguous_copy_nbytes(call["self"]) if call["dim"] is None else 0
    return _partial_nbytes(call, call["self"], call.outputs[0].itemsize)


def extreme_with_index(call: Call) -> int:
    """Count `max`, `min`, `argmax`, `argmin`: a contiguous copy, if everything is reduced."""
    source = call["self"]
    if "dim" in call.arguments:
        return 0 if call["dim"] is not None or _is_flat(source) else contiguous_copy_nbytes(source)
    return contiguous_copy_nbytes(source)


def _is_flat(source: Tensor) -> bool:
    """Whether a view can have all of the tensor's dimensions as one."""
    dims = [(n, s) for n, s in zip(source.shape, source.stride()) if n != 1]
    return all(stride == inner * step for (_, stride), (inner, step) in pairwise(dims))


def variance(call: Call) -> int:
    """Count the mean of everything, where its variance is one element in full precision.

    Of complex numbers, real and imaginary parts have variances (and means) of their own, which are added up.
    """
    source, result, has_mean = call["self"], call.outputs[0], len(call.outputs) > 1
    mean = 0
    if result.numel() == 1 and not has_mean and result.dtype in (torch.float32, torch.float64):
        parts = _partial_nbytes(call, source, result.itemsize)
        mean = result.itemsize + max(parts, _DIVISOR_NBYTES + result.itemsize)
    if not source.is_complex():
        return mean
    return max((4 if has_mean else 2) * nbytes_of(result), nbytes_of(result) + mean)


def norm(call: Call) -> int:
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
        return compared + cast_nbytes(source, dtype)
    casts = cast_nbytes(source, dtype.to_complex())
    if order is not None and math.isinf(order):
        return casts + nbytes_of(source, 3 * dtype.itemsize)
    return casts + compared + (nbytes_of(source, 2 * dtype.itemsize) if is_single else 0)


def logsumexp(call: Call) -> int:
    """Count maxima and exponentials while they are summed; or, before that, a mask of infinite maxima."""
    source, result = call["self"], call.outputs[0]
    exponentials = torch.empty_like(source, dtype=result.dtype, device="meta")
    infinite = result.numel() + 8 + result.itemsize
    summing = nbytes_of(exponentials) + _sum_nbytes(call, exponentials, result.dtype)
    return cast(call) + nbytes_of(result) + max(infinite, summing)


def count_nonzero(call: Call) -> int:
    """Count, along dimensions, a mask of elements that are not zero, and its int64 copy, which is summed."""
    source = call["self"]
    if call.target._overloadname != "dim_IntList" and call["dim"] is None:
        return 0
    return max(9 * source.numel(), source.numel() + 8 + source.itemsize)
