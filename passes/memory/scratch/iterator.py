"""Model ATen's TensorIterator: the dtype it computes in, its casts, the order it walks a reduction in.

Sources: ATen's `TensorIterator.cpp` (`compute_types`, `reorder_dimensions`, `coalesce_dimensions`) and `ReduceOps.cpp`
(`should_use_acc_buffer`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
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

    Args:
        reduced: dimensions of `source`, none negative.
    """
    shape = list(source.shape)
    kept = [1 if dim in reduced else size for dim, size in enumerate(shape)]
    out_strides, stride = [0] * len(shape), 1
    for dim in reversed(range(len(shape))):
        out_strides[dim] = 0 if dim in reduced or shape[dim] == 1 else stride
        stride *= kept[dim]
    in_strides = [0 if shape[dim] == 1 else s for dim, s in enumerate(source.stride())]
    order = _order(shape, out_strides, in_strides)
    walked = _coalesce([(shape[dim], out_strides[dim], in_strides[dim]) for dim in order])
    return len(walked) >= 2 and walked[0][1] == walked[1][1] == 0


def _order(shape: list[int], out_strides: list[int], in_strides: list[int]) -> list[int]:
    """Order dimensions from the iterator's innermost to the outermost: reduced ones first, then by stride."""

    is_reduced = [bool(stride == 0) for stride in out_strides]  # of symbolic sizes, answers cannot be compared

    def compare(left: int, right: int) -> int:
        if is_reduced[left] != is_reduced[right]:
            return 1 if is_reduced[right] else -1
        for strides in (out_strides, in_strides):
            if strides[left] == 0 or strides[right] == 0:
                continue
            if strides[left] != strides[right]:
                return -1 if strides[left] < strides[right] else 1
            if shape[left] > shape[right]:
                return 1
        return 0

    order = list(reversed(range(len(shape))))
    for index in range(1, len(order)):
        moving = index
        for before in reversed(range(index)):
            outcome = compare(order[before], order[moving])
            if outcome > 0:
                order[before], order[moving] = order[moving], order[before]
                moving = before
            elif outcome < 0:
                break
    return order


def _coalesce(dims: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Join neighbouring dimensions that one stride spans.

    Each is (size, output stride, input stride); the innermost is first.
    """
    joined = dims[:1]
    for size, out_stride, in_stride in dims[1:]:
        last_size, last_out, last_in = joined[-1]
        if last_size == 1 or size == 1 or (last_size * last_out == out_stride and last_size * last_in == in_stride):
            strides = (out_stride, in_stride) if last_size == 1 else (last_out, last_in)
            joined[-1] = (last_size * size, *strides)
        else:
            joined.append((size, out_stride, in_stride))
    return joined
