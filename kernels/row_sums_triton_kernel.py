"""Device code of sums over rows. Imports Triton: use it through `chunkc.kernels.row_sums_triton`."""

from __future__ import annotations

import triton
import triton.language as tl

from chunkc.ir.sums import COLUMNS
from chunkc.kernels.formats import UNIT
from chunkc.kernels.triton_formats import load_wide

_UNIT = tl.constexpr(UNIT)
_COLUMNS = tl.constexpr(COLUMNS)


@triton.jit(do_not_specialize_on_alignment=["rows", "sums"])
def row_sums_kernel(base, rows, sums, TERM: tl.constexpr, BLOCK: tl.constexpr):
    """Sum up terms, a program per row (begin, end, index of the sum).

    TERM is `chunkc.kernels.arithmetic.Arithmetic.in_triton`. Both branches add in the same order; the first reads
    vectors.
    """
    row = rows + tl.program_id(0).to(tl.int64) * _COLUMNS
    begin = tl.load(row)
    numel = (tl.load(row + 1) - begin).to(tl.int32)
    total = tl.zeros((BLOCK,), tl.float64 if base.dtype.element_ty.is_floating() else tl.int64)
    whole = 0
    if begin % _UNIT == 0:
        whole = numel // BLOCK * BLOCK
        # Divided and multiplied only to tell the compiler the branch's condition: multiples of _UNIT.
        first = base + begin // _UNIT * _UNIT
        for start in range(0, whole, BLOCK):
            total = _with_block(first, start, whole // _UNIT * _UNIT, total, TERM, BLOCK)
    for start in range(whole, numel, BLOCK):
        total = _with_block(base + begin, start, numel, total, TERM, BLOCK)
    tl.store(sums + tl.load(row + 2), tl.sum(total).to(sums.dtype.element_ty))


@triton.jit
def _with_block(first, begin, end, total, TERM: tl.constexpr, BLOCK: tl.constexpr):
    """Add the terms of elements `[begin, end)` from `first` on, at most BLOCK of them, to `total`."""
    places = begin + tl.arange(0, BLOCK)
    mask = places < end
    element = _load(first, places, mask)
    term = TERM(element, places.to(tl.uint32, bitcast=True)).to(total.dtype)
    return total + tl.where(mask, term, 0)


@triton.jit
def _load(first, places, mask):
    """Load floating-point numbers as fp64, and words as 32 bits with their sign extended."""
    if first.dtype.element_ty.is_floating():
        return load_wide(first, places, mask).to(tl.float64)
    else:
        return tl.load(first + places, mask=mask, other=0).to(tl.int32).to(tl.uint32, bitcast=True)
