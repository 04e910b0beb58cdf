"""Cases of LAMB kernels for both stages."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from chunkc.kernels.formats import AdamFormat, AdamSlots
from chunkc.kernels.lamb_formats import LambWork, new_partials


def on(work: LambWork, device: torch.device | str) -> LambWork:
    """Return the same work on another device."""
    return work.with_rows(work.rows.to(device))


def update(kernel: ModuleType, fmt: AdamFormat, slots: AdamSlots, work: LambWork, scalars: Tensor) -> None:
    """Run both stages of a tile that contains all its tensors as a whole."""
    partials = new_partials(work, slots.param.device)
    kernel.lamb_moments(fmt, slots, work, scalars, partials)
    kernel.lamb_apply(fmt, slots, work, scalars, partials)
