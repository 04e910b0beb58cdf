"""Bound the scratch bytes of matrix decompositions and solvers on the CPU by the matrices that go in and come out.

LAPACK's own workspaces come from torch's allocator, in sizes that LAPACK is asked for when it runs: so many numbers for
each row or column of one matrix. How many was measured with MKL, for matrices up to 400 x 400.
"""

from __future__ import annotations

from math import prod

from torch import Tensor

from chunkc.passes.memory.scratch.copies import copy_block_nbytes, nbytes_of
from chunkc.passes.memory.scratch.products import gemm_nbytes
from chunkc.passes.memory.scratch.rules import Call, triangle_rule

_SLACK_NBYTES = 512
_WORK_OF_QR = 97
_WORK_OF_EIGENVECTORS, _WORK_OF_COMPLEX_EIGENVECTORS, _WORK_OF_EIGENVALUES = 396, 165, 40
_WORK_OF_LDL = 48
_WORK_OF_LEAST_SQUARES, _WORK_OF_SINGULAR_VALUES, _WORK_OF_COMPLEX_SINGULAR_VALUES = 56, 168, 240

_WORK_OF_PRODUCT = 13_500
"""Numbers in the workspace of `ormqr`, whatever the size."""

_MATRIX_POWERS = 12
"""Matrices that the longest of `linalg_matrix_exp`'s Taylor polynomials, of degree 18, has at a time."""


def copy_and_pivots_rule(call: Call) -> int:
    """Count, for an inverse or triangular solve, a copy of the matrices, and pivots."""
    largest = max((t for t in call.tensors if t.dim() > 1), key=nbytes_of)
    return nbytes_of(largest) + 16 * _num_rows(largest) + _block_nbytes(largest) + 256


def cholesky_factor_rule(call: Call) -> int:
    """Count `linalg_cholesky_ex`: a triangle; a copy of the result if strides do not tell rows from columns."""
    return triangle_rule(call) + (nbytes_of(call["self"]) if 1 in call["self"].shape[-2:] else 0)


def check_rule(call: Call) -> int:
    """Count `_linalg_check_errors`: a boolean per matrix, and whether any is true."""
    info = call["info"]
    return info.numel() + 1


def pivots_rule(call: Call) -> int:
    """Count, for a determinant or `solve`, pivots and a diagonal."""
    return 16 * _num_rows(call.tensors[0]) + 512


def _num_rows(matrices: Tensor) -> int:
    return prod(matrices.shape[:-1])


def _block_nbytes(matrices: Tensor) -> int:
    """Count the bytes of the square block through which a single matrix is copied to or from LAPACK's order."""
    return max(copy_block_nbytes(matrices), copy_block_nbytes(matrices.mT)) if matrices.dim() == 2 else 0


def _work_nbytes(matrices: Tensor, numbers: int) -> int:
    """Count LAPACK's workspace for one matrix: so many numbers per row or column."""
    return numbers * max(matrices.shape[-2:]) * matrices.itemsize + _SLACK_NBYTES


def qr_rule(call: Call) -> int:
    """Count the reflectors' factors; and the matrix, if it has more rows than columns and only R is wanted."""
    first = call["A"]
    factors = _num_rows(first.mT) * first.itemsize
    if call["mode"] == "r":
        reflected = nbytes_of(first) if first.shape[-2] > first.shape[-1] else 0
        return reflected + factors + _work_nbytes(first, _WORK_OF_QR)
    return factors + _work_nbytes(first, _WORK_OF_QR)


def reflectors_rule(call: Call) -> int:
    """Count `geqrf`: LAPACK's workspace."""
    return _work_nbytes(call["self"], _WORK_OF_QR)


def householder_product_rule(call: Call) -> int:
    return _work_nbytes(call["input"], _WORK_OF_QR)


def reflected_product_rule(call: Call) -> int:
    """Count `ormqr`: reflectors in LAPACK's order, and its workspace."""
    reflectors, other = call["self"], call["input3"]
    copied = 0 if reflectors.mT.is_contiguous() else nbytes_of(reflectors)
    widest = max(reflectors, other, key=lambda matrices: max(matrices.shape[-2:]))
    return copied + _work_nbytes(widest, _WORK_OF_QR) + _WORK_OF_PRODUCT * other.itemsize


