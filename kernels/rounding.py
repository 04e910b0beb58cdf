"""Round fp32 to bf16 on the bits, in plain PyTorch: to nearest even, or stochastically with reproducible bits."""

from __future__ import annotations

import torch
from torch import Tensor

from chunkc.kernels.formats import RoundingKey

PARAM_STREAM, FIRST_MOMENT_STREAM = 0, 1
"""Streams of random bits, one for each tensor, so that those of one element are independent; moments count up."""

_MASK32 = 0xFFFFFFFF
_BF16_NAN = 0x7FC0

# Both factors are under 2 ** 31: their product with a 32-bit value fits int64, so plain integer arithmetic is exact.
MIX_FACTORS = (0x21F0AAAD, 0x735A2D97)
HIGH_FACTOR, STREAM_FACTOR = 0x2C1B3C6D, 0x297A2D39


def mix32(value: Tensor) -> Tensor:
    """Mix 32 bits by a bijection (hash-prospector's best with two rounds). int64 in [0, 2 ** 32)."""
    value = value ^ (value >> 16)
    value = (value * MIX_FACTORS[0]) & _MASK32
    value = value ^ (value >> 15)
    value = (value * MIX_FACTORS[1]) & _MASK32
    return value ^ (value >> 15)


def random_bits16(index: Tensor, key: RoundingKey, stream: int) -> Tensor:
    """Compute 16 random bits per element, in [0, 65536), a pure function of the arguments.

    Args:
        index: int64, the element's index in its chunk group.
        key: of the update (`chunkc.kernels.formats.rounding_key`).
        stream: the tensor's.
    """
    low, high = index & _MASK32, (index >> 32) & 0x7FFFFFFF
    offset = (high * HIGH_FACTOR + (key.high + stream * STREAM_FACTOR)) & _MASK32
    return mix32((mix32(low ^ key.low) + offset) & _MASK32) & 0xFFFF


def round_stochastic(values: Tensor, random: Tensor) -> Tensor:
    """Round fp32 `values` to bf16, up or down with the probability of the distance.

    `random` (int64, 16 bits each) is added below bf16's last place, and the sum is truncated. Values that bf16 holds,
    zeros and infinities stay as they are; NaN becomes 0x7FC0. A finite value above bf16's largest may become infinity,
    as it does when rounding to nearest.
    """
    pattern = values.view(torch.int32).to(torch.int64) & _MASK32
    rounded = (pattern + random) >> 16
    special = torch.where(values.isnan(), _BF16_NAN, pattern >> 16)
    rounded = torch.where((pattern & 0x7F800000) == 0x7F800000, special, rounded)
    return rounded.to(torch.uint16).view(torch.bfloat16)


def round_nearest(values: Tensor) -> Tensor:
    """Round fp32 `values` to bf16, to nearest even: `Tensor.to(torch.bfloat16)` with 0x7FC0 for every NaN."""
    pattern = values.view(torch.int32).to(torch.int64) & _MASK32
    rounded = (pattern + 0x7FFF + ((pattern >> 16) & 1)) >> 16
    return torch.where(values.isnan(), _BF16_NAN, rounded).to(torch.uint16).view(torch.bfloat16)
