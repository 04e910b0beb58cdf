"""Count the scratch bytes of Fourier transforms on the CPU. Source: ATen's `mkl/SpectralOps.cpp`.

MKL transforms some dimensions of a tensor, for one batch. So the other dimensions become one, and where they cannot
without it, what goes in is copied. Without MKL nothing is copied.
"""

from __future__ import annotations

from itertools import pairwise

from chunkc.passes.memory.scratch.copies import nbytes_of
from chunkc.passes.memory.scratch.rules import Call


def transform_rule(call: Call) -> int:
    """Count `_fft_r2c`, `_fft_c2c`: a copy of the input, or nothing."""
    source, transformed = call["self"], call["dim"]
    sizes, strides = source.shape, source.stride()
    others = [dim for dim in range(source.dim()) if dim not in transformed and sizes[dim] != 1]
    batch = sorted(others, key=lambda dim: -strides[dim])
    is_one = all(strides[outer] == strides[inner] * sizes[inner] for outer, inner in pairwise(batch))
    return 0 if is_one else nbytes_of(source)
