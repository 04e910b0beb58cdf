"""Bound the scratch bytes of LAPACK's decompositions on the CPU, where what they take depends on more than a size.

LAPACK decomposes in blocks of columns, small matrices without. The most that MKL wanted for matrices up to 2048 x 2048
stands here.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from chunkc.passes.memory.scratch.bounds import Bound, is_dense
from chunkc.passes.memory.scratch.copies import copy_block_nbytes, nbytes_of
from chunkc.passes.memory.scratch.rules import Call

_UNBLOCKED = 2
"""Numbers for each row or column of a small matrix, which is decomposed without blocks."""


def determinant_rule(call: Call) -> int:
    """Bound determinants: pivots, and the diagonals of factors."""
    return Bound(rows=8 + call["A"].itemsize)(call)


def cholesky_rule(call: Call) -> int:
    """Bound `cholesky`: its result is a copy by columns."""
    return Bound()(call) + copy_block_nbytes(call["self"].mT)


def solve_triangular_rule(call: Call) -> int:
    """Bound `linalg_solve_triangular`, which copies triangles unless they are dense."""
    factor = call["self"]
    return Bound()(call) + (0 if is_dense(factor) else nbytes_of(factor))


def lu_unpack_rule(call: Call) -> int:
    """Bound `lu_unpack`, which copies a batch of triangles that are cut from oblong matrices."""
    factors = call["LU_data"]
    is_cut = factors.dim() > 2 and factors.shape[-1] != factors.shape[-2]
    return Bound(copies=int(is_cut), strided=int(not is_cut), rows=9)(call)


def eigh_rule(call: Call) -> int:
    """Bound `_linalg_eigh`: without eigenvectors the matrices are copied, with them LAPACK wants two matrices."""
    bound = Bound(matrices=2, work=40) if call["compute_v"] else Bound(copies=1, transposes=True, work=40)
    return bound(call)


def geqrf_rule(call: Call) -> int:
    """Bound `geqrf`."""
    return Bound(numbers=_reflector_numbers(call["self"]))(call)


def householder_rule(call: Call) -> int:
    """Bound `linalg_householder_product`."""
    return Bound(numbers=_product_numbers(call["input"]))(call)


def qr_rule(call: Call) -> int:
    """Bound `linalg_qr`: the reflectors' scales, and the workspace of `geqrf` or of their product.

    Of matrices of more rows than columns, R is made in a copy, and in mode "r" what it is cut from in another.
    """
    matrices, mode = call["A"], call["mode"]
    rows, columns = matrices.shape[-2:]
    copies = ("complete", "reduced", "r").index(mode) if rows > columns else 0
    numbers = _reflector_numbers(matrices) if mode == "r" else _product_numbers(matrices)
    scales = prod(matrices.shape[:-2]) * min(rows, columns)
    return Bound(copies=copies, numbers=numbers + scales)(call)


def ormqr_rule(call: Call) -> int:
    """Bound `ormqr`, which has a block of reflectors more; complex ones may take twice as many numbers."""
    edge = max(*call["self"].shape[-2:], *call["input3"].shape[-2:])
    numbers = _UNBLOCKED * edge
    if edge >= _smallest_blocked(call["self"].dtype):
        numbers = 98 * edge + (14_300 if call["self"].is_complex() else 8_200)
    return Bound(by_columns=True, numbers=numbers)(call)


def _reflector_numbers(matrices: Tensor) -> int:
    edge = max(matrices.shape[-2:])
    return _UNBLOCKED * edge if edge < 50 else max(33 * edge, edge**2 // 4)


def _product_numbers(matrices: Tensor) -> int:
    edge = max(matrices.shape[-2:])
    return _UNBLOCKED * edge if edge < _smallest_blocked(matrices.dtype) else max(97 * edge, edge**2 // 2)


def _smallest_blocked(dtype: torch.dtype) -> int:
    return 41 if dtype == torch.float64 else 32
