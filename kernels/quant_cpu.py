"""Quantise to 8 bits in CPU passes: by a table instead of a search, with 32-bit integers only.

The upper 16 bits of a quotient (sign, exponent, 7 bits of mantissa) are its bucket. No bucket has two midpoints inside,
so the code of a bucket's lowest value and one comparison of the lower 16 bits give the result of `searchsorted`.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from chunkc.kernels.formats import QUANT_BLOCK
from chunkc.kernels.fused_pass import Pass, compile_pass, host_tensor
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


@functools.cache
def quantise_pass(parallel: bool) -> Pass:
    """Compile a pass over [values `[n, 256]`, codes `[n, 256]`, scales `[n]`, bucket_table].

    Codes and scales are its results, as of `chunkc.kernels.quant.quantise`. A scale that is NaN may have other bits
    than the reference's.
    """
    runs = [(torch.float32, (QUANT_BLOCK,)), (torch.uint8, (QUANT_BLOCK,)), (torch.float32, ())]
    return compile_pass(_quantise, runs, [(torch.int32, (2 * _NUM_BUCKETS,))], parallel=parallel)


def _quantise(values: Tensor, codes: Tensor, scales: Tensor, table: Tensor) -> tuple[()]:
    scale = values.abs().amax(1)
    quotients = values / torch.where(scale == 0, 1.0, scale).unsqueeze(1)
    pattern = quotients.view(torch.int32)
    sign = pattern >> 31  # 0 or -1
    bucket = (((pattern >> 16) & 0x7FFF) - _FIRST_BUCKET).clamp(0, _NUM_BUCKETS - 1)  # NaN: somewhere inside
    entry = table[(bucket - sign * _NUM_BUCKETS).to(torch.int64)]
    above = ((pattern ^ sign) & 0xFFFF) >= (entry >> 8)
    code = (entry & 0xFF) + above.to(torch.int32)
    codes.copy_(torch.where(quotients != quotients, 0, code).to(torch.uint8))
    scales.copy_(scale)
    return ()
