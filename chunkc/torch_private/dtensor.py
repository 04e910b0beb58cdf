"""Reach inside a `DTensor`: its local tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

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


def lie_alike(one: DTensor, other: DTensor) -> bool:
    """Whether both lie over ranks in the same way; mostly they share what says how."""
    return one._spec is other._spec or tuple(one.placements) == tuple(other.placements)


def set_local(tensor: DTensor, local: torch.Tensor) -> None:
    """Make this very tensor the local one."""
    tensor._local_tensor = local


def as_subclass_without_grad(kind: type[T], tensor: torch.Tensor) -> T:
    """A tensor of this class over a tensor's memory, which autograd does not follow."""
    return torch.Tensor._make_subclass(kind, tensor.detach(), False)


def joined(outer: DeviceMesh, inner: DeviceMesh) -> DeviceMesh | None:
    """The mesh of both's dimensions, which are dimensions of one mesh, in this order; None: they are not."""
    root, inner_names = outer._get_root_mesh(), inner.mesh_dim_names or ()
    names = (*(outer.mesh_dim_names or ()), *inner_names)
    if len(set(names)) < outer.ndim + inner.ndim:
        return None
    try:
        is_inside = root[inner_names] == inner  # of two equal ones, DTensors may have the other
        return root[names] if is_inside else None
    except (KeyError, RuntimeError, ValueError):
        return None


def rows_inside(mesh: DeviceMesh, placements: Sequence[Placement]) -> Placement:
    """The placement of rows of each local tensor of a distributed one that is cut once more."""
    factor = 1
    for dimension, placement in enumerate(placements):
        factor *= mesh.size(dimension) if placement == Shard(0) else 1
    return _StridedShard(0, split_factor=factor) if factor > 1 else Shard(0)


def cut_dimension(placement: Placement) -> int | None:
    """The dimension that is cut over ranks; None: none is."""
    return placement.dim if isinstance(placement, (Shard, _StridedShard)) else None


def cuts_last(placement: Placement) -> bool:
    """Whether it cuts what is left once all others have cut, as that of `rows_inside`."""
    return isinstance(placement, _StridedShard)
