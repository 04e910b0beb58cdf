"""Device code of sums of squares. Imports Triton: use it through `chunkc.kernels.sums_triton`."""

from __future__ import annotations

import triton
import triton.language as tl

from chunkc.ir.sums import COLUMNS
from chunkc.kernels.formats import UNIT
from chunkc.kernels.triton_formats import load_wide

_UNIT = tl.constexpr(UNIT)
_COLUMNS = tl.constexpr(COLUMNS)


@triton.jit(do_not_specialize_on_alignment=["rows", "sums"])
def sum_squares_kernel(base, rows, sums, BLOCK: tl.constexpr):
    """Sum up squares, a program per row (begin, end, index of the sum).

    Both branches add in the same order; the first reads vectors.
    """
    row = rows + tl.program_id(0).to(tl.int64) * _COLUMNS
    begin = tl.load(row)
    numel = (tl.load(row + 1) - begin).to(tl.int32)
    total = tl.zeros((BLOCK,), tl.float64)
    whole = 0
    if begin % _UNIT == 0:
        whole = numel // BLOCK * BLOCK
        # Divided and multiplied only to tell the compiler the branch's condition: multiples of _UNIT.
        first = base + begin // _UNIT * _UNIT
        for start in range(0, whole, BLOCK):
            total = _with_block(first, start, whole // _UNIT * _UNIT, total, BLOCK)
    for start in range(whole, numel, BLOCK):
        total = _with_block(base + begin, start, numel, total, BLOCK)
    tl.store(sums + tl.load(row + 2), tl.sum(total))


@triton.jit
def _with_block(first, begin, end, total, BLOCK: tl.constexpr):
    """Add the squares of elements `[begin, end)` from `first` on, at most BLOCK of them, to `total`."""
    offsets = begin + tl.arange(0, BLOCK)
    wide = load_wide(first, offsets, offsets < end).to(tl.float64)
    return total + wide * wide