def eigenvectors_rule(call: Call) -> int:
    """Count `linalg_eig`: a copy; of real matrices, eigenvectors and eigenvalues as real numbers."""
    first = call.tensors[0]
    work = _WORK_OF_COMPLEX_EIGENVECTORS if first.is_complex() else _WORK_OF_EIGENVECTORS
    return 2 * nbytes_of(first) + 16 * _num_rows(first) + _work_nbytes(first, work)


def eigenvalues_rule(call: Call) -> int:
    """Count `_linalg_eigvals`, `linalg_eigvals`: a copy, eigenvalues as real numbers, LAPACK's workspace."""
    first = call.tensors[0]
    return nbytes_of(first) + 16 * _num_rows(first) + _work_nbytes(first, _WORK_OF_EIGENVALUES)


def pseudoinverse_rule(call: Call) -> int:
    """Count `linalg_pinv`: singular vectors, the right ones also scaled; and a copy, or the product.

    Of complex matrices, the right ones are conjugated, too.
    """
    first = call["self"]
    rows, columns = first.shape[-2:]
    shorter = min(rows, columns)
    scaled = 3 if first.is_complex() else 2
    numel = rows * columns + shorter * (rows + scaled * columns)
    return prod(first.shape[:-2]) * numel * first.itemsize + 32 * _num_rows(first) + 2 * _SLACK_NBYTES


def cholesky_rule(call: Call) -> int:
    """Count `cholesky`, `cholesky_inverse`: LAPACK's `info` of each matrix, and its check."""
    first = call["self"]
    block = _block_nbytes(first) if call.target._schema.name == "aten::cholesky" else 0
    return block + 8 * prod(first.shape[:-2]) + _SLACK_NBYTES


def ldl_rule(call: Call) -> int:
    return _work_nbytes(call["self"], _WORK_OF_LDL)


def lu_unpack_rule(call: Call) -> int:
    """Count pivots as a permutation; and the square part's copy, of matrices that are not square."""
    factors = call["LU_data"]
    return 8 * (_num_rows(factors) + factors.shape[-2]) + _square_part_nbytes(factors) + _SLACK_NBYTES


def _square_part_nbytes(factors: Tensor) -> int:
    shorter = min(factors.shape[-2:])
    is_square = max(factors.shape[-2:]) == shorter
    return 0 if is_square else prod(factors.shape[:-2]) * shorter * shorter * factors.itemsize


def lu_rule(call: Call) -> int:
    """Count `linalg_lu`: both factors in one, pivots, and then as `lu_unpack`."""
    first = call["A"]
    pivots = 16 * _num_rows(first) + 8 * first.shape[-2]
    return nbytes_of(first) + _square_part_nbytes(first) + pivots + _block_nbytes(first) + _SLACK_NBYTES


def decomposition_rule(call: Call) -> int:
    """Bound SVD and eigenvalues of symmetric matrices: a copy of all or of two matrices, and LAPACK's workspace."""
    first = call.tensors[0]
    one = first.shape[-1] * first.shape[-2] * first.itemsize
    return max(nbytes_of(first), 2 * one) + 64 * max(first.shape[-2:]) * first.itemsize + 1024


def matrix_exp_rule(call: Call) -> int:
    """Bound the bytes of the matrices' powers and sums; how many there are depends on norms."""
    first = call.tensors[0]
    num = first.numel() // max(1, first.shape[-1] * first.shape[-2])
    size = first.shape[-1]
    product = gemm_nbytes(first.dtype, size, size, size, call.num_threads)
    return _MATRIX_POWERS * nbytes_of(first) + product + 64 * num + 256


def least_squares_rule(call: Call) -> int:
    """Bound `linalg_lstsq`: a copy of the matrices, singular values, LAPACK's workspace for one matrix."""
    first, size = call["self"], max(*call["self"].shape[-2:], call["b"].shape[-1])
    nbytes = nbytes_of(first) + 32 * _num_rows(first) + _SLACK_NBYTES
    if call["driver"] in (None, "gels", "gelsy"):
        return nbytes + _WORK_OF_LEAST_SQUARES * size * first.itemsize
    work = _WORK_OF_COMPLEX_SINGULAR_VALUES if first.is_complex() else _WORK_OF_SINGULAR_VALUES
    return nbytes + work * size * first.itemsize + 8 * _SLACK_NBYTES


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
