"""Scratch bytes of matrix decompositions and solvers on the CPU: bounds, from the matrices that go in and come out.

LAPACK's own workspaces come from torch's allocator, in sizes that LAPACK is asked for when it runs.
"""

from __future__ import annotations

from chunkc.passes.scratch.copies import copy_block_nbytes, nbytes_of
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
