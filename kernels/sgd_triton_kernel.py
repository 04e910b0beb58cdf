"""Device code of the fused SGD update. Imports Triton: use it through `chunkc.kernels.elementwise_triton`.

Every operation and its order are those of `chunkc.kernels.reference.chunk_update`. Compiled without contraction to
fused multiply-adds, so the bits are the same, interpreted or on any device.
"""

from __future__ import annotations

import triton
import triton.language as tl

from chunkc.kernels.formats import UNIT
from chunkc.kernels.sgd import SgdScalars
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
_NUM_SCALARS = tl.constexpr(len(SgdScalars._fields))
_NUM_KINDS = tl.constexpr(5)


@triton.jit(
    do_not_specialize=["first_element", "key_low", "key_high"],
    do_not_specialize_on_alignment=[
        "momentum_buffer_scale", "code_tables", "work", "pointer_offsets", "scalars", "unscale", "clip", "found_inf",
    ],
)  # fmt: skip
def sgd_kernel(
    param,
    grad,
    master,
    code_tables,
    work,
    pointer_offsets,
    scalars,
    unscale,
    clip,
    found_inf,
    first_element: tl.int64,
    key_low,
    key_high,
    STOCHASTIC: tl.constexpr,
    BLOCK: tl.constexpr,
    RAGGED_BLOCK: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    NUM_POINTER_OFFSETS: tl.constexpr,
    momentum_buffer=None,
    momentum_buffer_scale=None,
):
    """Update elements by SGD, a program per row of `work`; `work` and `pointer_offsets` are as in Adam's kernel.

    Without momentum there is no buffer.
    """
    row = work + tl.program_id(0).to(tl.int64) * NUM_COLUMNS
    begin = tl.load(row)
    end = tl.load(row + 1)
    group_scalars = scalars + tl.load(row + 2) * _NUM_SCALARS
    if pointer_offsets is not None:
        pointer_offsets += tl.load(row + 3) * NUM_POINTER_OFFSETS
        param = pointer_of_tensor(param, pointer_offsets, 0)
        grad = pointer_of_tensor(grad, pointer_offsets, 1)
        if master is not None:
            master = pointer_of_tensor(master, pointer_offsets, 2)
        if momentum_buffer is not None:
            momentum_buffer = pointer_of_tensor(momentum_buffer, pointer_offsets, 3)
        if momentum_buffer_scale is not None:
            momentum_buffer_scale = scale_pointer_of_tensor(momentum_buffer_scale, pointer_offsets, 4)
        seed = pointer_offsets + _NUM_KINDS
        first_element, key_low, key_high = rounding_seed_of_tensor(seed, first_element, key_low, key_high, STOCHASTIC)
    if found_inf is not None:
        end = tl.where(tl.load(found_inf) == 0, end, begin)
    factor, second_factor = factors_of(unscale, clip)
    if (begin | end) % _UNIT == 0:
        # Divided and multiplied only to tell the compiler the branch's condition: multiples of _UNIT.
        _update_tile(
            param, grad, momentum_buffer, master, momentum_buffer_scale, code_tables, group_scalars, factor,
            second_factor, begin // _UNIT * _UNIT, end // _UNIT * _UNIT, first_element, key_low, key_high,
            STOCHASTIC, BLOCK,
        )  # fmt: skip
    else:
        _update_tile(
            param, grad, momentum_buffer, master, momentum_buffer_scale, code_tables, group_scalars, factor,
            second_factor, begin, end, first_element, key_low, key_high, STOCHASTIC, RAGGED_BLOCK,
        )  # fmt: skip


@triton.jit
def _update_tile(
    param, grad, momentum_buffer, master, momentum_buffer_scale, code_tables, scalars, factor, second_factor,
    begin, end, first_element, key_low, key_high, STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update elements `[begin, end)`, at most BLOCK of them."""
    offsets = begin + tl.arange(0, BLOCK)
    mask = offsets < end
    target = load_target(param, master, offsets, mask)
    l2 = tl.load(scalars + 1)
    wide = load_wide(grad, offsets, mask) * factor * second_factor * tl.load(scalars)
    wide = tl.where(l2 != 0, wide + target * l2, wide)
    scattered, high = scattered_indices(offsets, first_element, key_low, key_high, STOCHASTIC)
    direction = wide
    if momentum_buffer is not None:
        buffer = load_moment(momentum_buffer, momentum_buffer_scale, code_tables, 0, offsets, mask, begin, end, BLOCK)
        from_buffer = tl.load(scalars + 6)
        with_new = buffer * tl.load(scalars + 3) + wide * tl.load(scalars + 4)
        mixed = wide * tl.load(scalars + 5) + with_new * from_buffer
        direction = tl.where(from_buffer != 0, mixed, wide)
        store_moment(
            momentum_buffer, momentum_buffer_scale, code_tables, 0, tl.where(from_buffer != 0, with_new, buffer),
            offsets, mask, begin, end, scattered, high, 1, STOCHASTIC, BLOCK,
        )  # fmt: skip
    new_target = target + tl.load(scalars + 2) * direction
    store_target(param, master, new_target, offsets, mask, scattered, high, STOCHASTIC)
