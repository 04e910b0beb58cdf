"""Quantise moments to 8 bits by blocks: the tables of values, and quantisation in plain PyTorch.

Dynamic tree quantisation as in 8-bit optimizers (Dettmers et al., arXiv:2110.02861), with the tables of
bitsandbytes and torchao: seven decades, each divided evenly, smaller ones coarser. A block of 256 values is divided
by its largest magnitude, its scale, and each quotient is stored as the code of the nearest value of a table of 256.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from chunkc.kernels.formats import QUANT_BLOCK

_NUM_DECADES = 7


@functools.cache
def codebook(*, signed: bool) -> tuple[float, ...]:
    """Compute the values of the codes 0 to 255, ascending, each exactly an fp32 value.

    Args:
        signed: from -0.99 to 1, for the first moment; otherwise from 0 to 1, for the second.
    """
    values = [0.0, 1.0]
    for decade in range(_NUM_DECADES):
        num_intervals = 2 ** (decade if signed else decade + 1)
        width = 0.9 / num_intervals
        means = [10.0 ** (decade + 1 - _NUM_DECADES) * (0.1 + width * (i + 0.5)) for i in range(num_intervals)]
        values += means + [-mean for mean in means if signed]
    assert len(values) == 256
    return tuple(torch.tensor(sorted(values), dtype=torch.float64, device="cpu").to(torch.float32).tolist())


@functools.cache
def midpoints(*, signed: bool) -> tuple[float, ...]:
    """Compute 255 fp32 midpoints: quotients from `midpoints[k]` on are nearer to code `k + 1` than to code `k`."""
    values = torch.tensor(codebook(signed=signed), dtype=torch.float64, device="cpu")
    return tuple(((values[1:] + values[:-1]) / 2).to(torch.float32).tolist())


def dequantise(codes: Tensor, scale: Tensor, *, signed: bool) -> Tensor:
    """Compute `[n]` fp32 values of `[n]` codes (uint8) and `[ceil(n / 256)]` scales (fp32): table value times scale."""
    table = torch.tensor(codebook(signed=signed), dtype=torch.float32, device=codes.device)
    return table[codes.long()] * scale.repeat_interleave(QUANT_BLOCK)[: codes.numel()]


def quantise(values: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Quantise `[n]` fp32 values to `[n]` uint8 codes and `[ceil(n / 256)]` fp32 scales.

    The scale is the largest magnitude by its bits, so that infinity and NaN end up in it and stay visible: such a block
    reads as NaN or infinity. A quotient that is NaN gets code 0. A block of zeros has scale 0.
    """
    num_elements = values.numel()
    padded = torch.nn.functional.pad(values, (0, -num_elements % QUANT_BLOCK)).view(-1, QUANT_BLOCK)
    scale = (padded.view(torch.int32) & 0x7FFFFFFF).amax(1).view(torch.float32)
    divisor = torch.where(scale == 0, 1.0, scale)
    quotients = (padded / divisor.unsqueeze(1)).flatten()[:num_elements]
    limits = torch.tensor(midpoints(signed=signed), dtype=torch.float32, device=values.device)
    codes = torch.searchsorted(limits, quotients, right=True)
    return torch.where(quotients.isnan(), 0, codes).to(torch.uint8), scale
