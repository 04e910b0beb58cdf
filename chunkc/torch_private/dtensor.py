"""What lies inside a `DTensor`: its local tensor."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch.distributed.tensor import DTensor

__all__ = ["DTensor"]

T = TypeVar("T", bound=torch.Tensor)


def local_of(tensor: DTensor) -> torch.Tensor:
    """The very tensor that a distributed one has, and no view of it."""
    return tensor._local_tensor


def with_local(like: DTensor, local: torch.Tensor) -> DTensor:
    """A distributed tensor that has this very tensor, and lies over ranks as another one does; no communication.

    A step makes one for every gradient, and `from_local` takes ten times as long as the constructor.
    """
    if local.dtype == like.dtype:
        return DTensor(local, like._spec, requires_grad=False)
    with torch.no_grad():
        made = DTensor.from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
    set_local(made, local)
    return made


def set_local(tensor: DTensor, local: torch.Tensor) -> None:
    """Make this very tensor the local one."""
    tensor._local_tensor = local


def as_subclass_without_grad(kind: type[T], tensor: torch.Tensor) -> T:
    """A tensor of this class over a tensor's memory, which autograd does not follow."""
    return torch.Tensor._make_subclass(kind, tensor.detach(), False)
