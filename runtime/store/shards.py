"""Parameters that are cut over ranks: what a user has is a `DTensor`, and what chunks hold is this rank's part of it.

Dynamo, autograd and the user see the `DTensor`. The store, the optimizers and everything that asks where data lies see
the `LocalShard`, which is the `DTensor`'s local tensor: an ordinary tensor that has the parameter's gradient as its
own.
"""

from __future__ import annotations

import weakref
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
    """This rank's part of a parameter, which knows the parameter weakly.

    Attributes:
        shards: how the parameter is cut. With tensor parallelism (see `chunkc.distributed.tensor_parallel`), how this
            rank's local tensor of it is, the one that it has without chunkc.
        transport: by which the ranks that have its parts meet.
        is_first: whether this rank is the first of those that have the same of the parameter without chunkc.
    """

    shards: Shards
    transport: Transport
    is_first: bool = True
    _distributed: weakref.ref[DTensor]

    @staticmethod
    def of(local: torch.Tensor, shards: Shards, transport: Transport) -> LocalShard:
        """The part that lies in a tensor's memory; `attach` says of what."""
        part = as_subclass_without_grad(LocalShard, local)
        part.shards, part.transport = shards, transport
        return part

    @property
    def world(self) -> Transport:
        """By which all ranks meet that train the model."""
        return self.transport.world

    @property
    def is_tensor_parallel(self) -> bool:
        """Whether ranks compute layers together, by tensor parallelism."""
        return self.world is not self.transport

    def attach(self, distributed: DTensor) -> None:
        """Become the local tensor of a parameter."""
        self._distributed = weakref.ref(distributed)
        set_local(distributed, self)

    @property
    def distributed(self) -> DTensor | None:
        """The parameter, as its user has it; None: it is gone."""
        return self._distributed()

    @property
    def grad(self) -> torch.Tensor | None:
        """This rank's part of the parameter's gradient.

        Raises:
            UnsupportedError: the gradient lies over the ranks in another way than the parameter.
        """
        whole = self._distributed()
        found: Any = None if whole is None else whole.grad
        if whole is None or found is None or isinstance(found, GradientPlaceholder):
            return found
        if not isinstance(found, DTensor) or not lie_alike(found, whole):
            raise UnsupportedError(
                "the gradient of a distributed parameter must be cut over the ranks as the parameter is: assign a "
                "DTensor with the parameter's placements"
            )
        return local_of(found)

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
        """A copy of a model is distributed, but no part of a plan: `chunkc.distribute` has not seen it."""
        if id(self) not in memo:
            memo[id(self)] = self.detach().clone()
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved as an ordinary tensor."""
        return self.detach().__reduce_ex__(protocol)


@overload
def local_shard_of(value: nn.Parameter) -> nn.Parameter: ...


@overload
def local_shard_of(value: torch.Tensor) -> torch.Tensor: ...


@overload
def local_shard_of(value: Any) -> Any: ...


def local_shard_of(value: Any) -> Any:
    """Of a parameter that `chunkc.distribute` has cut, this rank's part; anything else as it is."""
    if type(value) is DTensor and isinstance(found := local_of(value), LocalShard):
        return found
    return value


def leaf_of(parameter: torch.Tensor) -> torch.Tensor:
    """What autograd knows a parameter as: for a part the parameter that it is of.

    Raises:
        UnsupportedError: that is gone.
    """
    if type(parameter) is not LocalShard:  # `isinstance` asks nn.Parameter's metaclass, which takes four times as long
        return parameter
    found = parameter.distributed
    if found is None:
        raise UnsupportedError("a distributed parameter no longer exists, but code compiled for it still runs")
    return found


def block_of(tensor: DTensor, rank: int | None = None) -> Block:
    """What a rank has of a tensor.

    Args:
        rank: in the order of the tensor's mesh; None: this one.

    Raises:
        UnsupportedError: the tensor's values are sums of what ranks have.
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
                f"a tensor lies over the ranks as {placements}: only those are saved and loaded that are cut, or whole"
            )
    return cut_to_block(shape, [*cuts, *cut_last], is_first=is_first)


def _unraveled(rank: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The coordinate of a rank in a mesh."""
    coordinate: list[int] = []
    for size in reversed(sizes):
        rank, at = divmod(rank, size)
        coordinate.insert(0, at)
    return tuple(coordinate)


def shards_on(mesh: DeviceMesh, shape: tuple[int, ...], zero_stage: ZeroStage | None = 3, *, is_cut: bool) -> Shards:
    """A tensor's parts on a mesh: cut over its last dimension, with copies along the first of two; or whole on all."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    place, size = coordinate[-1], mesh.size(mesh.ndim - 1)
    number = place + (coordinate[0] * size if mesh.ndim > 1 else 0)
    if not is_cut:
        return Shards(shape, 1, 0, zero_stage, mesh.size(), number)
    return Shards(shape, size, place, zero_stage, mesh.size() // size, number // size)


def shard_like(whole: torch.Tensor, like: DTensor) -> DTensor:
    """A whole tensor cut over ranks as another one of its shape: what this rank has of it, over the same memory."""
    return with_local(like, whole[block_of(like).slices])
