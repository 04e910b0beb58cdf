"""Accumulate gradients into slots, or straight into `.grad`, as autograd's AccumulateGrad does.

`take` returns the gradient when the computation has reached it; the host may be far ahead by then.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from chunkc.ir.strides import is_dense
from chunkc.runtime.store.consumed_gradients import GradientPlaceholder, LocalGradient, gradient_of, without_memory
from chunkc.runtime.store.shards import leaf_of
from chunkc.torch_private.engine import storage_use_count


def store_first(target: torch.Tensor, take: Callable[[], torch.Tensor]) -> None:
    """Store the first gradient in its place in a slot."""
    target.copy_(take())


def add_later(target: torch.Tensor, take: Callable[[], torch.Tensor]) -> None:
    """Add a later gradient to what is in the slot."""
    target.add_(take())


def note_replicated(
    name: str, parameter: nn.Parameter, adds: dict[str, bool], hand_out: Callable[[], object], *, is_last: bool
) -> Callable[[torch.Tensor, Callable[[], torch.Tensor]], None]:
    """Note an unsharded gradient of this rank on its way into a slot; return `store_first` or `add_later`.

    Args:
        adds: the slot's gradients, each with whether home has one to add to.
        hand_out: makes the home view the parameter's gradient.
        is_last: ranks exchange the gradient in this backward; else it stays in the slot.
    """
    is_first = name not in adds
    if is_first:
        adds[name] = gradient_of(parameter) is not None
    if not is_last:
        parameter.grad = LocalGradient(leaf_of(parameter), name)
    elif gradient_of(parameter) is None:
        hand_out()
    return store_first if is_first else add_later


def accumulate(parameter: nn.Parameter, take: Callable[[], torch.Tensor], owned: bool) -> None:
    """Store the first gradient of a parameter that never moves, or add a later one.

    Args:
        owned: no other value reads the gradient's storage, so it may become `.grad` without a copy.
    """
    gradient = take()
    if parameter.grad is not None:
        parameter.grad.add_(gradient)
    elif owned and _fits_exactly(gradient, parameter):
        parameter.grad = gradient.data if gradient._is_view() else gradient  # no view that autograd knows of
    else:
        parameter.grad = torch.empty_strided(
            parameter.shape, _strides(parameter), dtype=parameter.dtype, device=parameter.device
        ).copy_(gradient)


def _strides(parameter: nn.Parameter) -> tuple[int, ...]:
    """Compute a gradient's strides by autograd's layout contract: those of a dense parameter, else contiguous."""
    return parameter.stride() if is_dense(parameter) else torch.empty(parameter.shape, device="meta").stride()


def _fits_exactly(gradient: torch.Tensor, parameter: nn.Parameter) -> bool:
    """Whether a gradient may become `.grad` as it is: autograd's layout contract, and no other bytes in its storage."""
    return (
        gradient.stride() == _strides(parameter)
        and gradient.dtype == parameter.dtype
        and gradient.untyped_storage().nbytes() == gradient.nbytes
    )


def parameters_sharing_gradients(parameters: Mapping[str, nn.Parameter]) -> frozenset[str]:
    """Find parameters that have their `.grad` in common memory: PyTorch adds to it for each."""
    by_storage: dict[int, list[str]] = {}
    for name, parameter in parameters.items():
        gradient = gradient_of(parameter)
        if gradient is not None and without_memory(gradient) is None:
            by_storage.setdefault(gradient.untyped_storage().data_ptr(), []).append(name)
    return frozenset(name for names in by_storage.values() if len(names) > 1 for name in names)


def share_gradients(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether parameters have one tensor as their `.grad`. Faster than `parameters_sharing_gradients`."""
    grads = [grad for p in parameters if (grad := gradient_of(p)) is not None and without_memory(grad) is None]
    return len({grad.data_ptr() for grad in grads}) < len(grads)


def has_external_views(grad: torch.Tensor) -> bool:
    """Whether other tensors, or arrays, lie in a gradient's memory."""
    own = 2  # references of the tensor, and of this call's storage object
    return storage_use_count(grad.untyped_storage()) > own


def has_external_references(parameter: nn.Parameter) -> bool:
    """Whether user code has references to a parameter's `.grad`, or views of it, and expects PyTorch to add to it."""
    has_more = references(partial(getattr, parameter, "grad")) > _internal_references()
    if isinstance(parameter.grad, GradientPlaceholder):
        return False
    return parameter.grad is not None and (has_more or has_external_views(parameter.grad))


def references(get: Callable[[], Any]) -> int:
    """Count the references to what `get` returns, this call's included."""
    return sys.getrefcount(get())


@cache
def _internal_references() -> int:
    """Measure `references` of a gradient without other references."""
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    return references(partial(getattr, parameter, "grad"))


@dataclass(frozen=True)
class HandedOut:
    """Home view that became a parameter's `.grad`: the tensor, the storage that views of it share, and its address.

    References to tensor and storage are weak.
    """

    view: Callable[[], torch.Tensor | None]
    storage: StorageWeakRef | None
    address: int

    @classmethod
    def of(cls, view: torch.Tensor) -> HandedOut:
        return cls(weakref.ref(view), StorageWeakRef(view.untyped_storage()), view.data_ptr())

    def is_gone(self) -> bool:
        """Whether the view, and every view of it, is gone."""
        return self.storage is None or self.storage.expired()


NOT_HANDED_OUT = HandedOut(lambda: None, None, 0)
"""Record of a gradient that was never handed out."""
