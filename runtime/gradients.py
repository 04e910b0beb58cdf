"""What computation does with a gradient: into a slot, or straight into `.grad`, as autograd's AccumulateGrad does it.

`take` gives the gradient when computation gets there; the host may be far ahead by then.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from chunkc.ir.strides import is_dense


def store_first(target: torch.Tensor, take: Callable[[], torch.Tensor]) -> None:
    """Store the first gradient in its place in a slot."""
    target.copy_(take())


def add_later(target: torch.Tensor, take: Callable[[], torch.Tensor]) -> None:
    """Add a later gradient to what is in the slot."""
    target.add_(take())


def accumulate(parameter: nn.Parameter, take: Callable[[], torch.Tensor], owned: bool) -> None:
    """Store the first gradient of a parameter that never moves, or add a later one.

    Args:
        owned: nothing else will ever read the gradient's storage, so it may become `.grad` without a copy.
    """
    gradient = take()
    if parameter.grad is not None:
        parameter.grad.add_(gradient)
    elif owned and _fits_exactly(gradient, parameter):
        parameter.grad = gradient
    else:
        parameter.grad = torch.empty_strided(
            parameter.shape, _strides(parameter), dtype=parameter.dtype, device=parameter.device
        ).copy_(gradient)


def _strides(parameter: nn.Parameter) -> tuple[int, ...]:
    """A gradient's, by autograd's layout contract: those of a dense parameter, else contiguous."""
    return parameter.stride() if is_dense(parameter) else torch.empty(parameter.shape, device="meta").stride()


def _fits_exactly(gradient: torch.Tensor, parameter: nn.Parameter) -> bool:
    """Whether a gradient may become `.grad` as it is: autograd's layout contract, and no unseen bytes behind it."""
    return (
        gradient.stride() == _strides(parameter)
        and gradient.dtype == parameter.dtype
        and gradient.untyped_storage().nbytes() == gradient.nbytes
    )


def _gone() -> None:
    return None


NOTHING = (_gone, 0)
"""Stands for a gradient that was never handed out: what a dead reference gives, and no address."""
