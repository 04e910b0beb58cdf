"""Model ATen's TensorIterator: the dtype it computes in, its casts, how many runs of memory a reduction walks.

Sources: ATen's `TensorIterator.cpp` (`compute_types`, `reorder_dimensions`, `coalesce_dimensions`) and `ReduceOps.cpp`
(`should_use_acc_buffer`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

_Number = int | float | complex


def number_nbytes(number: _Number) -> int:
    """Count the bytes of the 0-dim tensor that a Python number becomes."""
    if isinstance(number, bool):
        return 1
    return 16 if isinstance(number, complex) else 8


def number_dtype(number: _Number) -> torch.dtype:
    if isinstance(number, bool):
        return torch.bool
    if isinstance(number, int):
        return torch.int64
    return torch.complex128 if isinstance(number, complex) else torch.float64


def common_dtype(operands: Sequence[Tensor], numbers: Sequence[_Number], outputs: Sequence[Tensor]) -> torch.dtype:
    """Return the dtype that an elementwise operator computes in: its operands' promotion, or a floating output's."""
    # Vectors decide before 0-dim tensors, and those before Python numbers.
    common = torch.empty((1,), dtype=torch.bool, device="meta")
    if not any(operand.dim() for operand in operands):
        common = common[0]
    for operand in sorted(operands, key=lambda operand: operand.dim() == 0):
        like = torch.empty((1,) * min(operand.dim(), 1), dtype=operand.dtype, device="meta")
        common = torch.empty_like(common, dtype=torch.result_type(common, like))
    for number in numbers:
        common = torch.empty_like(common, dtype=torch.result_type(common, number))
    floating = next((out.dtype for out in outputs if out.dtype.is_floating_point), None)
    integral = not (common.dtype.is_floating_point or common.dtype.is_complex)
    return floating if floating is not None and integral else common.dtype


def numbers_in(values: Collection[Any]) -> list[_Number]:
    """Return the Python numbers among values; a symbolic size counts as an integer, whichever."""
    plain = [0 if isinstance(value, torch.SymInt) else value for value in values]
    return [value for value in plain if isinstance(value, int | float | complex)]


def reduces_two_inner_dimensions(source: Tensor, reduced: Collection[int]) -> bool:
    """Whether the two innermost dimensions of a reduction's iterator are both reduced.

    It puts reduced dimensions first, by stride, and joins neighbours that are one run of memory.

    Args:
        reduced: dimensions of `source`, none negative.
    """
    runs = sorted((source.stride(dim), source.shape[dim]) for dim in reduced if source.shape[dim] != 1)
    return any(outer != inner * size for (inner, size), (outer, _) in pairwise(runs))
