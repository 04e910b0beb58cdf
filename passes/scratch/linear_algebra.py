"""Scratch bytes of matrix decompositions and solvers on the CPU: bounds, from the matrices that go in and come out.

LAPACK's own workspaces come from torch's allocator, in sizes that LAPACK is asked for when it runs.
"""

from __future__ import annotations

from math import prod

from chunkc.passes.scratch.copies import copy_block_nbytes, nbytes_of
from chunkc.passes.scratch.products import gemm_nbytes
from chunkc.passes.scratch.rules import Call

_MATRIX_POWERS = 12
"""What the longest of `linalg_matrix_exp`'s Taylor polynomials, of degree 18, holds at a time."""


def copy_and_pivots_rule(call: Call) -> int:
    """Inverse, triangular solve: a copy of the matrices, and pivots."""
    first = call.tensors[0]
    rows = first.numel() // first.shape[-1]
    return nbytes_of(first) + 16 * rows + copy_block_nbytes(first) + 256


def pivots_rule(call: Call) -> int:
    """Determinant, `solve`: pivots and a diagonal."""
    first = call.tensors[0]
    return 16 * (first.numel() // first.shape[-1]) + 512


def decomposition_rule(call: Call) -> int:
    """QR, SVD, eigenvalues: LAPACK's workspace for one matrix, or a copy of all."""
    first = call.tensors[0]
    one = first.shape[-1] * first.shape[-2] * first.itemsize
    return max(nbytes_of(first), 2 * one) + 64 * max(first.shape[-2:]) * first.itemsize + 1024


def matrix_exp_rule(call: Call) -> int:
    """Powers of the matrices and their sums; how many depends on norms, by which several matrices are sorted."""
    first = call.tensors[0]
    num = first.numel() // max(1, first.shape[-1] * first.shape[-2])
    return _MATRIX_POWERS * nbytes_of(first) + 64 * num + 256


def trilinear_rule(call: Call) -> int:
    """`F.bilinear` and its gradients: for each index of one dimension, two products, one after the other.

    The first is of the first two operands. It sums only what the third does not have.
    """
    names = ("1", "2", "3")
    operands = [call[f"i{name}"] for name in names]
    missing = [set(call[f"expand{name}"]) for name in names]
    unrolled, summed = call.arguments.get("unroll_dim", 1), set(call["sumdim"])
    num_dims = operands[0].dim() + len(missing[0])
    slices = []
    for operand, absent in zip(operands, missing, strict=True):
        sizes = iter(operand.shape)
        present = [1 if dim in absent else next(sizes) for dim in range(num_dims)]
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
