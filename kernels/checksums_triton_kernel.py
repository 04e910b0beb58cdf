"""Device code of checksums. Imports Triton: use it through `chunkc.kernels.checksums_triton`."""

from __future__ import annotations

import triton
import triton.language as tl

from chunkc.ir.sums import COLUMNS, MIX, PLACE
from chunkc.kernels.formats import UNIT

_UNIT = tl.constexpr(UNIT)
_COLUMNS = tl.constexpr(COLUMNS)
_FIRST, _SECOND, _PLACE = tl.constexpr(MIX[0]), tl.constexpr(MIX[1]), tl.constexpr(PLACE)


@triton.jit(do_not_specialize_on_alignment=["rows", "sums"])
def checksums_kernel(base, rows, sums, BLOCK: tl.constexpr):
    """Compute checksums, a program per row (begin, end, index of the sum). The first branch reads vectors."""
    row = rows + tl.program_id(0).to(tl.int64) * _COLUMNS
    begin = tl.load(row)
    numel = (tl.load(row + 1) - begin).to(tl.int32)
    total = tl.zeros((BLOCK,), tl.int64)
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
    """Add the mixed words `[begin, end)` from `first` on, at most BLOCK of them, to `total`."""
    places = begin + tl.arange(0, BLOCK)
    mask = places < end
    word = tl.load(first + places, mask=mask, other=0).to(tl.int32).to(tl.uint32, bitcast=True)
    x = word ^ (places.to(tl.uint32, bitcast=True) * _PLACE)
    x = (x ^ (x >> 16)) * _FIRST
    x = (x ^ (x >> 13)) * _SECOND
    x = x ^ (x >> 16)
    return total + tl.where(mask, x.to(tl.int64), 0)
