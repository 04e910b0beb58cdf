"""Count the scratch bytes of forms and powers of matrices on the CPU; decompositions are in `scratch.bounds`."""

from __future__ import annotations

from math import prod

from chunkc.passes.memory.scratch.copies import nbytes_of
from chunkc.passes.memory.scratch.products import gemm_nbytes
from chunkc.passes.memory.scratch.rules import Call

_MATRIX_POWERS = 12
"""Matrices that the longest of `linalg_matrix_exp`'s Taylor polynomials, of degree 18, has at a time."""


def check_rule(call: Call) -> int:
    """Count `_linalg_check_errors`: a boolean per matrix, and whether any is true."""
    info = call["info"]
    return info.numel() + 1


def matrix_exp_rule(call: Call) -> int:
    """Bound the bytes of the matrices' powers and sums; how many there are depends on norms."""
    first = call.tensors[0]
    num = first.numel() // max(1, first.shape[-1] * first.shape[-2])
    size = first.shape[-1]
    product = gemm_nbytes(first.dtype, size, size, size, call.num_threads)
    return _MATRIX_POWERS * nbytes_of(first) + product + 64 * num + 256


def trilinear_rule(call: Call) -> int:
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
