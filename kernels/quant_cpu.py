"""Quantise to 8 bits on the CPU: by a table instead of a search, with 32-bit integers only.

The upper 16 bits of a quotient (sign, exponent, 7 bits of mantissa) are its bucket. No bucket has two midpoints inside,
so the code of a bucket's lowest value and one comparison of the lower 16 bits give the result of `searchsorted`.
"""

from __future__ import annotations

import functools

import numpy as np
from torch import Tensor

from chunkc.kernels.host_memory import host_tensor
from chunkc.kernels.quant import codebook, midpoints

_FIRST_BUCKET = (127 - 23) << 7  # 2 ** -23, below the smallest midpoint: everything smaller shares its bucket
_LAST_BUCKET = 127 << 7  # that of 1.0
_NUM_BUCKETS = _LAST_BUCKET - _FIRST_BUCKET + 1


@functools.cache
def value_table(*, signed: bool) -> Tensor:
    """Make the table of code values, fp32 `[256]`."""
    return host_tensor(codebook(signed=signed), np.float32)


@functools.cache
def bucket_table(*, signed: bool) -> Tensor:
    """Make the table of buckets, int32 `[num_buckets]`, those of positive quotients first.

    An entry is the code of the bucket's lowest value, plus 256 times the lower 16 bits from which on the next code is
    right (65536 for none; complements for negative quotients, so that they ascend too).
    """
    limits = np.array(midpoints(signed=signed), dtype=np.float32)
    smallest = np.arange(_FIRST_BUCKET, _LAST_BUCKET + 1, dtype=np.uint32) << np.uint32(16)
    largest = smallest + np.uint32(0xFFFF)
    smallest[0] = 0
    largest[-1] = smallest[-1]  # 1.0 itself; quotients are not larger
    near, far = smallest.view(np.float32), largest.view(np.float32)
    low, high = np.concatenate([near, -far]), np.concatenate([far, -near])
    codes = np.searchsorted(limits, low, side="right")
    num_inside = np.searchsorted(limits, high, side="right") - codes
    assert (num_inside <= 1).all(), "two midpoints in one bucket"
    assert not num_inside[[0, _NUM_BUCKETS]].any(), "a midpoint in the bucket of many exponents"
    patterns = np.append(limits, np.float32(0))[codes].view(np.uint32)
    lower = np.where(patterns >> 31, ~patterns, patterns) & 0xFFFF
    return host_tensor(codes + 256 * np.where(num_inside, lower.astype(np.int64), 1 << 16), np.int32)


QUANTISING = f"""
static inline void quantise(
    const float* values, int num_values, uint8_t* codes, float* scale, const int32_t* buckets) {{
  uint32_t largest = 0;
  #pragma omp simd reduction(max : largest)
  for (int i = 0; i < num_values; ++i) {{
    const uint32_t magnitude = as_bits(values[i]) & 0x7FFFFFFFu;
    largest = magnitude > largest ? magnitude : largest;
  }}
  *scale = as_float(largest);
  const float divisor = largest == 0 ? 1.0f : as_float(largest);
  #pragma omp simd
  for (int i = 0; i < num_values; ++i) {{
    const float quotient = values[i] / divisor;
    const int32_t pattern = int32_t(as_bits(quotient)), sign = pattern >> 31;  // 0 or -1
    int32_t bucket = ((pattern >> 16) & 0x7FFF) - {_FIRST_BUCKET};
    bucket = bucket < 0 ? 0 : bucket > {_NUM_BUCKETS - 1} ? {_NUM_BUCKETS - 1} : bucket;  // NaN: somewhere inside
    const int32_t entry = buckets[bucket - sign * {_NUM_BUCKETS}];
    const int32_t above = ((pattern ^ sign) & 0xFFFF) >= (entry >> 8) ? 1 : 0;
    codes[i] = uint8_t(quotient != quotient ? 0 : (entry & 0xFF) + above);
  }}
}}
"""
"""C++ that computes the codes and the scale of a block's values, as `chunkc.kernels.quant.quantise` does."""
