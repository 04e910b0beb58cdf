"""Device code of fused elementwise updates. Imports Triton: use it through `chunkc.kernels.elementwise_triton`.

Compiled without contraction to fused multiply-adds, so the bits are those of `chunkc.kernels.reference.chunk_update`,
interpreted or on any device.
"""

from __future__ import annotations

import triton
import triton.language as tl

from chunkc.kernels.formats import UNIT
from chunkc.kernels.triton_formats import (
    factors_of,
    load_moment,
    load_target,
    load_wide,
    pointer_of_tensor,
    rounding_seed_of_tensor,
    scale_pointer_of_tensor,
    scattered_indices,
    store_moment,
    store_target,
)

_UNIT = tl.constexpr(UNIT)


# Only pointers that vectors are loaded from are specialised on alignment, and no integer on its value: few variants.
@triton.jit(
    do_not_specialize=["first_element", "key_low", "key_high", "sums_stride"],
    do_not_specialize_on_alignment=[
        "scale_0", "scale_1", "scale_2", "code_tables", "work", "pointer_offsets", "scalars", "sums", "unscale",
        "clip", "found_inf",
    ],
)  # fmt: skip
def elementwise_kernel(
    param,
    grad,
    moment_0,
    moment_1,
    moment_2,
    master,
    scale_0,
    scale_1,
    scale_2,
    code_tables,
    work,
    pointer_offsets,
    scalars,
    sums,
    unscale,
    clip,
    found_inf,
    first_element: tl.int64,
    key_low,
    key_high,
    sums_stride: tl.int64,
    ARITHMETIC: tl.constexpr,
    NUM_SCALARS: tl.constexpr,
    NUM_MOMENTS: tl.constexpr,
    TABLE_0: tl.constexpr,
    TABLE_1: tl.constexpr,
    TABLE_2: tl.constexpr,
    KEEPS_TARGET: tl.constexpr,
    KEEPS_MOMENTS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    LONG_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    RAGGED_BLOCK: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    NUM_POINTER_OFFSETS: tl.constexpr,
):
    """Update elements by a rule, a program per row of `work`, int64: begin, end, group.

    With `pointer_offsets`, a row ends with its tensor's number. Slots are then the first tensor's, and the offsets
    locate each tensor's data, by kind (see `chunkc.kernels.pointer_offsets.pointer_offsets_of`).

    `code_tables` is fp32 `[4, 256]`: values, then midpoints, of signed codes, then of unsigned ones. Those of a moment
    begin at its TABLE. ARITHMETIC is `chunkc.kernels.arithmetic.Arithmetic.in_triton`; moments that it does not take
    are None. What it keeps is not stored. `sums` has the sums of the two terms of each program's elements, the second
    `sums_stride` numbers after the first.
    """
    program = tl.program_id(0).to(tl.int64)
    row = work + program * NUM_COLUMNS
    begin = tl.load(row)
    end = tl.load(row + 1)
    if sums is not None:
        sums += program
    group_scalars = scalars + tl.load(row + 2) * NUM_SCALARS
    if pointer_offsets is not None:
        pointer_offsets += tl.load(row + 3) * NUM_POINTER_OFFSETS
        param = pointer_of_tensor(param, pointer_offsets, 0)
        grad = pointer_of_tensor(grad, pointer_offsets, 1)
        if moment_0 is not None:
            moment_0 = pointer_of_tensor(moment_0, pointer_offsets, 2)
        if moment_1 is not None:
            moment_1 = pointer_of_tensor(moment_1, pointer_offsets, 3)
        if moment_2 is not None:
            moment_2 = pointer_of_tensor(moment_2, pointer_offsets, 4)
        if master is not None:
            master = pointer_of_tensor(master, pointer_offsets, 2 + NUM_MOMENTS)
        if scale_0 is not None:
            scale_0 = scale_pointer_of_tensor(scale_0, pointer_offsets, 3 + NUM_MOMENTS)
        if scale_1 is not None:
            scale_1 = scale_pointer_of_tensor(scale_1, pointer_offsets, 4 + NUM_MOMENTS)
        if scale_2 is not None:
            scale_2 = scale_pointer_of_tensor(scale_2, pointer_offsets, 5 + NUM_MOMENTS)
        seed = pointer_offsets + (3 + 2 * NUM_MOMENTS)
        first_element, key_low, key_high = rounding_seed_of_tensor(seed, first_element, key_low, key_high, STOCHASTIC)
    if found_inf is not None:
        end = tl.where(tl.load(found_inf) == 0, end, begin)
    factor, second_factor = factors_of(unscale, clip)
    if (begin | end) % _UNIT == 0:
        # Divided and multiplied only to tell the compiler the branch's condition: multiples of _UNIT.
        _update_row(
            param, grad, moment_0, moment_1, moment_2, master, scale_0, scale_1, scale_2, code_tables, group_scalars,
            sums, sums_stride, factor, second_factor, begin // _UNIT * _UNIT, end // _UNIT * _UNIT,
            first_element, key_low, key_high, ARITHMETIC, NUM_MOMENTS, TABLE_0, TABLE_1, TABLE_2,
            KEEPS_TARGET, KEEPS_MOMENTS, STOCHASTIC, LONG_ROWS, _UNIT, BLOCK,
        )  # fmt: skip
    else:
        _update_row(
            param, grad, moment_0, moment_1, moment_2, master, scale_0, scale_1, scale_2, code_tables, group_scalars,
            sums, sums_stride, factor, second_factor, begin, end,
            first_element, key_low, key_high, ARITHMETIC, NUM_MOMENTS, TABLE_0, TABLE_1, TABLE_2,
            KEEPS_TARGET, KEEPS_MOMENTS, STOCHASTIC, LONG_ROWS, 1, RAGGED_BLOCK,
        )  # fmt: skip


