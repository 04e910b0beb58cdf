"""Device code that all rules share: read tensors of every format as fp32, and write them rounded. Imports Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from chunkc.kernels import rounding
from chunkc.kernels.formats import QUANT_BLOCK, UNIT

_QUANT_BLOCK = tl.constexpr(QUANT_BLOCK)
_MIX_FACTOR_0 = tl.constexpr(rounding.MIX_FACTORS[0])
_MIX_FACTOR_1 = tl.constexpr(rounding.MIX_FACTORS[1])
_HIGH_FACTOR = tl.constexpr(rounding.HIGH_FACTOR)
_STREAM_FACTOR = tl.constexpr(rounding.STREAM_FACTOR)
_PARAM_STREAM = tl.constexpr(rounding.PARAM_STREAM)
_UNIT = tl.constexpr(UNIT)


@triton.jit
def pointer_of_tensor(first, pointer_offsets, KIND: tl.constexpr):
    """Compute the pointer to a tensor's data from the first tensor's; `pointer_offsets` are its row, in units."""
    # Multiplied to show the compiler that both are aligned alike.
    return first + tl.load(pointer_offsets + KIND) * _UNIT


@triton.jit
def scale_pointer_of_tensor(first, pointer_offsets, KIND: tl.constexpr):
    """Compute the pointer to a tensor's scales of 8-bit moments from the first tensor's: offsets are in elements."""
    return first + tl.load(pointer_offsets + KIND)


@triton.jit
def rounding_seed_of_tensor(seed, first_element, key_low, key_high, STOCHASTIC: tl.constexpr):
    """Load a tensor's rounding seed, which follows its pointer offsets; return the arguments where nothing draws."""
    if STOCHASTIC:
        return tl.load(seed), tl.load(seed + 1), tl.load(seed + 2)
    else:
        return first_element, key_low, key_high


@triton.jit
def factors_of(unscale, clip):
    """Load the two factors of gradients, which are applied one after the other."""
    factor = tl.full((), 1.0, tl.float32)
    second_factor = tl.full((), 1.0, tl.float32)
    if unscale is not None:
        factor = tl.load(unscale)
    if clip is not None:
        second_factor = tl.load(clip)
    return factor, second_factor


@triton.jit
def scattered_indices(offsets, first_element, key_low, key_high, STOCHASTIC: tl.constexpr):
    """Compute the indices' bits that the random bits of all streams derive from; unused without stochastic rounding."""
    if STOCHASTIC:
        index = first_element + offsets
        scattered = mix32((index & 0xFFFFFFFF).to(tl.uint32) ^ key_low.to(tl.uint32))
        high = wrapping_mul((index >> 32).to(tl.uint32), _HIGH_FACTOR)
        return scattered, tl.add(high, key_high.to(tl.uint32), sanitize_overflow=False)
    else:
        return offsets, offsets


@triton.jit
def load_wide(pointer, offsets, mask):
    """Load as fp32; fp64 as it is. bf16 is widened on the bits: the interpreter's own conversion flushes subnormals."""
    values = tl.load(pointer + offsets, mask=mask, other=0.0)
    if pointer.dtype.element_ty == tl.bfloat16:
        return (values.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif pointer.dtype.element_ty == tl.float64:
        return values
    else:
        return values.to(tl.float32)


@triton.jit
def load_target(param, master, offsets, mask):
    """Load the master where there is one, else the parameter, as fp32; see `chunkc.kernels.split`."""
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
def store_target(param, master, value, offsets, mask, scattered, high, STOCHASTIC: tl.constexpr):
    """Store the parameter, and its master where there is one."""
    if master is not None:
        store_master(master, value, offsets, mask)
    store_rounded(param, value, offsets, mask, scattered, high, _PARAM_STREAM, STOCHASTIC)


@triton.jit
def store_master(master, value, offsets, mask):
    """Store the whole master, or its lower bits; see `chunkc.kernels.split`."""
    if master.dtype.element_ty == tl.int16:
        pattern = value.to(tl.uint32, bitcast=True)
        kept = tl.where((pattern & 0x1FFFF) == 0x8000, tl.sub(pattern, 1, sanitize_overflow=False), pattern)
        kept = tl.where(value != value, 0, kept)
        tl.store(master + offsets, (kept & 0xFFFF).to(tl.uint16).to(tl.int16, bitcast=True), mask=mask)
    else:
        tl.store(master + offsets, value, mask=mask)


@triton.jit
def load_moment(moment, scale, tables, TABLE: tl.constexpr, offsets, mask, begin, end, BLOCK: tl.constexpr):
    """Load a moment as fp32. For 8-bit codes, `begin` is a multiple of 256, and their tables begin at TABLE."""
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
def store_moment(
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
        # The number of midpoints up to the quotient, from the highest bit down; 0 for NaN.
        codes = tl.zeros((BLOCK,), tl.int32)
        for bit in tl.static_range(7, -1, -1):
            limit = tl.load(tables + (TABLE + 256) + codes + ((1 << bit) - 1))
            codes = tl.where(quotients >= limit, codes + (1 << bit), codes)
        tl.store(moment + offsets, codes.to(tl.uint8), mask=mask)
        block = begin // _QUANT_BLOCK + tl.arange(0, NUM_BLOCKS)
        tl.store(scale + block, scales, mask=block * _QUANT_BLOCK < end)


@triton.jit
def store_rounded(pointer, value, offsets, mask, scattered, high, STREAM: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Store in the dtype of `pointer`. bf16 is rounded on the bits: the interpreter's own conversion truncates."""
    if pointer.dtype.element_ty == tl.bfloat16:
        pattern = value.to(tl.uint32, bitcast=True)
        if STOCHASTIC:
            offset = tl.add(high, _stream_offset(STREAM), sanitize_overflow=False)
            addend = mix32(tl.add(scattered, offset, sanitize_overflow=False)) & 0xFFFF
        else:
            addend = 0x7FFF + ((pattern >> 16) & 1)
        rounded = tl.add(pattern, addend, sanitize_overflow=False) >> 16
        special = tl.where(value != value, 0x7FC0, pattern >> 16)
        rounded = tl.where((pattern & 0x7F800000) == 0x7F800000, special, rounded)
        tl.store(pointer + offsets, rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True), mask=mask)
    else:
        tl.store(pointer + offsets, value.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def _stream_offset(STREAM: tl.constexpr):
    return tl.full((), (STREAM * _STREAM_FACTOR) & 0xFFFFFFFF, tl.uint32)


@triton.jit
def wrapping_mul(value, FACTOR: tl.constexpr):
    return tl.mul(value, tl.full((), FACTOR, tl.uint32), sanitize_overflow=False)


@triton.jit
def mix32(value):
    """Compute `chunkc.kernels.rounding.mix32` on uint32."""
    value = value ^ (value >> 16)
    value = wrapping_mul(value, _MIX_FACTOR_0)
    value = value ^ (value >> 15)
    value = wrapping_mul(value, _MIX_FACTOR_1)
    return value ^ (value >> 15)
