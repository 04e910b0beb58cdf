"""Shard a model over one mesh dimension that `parallelize_module` has sharded over another.

The local tensor of a tensor-parallel parameter is sharded, gathered and reduced over the mesh of `chunkc.distribute`,
as a whole parameter is without tensor parallelism. In place of the parameter, a module that is compiled reads

    weight: "DTensor(f32[8, 4], _S(0, 2), S(0))"
    own: "f32[4, 4]" = chunkc.distributed.whole_parameters.whole_here(weight, (4, 4))
    placed: "DTensor(f32[8, 4], S(0))" = DTensor.from_local(own, mesh, (S(0),), shape=(8, 4), stride=(4, 1))

so all rules of tensor parallelism are PyTorch's, and so are the collectives in the graph (see
`passes/graphs/collectives`). Parameters that are not in the plan of `parallelize_module` are replicated on its ranks,
which all make the same updates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from chunkc.distributed.whole_parameters import whole_here
from chunkc.ir.errors import UnsupportedError
from chunkc.runtime.store.shards import LocalShard, local_shard_of
from chunkc.torch_private.dtensor import joined, local_of, rows_inside

HOW = (
    'make one mesh, `mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))`, then '
    '`parallelize_module(model, mesh["tp"], plan)` and `chunkc.distribute(model, mesh["dp"])`'
)


def is_parallel(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a `DTensor` that `chunkc.distribute` has not sharded."""
    return isinstance(tensor, DTensor) and not isinstance(local_shard_of(tensor), LocalShard)


@dataclass(frozen=True)
class TensorParallel:
    """Placements of a model's parameters on the mesh of tensor parallelism, and on the mesh of all ranks.

    Attributes:
        mesh: of the ranks that compute a layer together.
        joint: the dimensions of the mesh of `chunkc.distribute`, then those of `mesh`.
    """

    mesh: DeviceMesh
    joint: DeviceMesh

    def is_first(self, parameter: torch.Tensor) -> bool:
        """Whether this rank is the first of the ranks of `mesh` with the same local tensor of a parameter."""
        coordinate = self.mesh.get_coordinate()
        assert coordinate is not None
        return all(
            at == 0
            for at, placement in zip(coordinate, self.placements(parameter), strict=True)
            if isinstance(placement, Replicate)
        )

    def placements(self, parameter: torch.Tensor) -> tuple[Placement, ...]:
        """Return a parameter's placements on `mesh`."""
        return parameter.placements if isinstance(parameter, DTensor) else (Replicate(),) * self.mesh.ndim

    def placements_of_parts(self, parameter: torch.Tensor, over_data: Sequence[Placement]) -> list[Placement]:
        """Return a sharded parameter's placements on `joint`.

        Args:
            over_data: placements of each rank's local tensor on the mesh of `chunkc.distribute`; the last one shards.
        """
        found = self.placements(parameter)
        *copied, cut = over_data
        return [*copied, rows_inside(self.mesh, found) if cut == Shard(0) else cut, *found]

    def reader(self, parameter: torch.Tensor) -> Callable[[Any], torch.Tensor]:
        """Return the function through which a compiled module reads the sharded parameter that replaces this one."""
        shape = tuple(local(parameter).shape)
        if not isinstance(parameter, DTensor):
            return lambda distributed: whole_here(distributed, shape)
        placed = placing(parameter)
        return lambda distributed: placed(whole_here(distributed, shape))


def placing(like: DTensor) -> Callable[[torch.Tensor], DTensor]:
    """Return a function that wraps a local tensor as a `DTensor` placed like another one, without communication."""
    mesh, placements, shape, stride = like.device_mesh, like.placements, like.shape, like.stride()
    return lambda own: DTensor.from_local(own, mesh, placements, run_check=False, shape=shape, stride=stride)


def local(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's local tensor of a parameter."""
    return local_of(parameter) if isinstance(parameter, DTensor) else parameter


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> TensorParallel | None:
    """Find how `parallelize_module` has sharded a model that is to be sharded over a mesh; None: it has not.

    Raises:
        UnsupportedError: as `mesh_of_layers`, or both meshes are not dimensions of one mesh.
    """
    first = mesh_of_layers(model)
    if first is None:
        return None
    name, found = first
    joint = joined(mesh, found)
    if joint is None:
        raise UnsupportedError(
            f"{name} is a DTensor over ranks that have no mesh in common with that of chunkc.distribute: {HOW}"
        )
    return TensorParallel(found, joint)


def mesh_of_layers(model: nn.Module) -> tuple[str, DeviceMesh] | None:
    """Find the first parameter that `parallelize_module` has sharded: its name and mesh; None: there is none.

    Raises:
        UnsupportedError: `fully_shard` was applied, a buffer is a `DTensor`, parameters are on several meshes, or a
            placement is neither `Shard` nor `Replicate`.
    """
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            raise UnsupportedError(
                f"{name or 'the model'} is cut by fully_shard already: leave that to chunkc.distribute"
            )
    named: dict[str, Any] = {name: p for name, p in model.named_parameters() if is_parallel(p)}
    for name, buffer in model.named_buffers():
        if isinstance(buffer, DTensor):
            raise UnsupportedError(
                f"the buffer {name} is a DTensor: chunkc computes with ordinary buffers; leave {_parent(name)} out of "
                "the plan of parallelize_module"
            )
    if not named:
        return None
    meshes = _meshes(named)
    if len(meshes) > 1:
        raise UnsupportedError(f"{meshes[1][0]} lies over other ranks than {meshes[0][0]}: {HOW}")
    for name, parameter in named.items():
        if not all(isinstance(placement, (Replicate, Shard)) for placement in parameter.placements):
            raise UnsupportedError(f"{name} lies over the ranks as {parameter.placements}: cut it, or leave it whole")
    return meshes[0]


def _meshes(named: Mapping[str, Any]) -> list[tuple[str, DeviceMesh]]:
    found: list[tuple[str, DeviceMesh]] = []
    for name, parameter in named.items():
        if all(parameter.device_mesh != mesh for _, mesh in found):
            found.append((name, parameter.device_mesh))
    return found


def _parent(name: str) -> str:
    return name.rpartition(".")[0] or "the model"
