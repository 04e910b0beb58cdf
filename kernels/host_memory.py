"""Make tensors in numpy's memory: not charged to a limited CPU allocator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from chunkc.torch_private.fake import disable_current_modes


def host_empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Make an uninitialised tensor; no page of it is touched."""
    with disable_current_modes():
        num_elements = math.prod(shape)
        flat = torch.from_numpy(np.empty(max(num_elements, 1) * dtype.itemsize, dtype=np.uint8)).view(dtype)
        return flat[:num_elements].view(tuple(shape))


def host_tensor(values: Any, dtype: Any) -> Tensor:
    """Make a tensor of `values`. `dtype` is numpy's."""
    with disable_current_modes():
        return torch.from_numpy(np.array(values, dtype=dtype))
