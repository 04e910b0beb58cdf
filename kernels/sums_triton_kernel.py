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
    """One program per row (begin, end, place). Both ways add up in the same order: one of them reads vectors."""
    row = rows + tl.program_id(0).to(tl.int64) * _COLUMNS
    begin = tl.load(row)
    numel = (tl.load(row + 1) - begin).to(tl.int32)
    total = tl.zeros((BLOCK,), tl.float64)
    whole = 0
    if begin % _UNIT == 0:
        whole = numel // BLOCK * BLOCK
        # Divided and multiplied only to show the compiler what the branch has found out.
        first = base + begin // _UNIT * _UNIT
        for start in range(0, whole, BLOCK):
            total = _with_block(first, start, whole // _UNIT * _UNIT, total, BLOCK)
    for start in range(whole, numel, BLOCK):
        total = _with_block(base + begin, start, numel, total, BLOCK)
    tl.store(sums + tl.load(row + 2), tl.sum(total))


@triton.jit
def _with_block(first, begin, end, total, BLOCK: tl.constexpr):
    """`total` and the squares of the elements `[begin, end)` behind the first one, at most BLOCK of them."""
    offsets = begin + tl.arange(0, BLOCK)
    wide = load_wide(first, offsets, offsets < end).to(tl.float64)
    return total + wide * wide
