"""Split fp32 masters into a bf16 parameter and the lower 16 bits: 4 bytes instead of 6.

The parameter is the master rounded to nearest even, so the master's bits are the parameter's, 16 places up, plus the
lower bits read as a signed number: lower bits of 0x8000 or more belong to a parameter that was rounded up. One case
has no code: a tie that is rounded to the bf16 below it has lower bits 0x8000 too, like a tie that is rounded up. It is
stored one fp32 place lower, as 0x7FFF. So a master equals an fp32 one, except after one update in 2 ** 17 of each
element, which leaves it one place of 2 ** 24 lower. Every kernel has this rule; it does not change parameters.

(Split-SGD-BF16, Kalamkar et al., arXiv:2005.04680, keeps the half that the parameter lacks; there parameters are
truncated, not rounded.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from chunkc.kernels.rounding import round_nearest


def join_master(param: Tensor, lower: Tensor) -> Tensor:
    """Join a bf16 parameter and int16 lower bits to the fp32 master.

    Lower bits that cannot be of this parameter (they would make a NaN of a number) are ignored.
    """
    wide = widened(param)
    joined = (wide.view(torch.int32) + lower).view(torch.float32)
    return torch.where(joined.isnan(), wide, joined)


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """Split an fp32 master into a bf16 parameter, rounded to nearest even, and int16 lower bits; 0 for NaN."""
    pattern = master.view(torch.int32)
    tie_down = (pattern & 0x1FFFF) == 0x8000
    lower = pattern - tie_down.to(torch.int32)
    lower = torch.where(master.isnan(), 0, lower) & 0xFFFF
    return round_nearest(master), lower.to(torch.uint16).view(torch.int16)


def widened(param: Tensor) -> Tensor:
    """Widen bf16 to fp32, on the bits."""
    return (param.view(torch.int16).to(torch.int32) << 16).view(torch.float32)
