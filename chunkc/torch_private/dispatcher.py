"""Ask PyTorch's dispatcher about operators."""

from __future__ import annotations

from functools import cache

import torch


@cache
def has_kernel(target: torch._ops.OpOverload, key: str) -> bool:
    """Whether an operator has a kernel of its own for a dispatch key, such as "Conjugate", or lets that key through."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), key)
