"""Device code of the fused Adam and AdamW update. Imports Triton: use it through `chunkc.kernels.adam_triton`.

Every operation and its order are those of `chunkc.kernels.reference.adam_chunk_update`. Compiled without contraction to
fused multiply-adds and with IEEE division and square root, so the bits are the same, interpreted or on any device.
"""

from __future__ import annotations

import triton
import triton.language as tl

from chunkc.kernels import rounding
from chunkc.kernels.adam_triton import UNIT
from chunkc.kernels.formats import QUANT_BLOCK
from chunkc.kernels.hyper import AdamScalars

_UNIT = tl.constexpr(UNIT)
_NUM_SCALARS = tl.constexpr(len(AdamScalars._fields))
_NUM_COLUMNS = tl.constexpr(3)
_QUANT_BLOCK = tl.constexpr(QUANT_BLOCK)
_MIX_FACTOR_0 = tl.constexpr(rounding.MIX_FACTORS[0])
_MIX_FACTOR_1 = tl.constexpr(rounding.MIX_FACTORS[1])
_HIGH_FACTOR = tl.constexpr(rounding.HIGH_FACTOR)
_STREAM_FACTOR = tl.constexpr(rounding.STREAM_FACTOR)
_PARAM_STREAM = tl.constexpr(rounding.PARAM_STREAM)
_EXP_AVG_STREAM = tl.constexpr(rounding.EXP_AVG_STREAM)
_EXP_AVG_SQ_STREAM = tl.constexpr(rounding.EXP_AVG_SQ_STREAM)


