"""Device code of the fused Adam and AdamW update. Imports Triton: use it through `chunkc.kernels.elementwise_triton`.

Every operation and its order are those of `chunkc.kernels.reference.chunk_update`. Compiled without contraction to
fused multiply-adds and with IEEE division and square root, so the bits are the same, interpreted or on any device.
"""

from __future__ import annotations

import triton
import triton.language as tl

from chunkc.kernels.formats import UNIT
from chunkc.kernels.hyperparameters import AdamScalars
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
_NUM_SCALARS = tl.constexpr(len(AdamScalars._fields))
_NUM_KINDS = tl.constexpr(7)


# Only pointers that vectors are loaded from are specialised on alignment, and no integer on its value: few variants.
@triton.jit(
    do_not_specialize=["first_element", "key_low", "key_high"],
    do_not_specialize_on_alignment=[
        "exp_avg_scale", "exp_avg_sq_scale", "code_tables", "work", "pointer_offsets", "scalars", "unscale", "clip",
        "found_inf",
    ],
)  # fmt: skip
def adam_kernel(
    param,
    grad,
    exp_avg,
    exp_avg_sq,
    master,
    exp_avg_scale,
    exp_avg_sq_scale,
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
):
    """Update elements by Adam's rule, a program per row of `work`, int64: begin, end, group.

    With `pointer_offsets`, a row ends with its tensor's number. Slots are then the first tensor's, and the offsets
    locate each tensor's data, by kind in the slots' order (see `chunkc.kernels.pointer_offsets.pointer_offsets_of`).

    `code_tables` is fp32 `[4, 256]`: values, then midpoints, of signed codes, then of unsigned ones.
    """
    row = work + tl.program_id(0).to(tl.int64) * NUM_COLUMNS
    begin = tl.load(row)
    end = tl.load(row + 1)
    group_scalars = scalars + tl.load(row + 2) * _NUM_SCALARS
    if pointer_offsets is not None:
        pointer_offsets += tl.load(row + 3) * NUM_POINTER_OFFSETS
        param = pointer_of_tensor(param, pointer_offsets, 0)
        grad = pointer_of_tensor(grad, pointer_offsets, 1)
        exp_avg = pointer_of_tensor(exp_avg, pointer_offsets, 2)
        exp_avg_sq = pointer_of_tensor(exp_avg_sq, pointer_offsets, 3)
        if master is not None:
            master = pointer_of_tensor(master, pointer_offsets, 4)
        if exp_avg_scale is not None:
            exp_avg_scale = scale_pointer_of_tensor(exp_avg_scale, pointer_offsets, 5)
            exp_avg_sq_scale = scale_pointer_of_tensor(exp_avg_sq_scale, pointer_offsets, 6)
        seed = pointer_offsets + _NUM_KINDS
        first_element, key_low, key_high = rounding_seed_of_tensor(seed, first_element, key_low, key_high, STOCHASTIC)
    if found_inf is not None:
        end = tl.where(tl.load(found_inf) == 0, end, begin)
    factor, second_factor = factors_of(unscale, clip)
    if (begin | end) % _UNIT == 0:
        # Divided and multiplied only to tell the compiler the branch's condition: multiples of _UNIT.
        _update_tile(
            param, grad, exp_avg, exp_avg_sq, master, exp_avg_scale, exp_avg_sq_scale, code_tables, group_scalars,
            factor, second_factor, begin // _UNIT * _UNIT, end // _UNIT * _UNIT, first_element, key_low, key_high,
            STOCHASTIC, BLOCK,
        )  # fmt: skip
    else:
        _update_tile(
            param, grad, exp_avg, exp_avg_sq, master, exp_avg_scale, exp_avg_sq_scale, code_tables, group_scalars,
            factor, second_factor, begin, end, first_element, key_low, key_high, STOCHASTIC, RAGGED_BLOCK,
        )  # fmt: skip


@triton.jit
def _update_tile(
    param, grad, exp_avg, exp_avg_sq, master, exp_avg_scale, exp_avg_sq_scale, code_tables, scalars,
    factor, second_factor, begin, end, first_element, key_low, key_high,
    STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update elements `[begin, end)`, at most BLOCK of them."""
    offsets = begin + tl.arange(0, BLOCK)
    mask = offsets < end
    wide = load_wide(grad, offsets, mask) * factor * second_factor
    old_avg = load_moment(exp_avg, exp_avg_scale, code_tables, 0, offsets, mask, begin, end, BLOCK)
    old_avg_sq = load_moment(exp_avg_sq, exp_avg_sq_scale, code_tables, 512, offsets, mask, begin, end, BLOCK)
    target = load_target(param, master, offsets, mask)

    grad_sign = tl.load(scalars)
    decay = tl.load(scalars + 1)
    l2 = tl.load(scalars + 2)
    bias_correction2_sqrt = tl.load(scalars + 6)
    eps = tl.load(scalars + 7)
    neg_step_size = tl.load(scalars + 8)

    wide = wide * grad_sign
    wide = tl.where(l2 != 0, wide + target * l2, wide)
    decayed = target * decay
    new_avg, new_avg_sq = new_moments(wide, old_avg, old_avg_sq, scalars + 3)
    denom = tl.div_rn(tl.sqrt_rn(new_avg_sq), bias_correction2_sqrt) + eps
    new_target = decayed + tl.div_rn(neg_step_size * new_avg, denom)

    scattered, high = scattered_indices(offsets, first_element, key_low, key_high, STOCHASTIC)
    store_target(param, master, new_target, offsets, mask, scattered, high, STOCHASTIC)
    store_moment(
        exp_avg,
        exp_avg_scale,
        code_tables,
        0,
        new_avg,
        offsets,
        mask,
        begin,
        end,
        scattered,
        high,
        1,
        STOCHASTIC,
        BLOCK,
    )
    store_moment(
        exp_avg_sq, exp_avg_sq_scale, code_tables, 512, new_avg_sq, offsets, mask, begin, end, scattered, high,
        2, STOCHASTIC, BLOCK,
    )  # fmt: skip


@triton.jit
def new_moments(wide, old_avg, old_avg_sq, scalars):
    """Compute the new moments of Adam and of LAMB; `scalars` points to lerp_weight, beta2, one_minus_beta2."""
    lerp_weight = tl.load(scalars)
    near = lerp_weight < 0.5
    base = tl.where(near, old_avg, wide)
    coefficient = tl.where(near, lerp_weight, lerp_weight - 1)
    new_avg = base + coefficient * (wide - old_avg)
    return new_avg, old_avg_sq * tl.load(scalars + 1) + tl.load(scalars + 2) * wide * wide
