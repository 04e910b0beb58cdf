"""Bound the scratch bytes of rare operators on the CPU: multiples of what goes in and out, not what ATen or MKL decide.

LAPACK's workspaces come from torch's allocator, in sizes that LAPACK is asked for when it runs: so many numbers for
each row or column of one matrix, more where it decomposes in blocks of columns. The most that MKL wanted for matrices
up to 2048 x 2048 stands in `scratch.operators`. Sorted values come with their positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from math import prod

import torch
from torch import Tensor

from chunkc.passes.memory.scratch.copies import LOW_PRECISION, contiguous_copy_nbytes, nbytes_of
from chunkc.passes.memory.scratch.iterator import common_dtype
from chunkc.passes.memory.scratch.products import gemm_nbytes
from chunkc.passes.memory.scratch.rules import Call, pointwise

_SLACK_NBYTES = 1024
_BLOCKED = 32
"""Edge of the smallest matrix that LAPACK decomposes in blocks."""


@dataclass(frozen=True)
class Bound:
    """An upper bound: the sum of all that follows, 8 bytes a thread and 1 KiB; itself a rule.

    Attributes:
        copies: of the largest operand; one is for a layout that is not read in place, or a block to transpose it.
        strided: contiguous copies of all operands that are not contiguous.
        operands: copies of all.
        results: copies of all.
        thread_results: copies of all for each thread.
        sums: float32 copies of results in low precision.
        broadcast: copies of all operands broadcast together, in the dtype of their promotion.
        together: the same, of 4 bytes an element at least.
        casts: copies of operands and results that have another dtype than the arithmetic.
        integers: 64-bit integers for each element of operands of integers.
        positions: 64-bit integers for each element of the largest operand.
        rows: bytes for each row of its matrices.
        work: numbers for each row or column of one matrix.
        blocks: the same, of a matrix that is decomposed in blocks.
        numbers: numbers, whatever the size.
    """

    copies: int = 0
    strided: int = 0
    operands: int = 0
    results: int = 0
    thread_results: int = 0
    sums: int = 0
    broadcast: int = 0
    together: int = 0
    casts: int = 0
    integers: int = 0
    positions: int = 0
    rows: int = 0
    work: int = 0
    blocks: int = 0
    numbers: int = 0

    def __call__(self, call: Call) -> int:
        given, largest = call.tensors, max(call.tensors or call.outputs, key=nbytes_of)
        most = max((tensor.numel() for tensor in given), default=0)
        edge = max((size for tensor in given for size in tensor.shape[-2:]), default=1)
        numbers = self.numbers + edge * (self.work + (self.blocks if edge >= _BLOCKED else 0))
        num_results = self.results + self.thread_results * call.num_threads
        nbytes = self.copies * nbytes_of(largest) + self.strided * contiguous_copy_nbytes(*given)
        nbytes += self.operands * sum(map(nbytes_of, given)) + num_results * sum(map(nbytes_of, call.outputs))
        nbytes += self.sums * sum(nbytes_of(result, 4) for result in call.outputs if result.dtype in LOW_PRECISION)
        nbytes += self.broadcast * broadcast_nbytes(given) + self.together * broadcast_nbytes(given, least_itemsize=4)
        nbytes += self.casts * pointwise(call)
        nbytes += 8 * self.integers * sum(tensor.numel() for tensor in given if _is_integral(tensor))
        nbytes += 8 * self.positions * most + self.rows * prod(largest.shape[:-1])
        return nbytes + numbers * largest.itemsize + 8 * call.num_threads + _SLACK_NBYTES


def _is_integral(tensor: Tensor) -> bool:
    return not (tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool)


def broadcast_nbytes(tensors: Sequence[Tensor], *, least_itemsize: int = 1) -> int:
    """Return the bytes of a tensor of all operands broadcast together, in the dtype of their promotion."""
    sizes = zip_longest(*(reversed(tensor.shape) for tensor in tensors), fillvalue=1)
    return max(least_itemsize, common_dtype(tensors, (), ()).itemsize) * prod(max(together) for together in sizes)


def matrix_powers(call: Call) -> int:
    """Bound `linalg_matrix_exp` by its longest Taylor polynomial, which has 12 powers at a time; norms choose one."""
    first, edge = call.tensors[0], call.tensors[0].shape[-1]
    return Bound(copies=12, rows=64)(call) + gemm_nbytes(first.dtype, edge, edge, edge, call.num_threads)


def transform(call: Call) -> int:
    """Count Fourier transforms: a copy of the input, or nothing; to real numbers, bound two, and a block of a matrix.

    MKL transforms some dimensions of a tensor, for one batch (ATen's `mkl/SpectralOps.cpp`). So the other dimensions
    become one, and where they cannot, what goes in is copied.
    """
    source = call["self"]
    if call.name == "_fft_c2r":
        return (3 if source.dim() == 2 else 2) * nbytes_of(source)
    others = [dim for dim in range(source.dim()) if dim not in call["dim"] and source.shape[dim] != 1]
    batch = sorted(((source.stride(dim), source.shape[dim]) for dim in others), reverse=True)
    is_one = all(outer == inner * size for (outer, _), (inner, size) in pairwise(batch))
    return 0 if is_one else nbytes_of(source)


def trilinear(call: Call) -> int:
    """Count `F.bilinear` and its gradients: for each index of one dimension, two products, one after the other.

    The first multiplies the first two operands, and sums over dimensions that the third does not have.
    """
    names = ("1", "2", "3")
    operands = [call[f"i{name}"] for name in names]
    missing = [set(call[f"expand{name}"]) for name in names]
    unrolled, summed = call.arguments.get("unroll_dim", 1), set(call["sumdim"])
    num_dims = operands[0].dim() + len(missing[0])
    slices = []
    for operand, missing_dims in zip(operands, missing, strict=True):
        sizes = iter(operand.shape)
        present = [1 if dim in missing_dims else next(sizes) for dim in range(num_dims)]
        present[unrolled] = 1
        slices.append(present)
    early = summed & missing[2]
    product = [1 if dim in early else max(slices[0][dim], slices[1][dim]) for dim in range(num_dims)]
    result = [1 if dim in summed else max(product[dim], slices[2][dim]) for dim in range(num_dims)]
    copied = sum(prod(sizes) for sizes, operand in zip(slices, operands, strict=True) if not operand.is_contiguous())
    dtype, gemms = operands[0].dtype, []
    for left, right, dims in ((slices[0], slices[1], early), (product, slices[2], summed - early)):
        inner = max(1, prod(min(left[dim], right[dim]) for dim in dims))
        gemms.append(gemm_nbytes(dtype, prod(left) // inner, inner, prod(right) // inner, call.num_threads))
    return (prod(product) + prod(result) + copied) * dtype.itemsize + max(gemms)
