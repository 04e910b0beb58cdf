"""Private parts of `DTensor`: its local tensor, its spec, and placements that are cut twice."""

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
    """Return the local tensor of a distributed one itself, not a view of it."""
    return tensor._local_tensor


def with_local(like: DTensor, local: torch.Tensor) -> DTensor:
    """Make a distributed tensor of this very local tensor, placed like another one; without communication.

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
    """Whether two distributed tensors have the same placements; mostly they share one spec."""
    return one._spec is other._spec or tuple(one.placements) == tuple(other.placements)


def set_local(tensor: DTensor, local: torch.Tensor) -> None:
    """Set the local tensor of a distributed one to this very tensor."""
    tensor._local_tensor = local


def as_subclass_without_grad(kind: type[T], tensor: torch.Tensor) -> T:
    """Make a tensor of a subclass that shares the memory of `tensor` and is detached from autograd."""
    return torch.Tensor._make_subclass(kind, tensor.detach(), False)


def joined(outer: DeviceMesh, inner: DeviceMesh) -> DeviceMesh | None:
    """Return the submesh with the dimensions of both, outer ones first; None if both are not of one mesh."""
    root, inner_names = outer._get_root_mesh(), inner.mesh_dim_names or ()
    names = (*(outer.mesh_dim_names or ()), *inner_names)
    if len(set(names)) < outer.ndim + inner.ndim:
        return None
    try:
        is_inside = root[inner_names] == inner  # equal, not identical: a DTensor may have an equal mesh
        return root[names] if is_inside else None
    except (KeyError, RuntimeError, ValueError):
        return None


def rows_inside(mesh: DeviceMesh, placements: Sequence[Placement]) -> Placement:
    """Return the placement for cutting the rows of each local tensor once more, over an outer mesh.

    Args:
        mesh, placements: those by which the distributed tensor is cut already.
    """
    factor = 1
    for dimension, placement in enumerate(placements):
        factor *= mesh.size(dimension) if placement == Shard(0) else 1
    return _StridedShard(0, split_factor=factor) if factor > 1 else Shard(0)


def cut_dimension(placement: Placement) -> int | None:
    """Return the tensor dimension that a placement cuts over ranks; None: it cuts none."""
    return placement.dim if isinstance(placement, (Shard, _StridedShard)) else None


def cuts_last(placement: Placement) -> bool:
    """Whether a placement cuts what all other placements leave, as that of `rows_inside` does."""
    return isinstance(placement, _StridedShard)