# Only what vectors are loaded from is specialised on alignment, and no integer on its value: few variants to compile.
@triton.jit(
    do_not_specialize=["first_element", "key_low", "key_high"],
    do_not_specialize_on_alignment=[
        "exp_avg_scale", "exp_avg_sq_scale", "code_tables", "work", "scalars", "unscale", "clip", "found_inf",
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
):
    """One program per row (begin, end, group) of `work`, int64.

    `code_tables` is fp32 `[4, 256]`: values, then midpoints, of signed codes, then of unsigned ones.
    """
    row = work + tl.program_id(0).to(tl.int64) * _NUM_COLUMNS
    begin = tl.load(row)
    end = tl.load(row + 1)
    group_scalars = scalars + tl.load(row + 2) * _NUM_SCALARS
    if found_inf is not None:
        end = tl.where(tl.load(found_inf) == 0, end, begin)
    factor = tl.full((), 1.0, tl.float32)
    second_factor = tl.full((), 1.0, tl.float32)
    if unscale is not None:
        factor = tl.load(unscale)
    if clip is not None:
        second_factor = tl.load(clip)
    if (begin | end) % _UNIT == 0:
        # Divided and multiplied only to show the compiler what the branch has found out.
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
    """Elements `[begin, end)`, at most BLOCK of them."""
    offsets = begin + tl.arange(0, BLOCK)
    mask = offsets < end
    wide = load_wide(grad, offsets, mask) * factor * second_factor
    old_avg = _load_moment(exp_avg, exp_avg_scale, code_tables, 0, offsets, mask, begin, end, BLOCK)
    old_avg_sq = _load_moment(exp_avg_sq, exp_avg_sq_scale, code_tables, 512, offsets, mask, begin, end, BLOCK)
    target = load_target(param, master, offsets, mask)

    grad_sign = tl.load(scalars)
    decay = tl.load(scalars + 1)
    l2 = tl.load(scalars + 2)
    lerp_weight = tl.load(scalars + 3)
    beta2 = tl.load(scalars + 4)
    one_minus_beta2 = tl.load(scalars + 5)
    bias_correction2_sqrt = tl.load(scalars + 6)
    eps = tl.load(scalars + 7)
    neg_step_size = tl.load(scalars + 8)

    wide = wide * grad_sign
    wide = tl.where(l2 != 0, wide + target * l2, wide)
    decayed = target * decay
    near = lerp_weight < 0.5
    base = tl.where(near, old_avg, wide)
    coefficient = tl.where(near, lerp_weight, lerp_weight - 1)
    new_avg = base + coefficient * (wide - old_avg)
    new_avg_sq = old_avg_sq * beta2 + one_minus_beta2 * wide * wide
    denom = tl.div_rn(tl.sqrt_rn(new_avg_sq), bias_correction2_sqrt) + eps
    new_target = decayed + tl.div_rn(neg_step_size * new_avg, denom)

    scattered = offsets  # unused without stochastic rounding
    high = offsets
    if STOCHASTIC:
        index = first_element + offsets
        scattered = _mix32((index & 0xFFFFFFFF).to(tl.uint32) ^ key_low.to(tl.uint32))
        high = _wrapping_mul((index >> 32).to(tl.uint32), _HIGH_FACTOR)
        high = tl.add(high, key_high.to(tl.uint32), sanitize_overflow=False)
    if master is not None:
        store_master(master, new_target, offsets, mask)
    store_rounded(param, new_target, offsets, mask, scattered, high, _PARAM_STREAM, STOCHASTIC)
    _store_moment(
        exp_avg, exp_avg_scale, code_tables, 0, new_avg, offsets, mask, begin, end, scattered, high,
        _EXP_AVG_STREAM, STOCHASTIC, BLOCK,
    )  # fmt: skip
    _store_moment(
        exp_avg_sq, exp_avg_sq_scale, code_tables, 512, new_avg_sq, offsets, mask, begin, end, scattered, high,
        _EXP_AVG_SQ_STREAM, STOCHASTIC, BLOCK,
    )  # fmt: skip


@triton.jit
def load_wide(place, offsets, mask):
    """As fp32. bf16 is widened on the bits: the interpreter's own conversion flushes subnormals to zero."""
    values = tl.load(place + offsets, mask=mask, other=0.0)
    if place.dtype.element_ty == tl.bfloat16:
        return (values.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return values.to(tl.float32)


@triton.jit
def load_target(param, master, offsets, mask):
    """The master where there is one, else the parameter, as fp32; see `chunkc.kernels.split`."""
    if master is None:
        return load_wide(param, offsets, mask)
    elif master.dtype.element_ty == tl.int16:
        wide = load_wide(param, offsets, mask)
        lower = tl.load(master + offsets, mask=mask, other=0).to(tl.int32)
        joined = tl.add(wide.to(tl.int32, bitcast=True), lower, sanitize_overflow=False).to(tl.float32, bitcast=True)
        return tl.where(joined != joined, wide, joined)
    else:
        return tl.load(master + offsets, mask=mask, other=0.0)


@triton.jit
def store_master(master, value, offsets, mask):
    """All of it, or its lower bits; see `chunkc.kernels.split`."""
    if master.dtype.element_ty == tl.int16:
        pattern = value.to(tl.uint32, bitcast=True)
        kept = tl.where((pattern & 0x1FFFF) == 0x8000, tl.sub(pattern, 1, sanitize_overflow=False), pattern)
        kept = tl.where(value != value, 0, kept)
        tl.store(master + offsets, (kept & 0xFFFF).to(tl.uint16).to(tl.int16, bitcast=True), mask=mask)
    else:
        tl.store(master + offsets, value, mask=mask)


@triton.jit
def _load_moment(moment, scale, tables, TABLE: tl.constexpr, offsets, mask, begin, end, BLOCK: tl.constexpr):
    """A moment as fp32. For 8-bit codes, `begin` is a multiple of 256, and their tables begin at TABLE."""
    if scale is None:
        return load_wide(moment, offsets, mask)
    else:
        NUM_BLOCKS: tl.constexpr = BLOCK // _QUANT_BLOCK
        codes = tl.load(moment + offsets, mask=mask, other=0).to(tl.int32)
        block = begin // _QUANT_BLOCK + tl.arange(0, NUM_BLOCKS)
        scales = tl.load(scale + block, mask=block * _QUANT_BLOCK < end, other=0.0)
        blocks = tl.reshape(tl.load(tables + TABLE + codes), (NUM_BLOCKS, _QUANT_BLOCK))
        return tl.reshape(blocks * scales[:, None], (BLOCK,))


@triton.jit
def _store_moment(
    moment, scale, tables, TABLE: tl.constexpr, value, offsets, mask, begin, end, scattered, high,
    STREAM: tl.constexpr, STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if scale is None:
        store_rounded(moment, value, offsets, mask, scattered, high, STREAM, STOCHASTIC)
    else:
        NUM_BLOCKS: tl.constexpr = BLOCK // _QUANT_BLOCK
        blocks = tl.reshape(tl.where(mask, value, 0.0), (NUM_BLOCKS, _QUANT_BLOCK))
        magnitudes = blocks.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        scales = tl.max(magnitudes, axis=1).to(tl.float32, bitcast=True)
        divisors = tl.where(scales == 0, 1.0, scales)
        quotients = tl.reshape(tl.div_rn(blocks, tl.broadcast_to(divisors[:, None], blocks.shape)), (BLOCK,))
        # How many midpoints are not above the quotient, from the highest bit down; 0 for NaN.
        codes = tl.zeros((BLOCK,), tl.int32)
        for bit in tl.static_range(7, -1, -1):
            limit = tl.load(tables + (TABLE + 256) + codes + ((1 << bit) - 1))
            codes = tl.where(quotients >= limit, codes + (1 << bit), codes)
        tl.store(moment + offsets, codes.to(tl.uint8), mask=mask)
        block = begin // _QUANT_BLOCK + tl.arange(0, NUM_BLOCKS)
        tl.store(scale + block, scales, mask=block * _QUANT_BLOCK < end)


@triton.jit
def store_rounded(place, value, offsets, mask, scattered, high, STREAM: tl.constexpr, STOCHASTIC: tl.constexpr):
    """In the dtype of `place`. bf16 is rounded on the bits: the interpreter's own conversion truncates."""
    if place.dtype.element_ty == tl.bfloat16:
        pattern = value.to(tl.uint32, bitcast=True)
        if STOCHASTIC:
            offset = tl.add(high, _stream_offset(STREAM), sanitize_overflow=False)
            addend = _mix32(tl.add(scattered, offset, sanitize_overflow=False)) & 0xFFFF
        else:
            addend = 0x7FFF + ((pattern >> 16) & 1)
        rounded = tl.add(pattern, addend, sanitize_overflow=False) >> 16
        special = tl.where(value != value, 0x7FC0, pattern >> 16)
        rounded = tl.where((pattern & 0x7F800000) == 0x7F800000, special, rounded)
        tl.store(place + offsets, rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True), mask=mask)
    else:
        tl.store(place + offsets, value.to(place.dtype.element_ty), mask=mask)


@triton.jit
def _stream_offset(STREAM: tl.constexpr):
    return tl.full((), (STREAM * _STREAM_FACTOR) & 0xFFFFFFFF, tl.uint32)


@triton.jit
def _wrapping_mul(value, FACTOR: tl.constexpr):
    return tl.mul(value, tl.full((), FACTOR, tl.uint32), sanitize_overflow=False)


@triton.jit
def _mix32(value):
    """`chunkc.kernels.rounding.mix32` on uint32."""
    value = value ^ (value >> 16)
    value = _wrapping_mul(value, _MIX_FACTOR_0)
    value = value ^ (value >> 15)
    value = _wrapping_mul(value, _MIX_FACTOR_1)
    return value ^ (value >> 15)
