"""Represent sharded parameters: a `DTensor` for the user, this rank's `LocalShard` of it for chunks.

Dynamo, autograd and the user see the `DTensor`. The store, the optimizers and all code that locates data see the
`LocalShard`, the `DTensor`'s local tensor: an ordinary tensor with the local shard of the parameter's gradient as its
`.grad`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate

from chunkc.ir.blocks import Block
from chunkc.ir.blocks import block_of as cut_to_block
from chunkc.ir.errors import UnsupportedError
from chunkc.ir.shards import Shards, ZeroStage
from chunkc.runtime.distributed.transport import Transport
from chunkc.runtime.store.consumed_gradients import GradientPlaceholder
from chunkc.torch_private.dtensor import (
    DTensor,
    as_subclass_without_grad,
    cut_dimension,
    cuts_last,
    lie_alike,
    local_of,
    set_local,
    with_local,
)


class LocalShard(nn.Parameter):
    """Shard of a parameter on this rank, with a weak reference to the parameter.

    Attributes:
        shards: how the parameter is sharded. With tensor parallelism (see `chunkc.distributed.tensor_parallel`), how
            this rank's local tensor of it is, the one that it has without chunkc.
        transport: of the ranks that have shards of it.
        is_first: whether this rank is the first of those that have the same of the parameter without chunkc.
    """

    shards: Shards
    transport: Transport
    is_first: bool = True
    _distributed: weakref.ref[DTensor]

    @staticmethod
    def of(local: torch.Tensor, shards: Shards, transport: Transport) -> LocalShard:
        """Make the shard that lies in a tensor's memory; `attach` sets its parameter."""
        shard = as_subclass_without_grad(LocalShard, local)
        shard.shards, shard.transport = shards, transport
        return shard

    @property
    def world(self) -> Transport:
        """Transport of all ranks that train the model."""
        return self.transport.world

    @property
    def is_tensor_parallel(self) -> bool:
        """Whether ranks compute layers collectively, by tensor parallelism."""
        return self.world is not self.transport

    def attach(self, distributed: DTensor) -> None:
        """Become the local tensor of a parameter."""
        self._distributed = weakref.ref(distributed)
        set_local(distributed, self)

    @property
    def distributed(self) -> DTensor | None:
        """Parameter that the user has; None: it is gone."""
        return self._distributed()

    @property
    def grad(self) -> torch.Tensor | None:
        """Shard of the parameter's gradient on this rank.

        Raises:
            UnsupportedError: the gradient is sharded in another way than the parameter.
        """
        whole = self._distributed()
        grad: Any = None if whole is None else whole.grad
        if whole is None or grad is None or isinstance(grad, GradientPlaceholder):
            return grad
        if not isinstance(grad, DTensor) or not lie_alike(grad, whole):
            raise UnsupportedError(
                "the gradient of a distributed parameter must be cut over the ranks as the parameter is: assign a "
                "DTensor with the parameter's placements"
            )
        return local_of(grad)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        whole = self.distributed
        assert whole is not None
        if value is not None and not isinstance(value, GradientPlaceholder):
            value = with_local(whole, value)
        whole.grad = value

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """Whether the parameter is trained."""
        whole = self.distributed
        return whole is not None and whole.requires_grad

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Copy the values only: a copy of a model is in no plan, as `chunkc.distribute` was not called on it."""
        if id(self) not in memo:
            memo[id(self)] = self.detach().clone()
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as an ordinary tensor."""
        return self.detach().__reduce_ex__(protocol)


def local_shards_in(groups: Iterable[Mapping[str, Any]]) -> Iterator[torch.Tensor]:
    """Iterate over this rank's shards of all parameters in an optimizer's parameter groups."""
    return (local_shard_of(parameter) for group in groups for parameter in group["params"])


@overload
def local_shard_of(value: nn.Parameter) -> nn.Parameter: ...


@overload
def local_shard_of(value: torch.Tensor) -> torch.Tensor: ...


@overload
def local_shard_of(value: Any) -> Any: ...


def local_shard_of(value: Any) -> Any:
    """Return this rank's shard of a parameter that `chunkc.distribute` has sharded; any other value as it is."""
    if type(value) is DTensor and isinstance(shard := local_of(value), LocalShard):
        return shard
    return value


def leaf_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return the leaf tensor of a parameter in autograd's graph: for a shard its parameter.

    Raises:
        UnsupportedError: the shard's parameter is gone.
    """
    if type(parameter) is not LocalShard:  # `isinstance` asks nn.Parameter's metaclass, which takes four times as long
        return parameter
    distributed = parameter.distributed
    if distributed is None:
        raise UnsupportedError("a distributed parameter no longer exists, but code compiled for it still runs")
    return distributed


def block_of(tensor: DTensor, rank: int | None = None) -> Block:
    """Return the block of a tensor that a rank has.

    Args:
        rank: in the order of the tensor's mesh; None: this one.

    Raises:
        UnsupportedError: the tensor's values are sums over ranks.
    """
    mesh = tensor.device_mesh
    sizes = tuple(mesh.mesh.shape)
    coordinate = mesh.get_coordinate() if rank is None else _unraveled(rank, sizes)
    assert coordinate is not None
    return _block(tuple(tensor.shape), tuple(tensor.placements), sizes, tuple(coordinate))


@lru_cache(maxsize=1 << 16)
def _block(
    shape: tuple[int, ...], placements: tuple[Placement, ...], sizes: tuple[int, ...], coordinate: tuple[int, ...]
) -> Block:
    cuts: list[tuple[int, int, int]] = []
    cut_last: list[tuple[int, int, int]] = []
    is_first = True
    for placement, size, at in zip(placements, sizes, coordinate, strict=True):
        if isinstance(placement, Replicate):
            is_first = is_first and at == 0
        elif (dim := cut_dimension(placement)) is not None:
            (cut_last if cuts_last(placement) else cuts).append((dim, size, at))
        else:
            raise UnsupportedError(
                f"a tensor is placed on the ranks as {placements}: only sharded or replicated tensors can be saved and "
                "loaded"
            )
    return cut_to_block(shape, [*cuts, *cut_last], is_first=is_first)


def _unraveled(rank: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the coordinate of a rank in a mesh."""
    coordinate: list[int] = []
    for size in reversed(sizes):
        rank, at = divmod(rank, size)
        coordinate.insert(0, at)
    return tuple(coordinate)


def shards_on(mesh: DeviceMesh, shape: tuple[int, ...], zero_stage: ZeroStage | None = 3, *, is_cut: bool) -> Shards:
    """Return a tensor's shards on a mesh: over its last dimension, with copies along the first of two dimensions.

    Args:
        is_cut: False: every rank has the whole tensor.
    """
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    position, size = coordinate[-1], mesh.size(mesh.ndim - 1)
    number = position + (coordinate[0] * size if mesh.ndim > 1 else 0)
    if not is_cut:
        return Shards(shape, 1, 0, zero_stage, mesh.size(), number)
    return Shards(shape, size, position, zero_stage, mesh.size() // size, number // size)


def shard_like(whole: torch.Tensor, like: DTensor) -> DTensor:
    """Shard a whole tensor as another one of its shape; this rank's shard is a view of the whole tensor's memory."""
    return with_local(like, whole[block_of(like).slices])