@triton.jit
def _update_row(
    param, grad, moment_0, moment_1, moment_2, master, scale_0, scale_1, scale_2, code_tables, scalars,
    sums, sums_stride, factor, second_factor, begin, end, first_element, key_low, key_high,
    ARITHMETIC: tl.constexpr, NUM_MOMENTS: tl.constexpr,
    TABLE_0: tl.constexpr, TABLE_1: tl.constexpr, TABLE_2: tl.constexpr,
    KEEPS_TARGET: tl.constexpr, KEEPS_MOMENTS: tl.constexpr, STOCHASTIC: tl.constexpr,
    LONG_ROWS: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update elements `[begin, end)`, multiples of UNIT: at most BLOCK of them, or of LONG_ROWS any number."""
    if sums is not None:
        total = tl.zeros((BLOCK,), tl.float32)
        other_total = tl.zeros((BLOCK,), tl.float32)
        for start in range(begin, end, BLOCK):
            term, other_term = _update_tile(
                param, grad, moment_0, moment_1, moment_2, master, scale_0, scale_1, scale_2, code_tables, scalars,
                factor, second_factor, start // UNIT * UNIT, end, first_element, key_low, key_high,
                ARITHMETIC, NUM_MOMENTS, TABLE_0, TABLE_1, TABLE_2, KEEPS_TARGET, KEEPS_MOMENTS, STOCHASTIC, True,
                BLOCK,
            )  # fmt: skip
            total += term
            other_total += other_term
        tl.store(sums, tl.sum(total))
        tl.store(sums + sums_stride, tl.sum(other_total))
    elif LONG_ROWS:
        for start in range(begin, end, BLOCK):
            _update_tile(
                param, grad, moment_0, moment_1, moment_2, master, scale_0, scale_1, scale_2, code_tables, scalars,
                factor, second_factor, start // UNIT * UNIT, end, first_element, key_low, key_high,
                ARITHMETIC, NUM_MOMENTS, TABLE_0, TABLE_1, TABLE_2, KEEPS_TARGET, KEEPS_MOMENTS, STOCHASTIC, False,
                BLOCK,
            )  # fmt: skip
    else:
        _update_tile(
            param, grad, moment_0, moment_1, moment_2, master, scale_0, scale_1, scale_2, code_tables, scalars,
            factor, second_factor, begin, end, first_element, key_low, key_high,
            ARITHMETIC, NUM_MOMENTS, TABLE_0, TABLE_1, TABLE_2, KEEPS_TARGET, KEEPS_MOMENTS, STOCHASTIC, False, BLOCK,
        )  # fmt: skip


@triton.jit
def _update_tile(
    param, grad, moment_0, moment_1, moment_2, master, scale_0, scale_1, scale_2, code_tables, scalars,
    factor, second_factor, begin, end, first_element, key_low, key_high,
    ARITHMETIC: tl.constexpr, NUM_MOMENTS: tl.constexpr,
    TABLE_0: tl.constexpr, TABLE_1: tl.constexpr, TABLE_2: tl.constexpr,
    KEEPS_TARGET: tl.constexpr, KEEPS_MOMENTS: tl.constexpr, STOCHASTIC: tl.constexpr, HAS_TERMS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Update elements `[begin, end)`, at most BLOCK of them. Returns each element's two terms, if it has any."""
    offsets = begin + tl.arange(0, BLOCK)
    mask = offsets < end
    wide = load_wide(grad, offsets, mask) * factor * second_factor
    target = load_target(param, master, offsets, mask)
    scattered, high = scattered_indices(offsets, first_element, key_low, key_high, STOCHASTIC)
    if NUM_MOMENTS == 0:
        target = ARITHMETIC(wide, target, scalars)
    else:
        value_0 = load_moment(moment_0, scale_0, code_tables, TABLE_0, offsets, mask, begin, end, BLOCK)
        if NUM_MOMENTS == 1:
            target, value_0 = ARITHMETIC(wide, target, value_0, scalars)
        else:
            value_1 = load_moment(moment_1, scale_1, code_tables, TABLE_1, offsets, mask, begin, end, BLOCK)
            if HAS_TERMS:
                target, value_0, value_1, term, other_term = ARITHMETIC(wide, target, value_0, value_1, scalars)
            elif NUM_MOMENTS == 2:
                target, value_0, value_1 = ARITHMETIC(wide, target, value_0, value_1, scalars)
            else:
                value_2 = load_moment(moment_2, scale_2, code_tables, TABLE_2, offsets, mask, begin, end, BLOCK)
                target, value_0, value_1, value_2 = ARITHMETIC(wide, target, value_0, value_1, value_2, scalars)
                store_moment(
                    moment_2, scale_2, code_tables, TABLE_2, value_2, offsets, mask, begin, end, scattered, high,
                    3, STOCHASTIC, BLOCK,
                )  # fmt: skip
            if not KEEPS_MOMENTS:
                store_moment(
                    moment_1, scale_1, code_tables, TABLE_1, value_1, offsets, mask, begin, end, scattered, high,
                    2, STOCHASTIC, BLOCK,
                )  # fmt: skip
        if not KEEPS_MOMENTS:
            store_moment(
                moment_0, scale_0, code_tables, TABLE_0, value_0, offsets, mask, begin, end, scattered, high,
                1, STOCHASTIC, BLOCK,
            )  # fmt: skip
    if not KEEPS_TARGET:
        store_target(param, master, target, offsets, mask, scattered, high, STOCHASTIC)
    if HAS_TERMS:
        return tl.where(mask, term, 0.0), tl.where(mask, other_term, 0.0)
