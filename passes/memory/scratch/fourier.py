"""Count the scratch bytes of Fourier transforms on the CPU. Source: ATen's `mkl/SpectralOps.cpp`.

MKL transforms some dimensions of a tensor, for one batch. So the other dimensions become one, and where they cannot
without it, what goes in is copied. The result has that batch's strides. Without MKL nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from chunkc.passes.memory.scratch.copies import nbytes_of
from chunkc.passes.memory.scratch.rules import Call


def transform_rule(call: Call) -> int:
    """Count `_fft_r2c`, `_fft_c2c`: a copy of the input, or nothing."""
    source = call["self"]
    return nbytes_of(source) if _is_copied(source.shape, source.stride(), call["dim"]) else 0


def to_real_rule(call: Call) -> int:
    """Count `_fft_c2r`: all dimensions but the last are transformed first, into as many complex numbers as go in."""
    source = call["self"]
    *first, last = call["dim"]
    nbytes = nbytes_of(source)
    if not first:
        return nbytes if _is_copied(source.shape, source.stride(), [last]) else 0
    between = _strides_after(source.shape, source.stride(), first)
    at_first = nbytes + (nbytes if _is_copied(source.shape, source.stride(), first) else 0)
    at_last = nbytes + (nbytes if _is_copied(source.shape, between, [last]) else 0)
    return max(at_first - sum(map(nbytes_of, call.outputs)), at_last)


def _batch(sizes: Sequence[int], strides: Sequence[int], dims: Sequence[int]) -> list[int]:
    """Return the dimensions that are not transformed, those of large strides first."""
    return sorted((dim for dim in range(len(sizes)) if dim not in dims), key=lambda dim: -strides[dim])


def _is_copied(sizes: Sequence[int], strides: Sequence[int], dims: Sequence[int]) -> bool:
    batch = [dim for dim in _batch(sizes, strides, dims) if sizes[dim] != 1]
    return any(strides[one] != strides[other] * sizes[other] for one, other in pairwise(batch))


def _strides_after(sizes: Sequence[int], strides: Sequence[int], dims: Sequence[int]) -> list[int]:
    """Return the strides of a complex result: dense, the batch first, then `dims`, each by decreasing strides."""
    order = [*_batch(sizes, strides, dims), *sorted(dims, key=lambda dim: -strides[dim])]
    found, stride = [0] * len(sizes), 1
    for dim in reversed(order):
        found[dim] = stride
        stride = stride * sizes[dim]
    return found
