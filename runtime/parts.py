"""Parameters that are cut over ranks: what a user has is a `DTensor`, and what chunks hold is this rank's part of it.

Dynamo, autograd and the user see the `DTensor`. The store, the optimizers and everything that asks where data lies see
the `Part`, which is the `DTensor`'s local tensor: an ordinary tensor that has the parameter's gradient as its own.
"""

from __future__ import annotations

import weakref
from typing import Any, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from chunkc.ir.errors import UnsupportedError
from chunkc.ir.shards import Shards, ZeroStage
from chunkc.runtime.transport import Transport
from chunkc.runtime.used_gradients import GradientElsewhere
from chunkc.torch_private.dtensor import DTensor, as_subclass_without_grad, local_of, set_local, with_local


class Part(nn.Parameter):
    """This rank's part of a parameter, which knows the parameter weakly.

    Attributes:
        shards: how the parameter is cut.
        transport: by which the ranks that have its parts meet.
        tensor_transport: by which ranks meet that compute each layer together (see `chunkc.tensor_parallel`): then
            `shards` cuts what this rank has of the parameter without chunkc. None: each computes by itself.
        is_first: whether this rank is the first of those that have the same of the parameter without chunkc.
    """

    shards: Shards
    transport: Transport
    tensor_transport: Transport | None = None
    is_first: bool = True
    _distributed: weakref.ref[DTensor]

    @staticmethod
    def of(local: torch.Tensor, shards: Shards, transport: Transport) -> Part:
        """The part that lies in a tensor's memory; `attach` says of what."""
        part = as_subclass_without_grad(Part, local)
        part.shards, part.transport = shards, transport
        return part

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
        whole = self.distributed
        if whole is None or whole.grad is None:
            return None
        found: Any = whole.grad
        if isinstance(found, GradientElsewhere):
            return found
        if not isinstance(found, DTensor) or tuple(found.placements) != tuple(whole.placements):
            raise UnsupportedError(
                "the gradient of a distributed parameter must be cut over the ranks as the parameter is: assign a "
                "DTensor with the parameter's placements"
            )
        return local_of(found)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        whole = self.distributed
        assert whole is not None
        if value is not None and not isinstance(value, GradientElsewhere):
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
def part_of(value: nn.Parameter) -> nn.Parameter: ...


@overload
def part_of(value: torch.Tensor) -> torch.Tensor: ...


@overload
def part_of(value: Any) -> Any: ...


def part_of(value: Any) -> Any:
    """Of a parameter that `chunkc.distribute` has cut, this rank's part; anything else as it is."""
    if type(value) is DTensor and isinstance(found := local_of(value), Part):
        return found
    return value


def leaf_of(parameter: torch.Tensor) -> torch.Tensor:
    """What autograd knows a parameter as: for a part the parameter that it is of.

    Raises:
        UnsupportedError: that is gone.
    """
    if type(parameter) is not Part:  # `isinstance` asks nn.Parameter's metaclass, which takes four times as long
        return parameter
    found = parameter.distributed
    if found is None:
        raise UnsupportedError("a distributed parameter no longer exists, but code compiled for it still runs")
    return found


def shards_of(tensor: DTensor) -> Shards:
    """How a tensor is cut over ranks.

    Raises:
        UnsupportedError: in another way than by rows.
    """
    *copied, cut = tensor.placements
    if (
        len(copied) > 1
        or not all(isinstance(placement, Replicate) for placement in copied)
        or cut
        not in (
            Shard(0),
            Replicate(),
        )
    ):
        raise UnsupportedError(
            f"a tensor lies over the ranks as {tuple(tensor.placements)}: only those are saved and loaded that are cut "
            "by rows, as chunkc.distribute does it"
        )
    return shards_on(tensor.device_mesh, tuple(tensor.shape), is_cut=cut == Shard(0))


def shards_on(mesh: DeviceMesh, shape: tuple[int, ...], zero_stage: ZeroStage | None = 3, *, is_cut: bool) -> Shards:
    """A tensor's parts on a mesh: cut over its last dimension, with copies along the first of two; or whole on all."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    place, size = coordinate[-1], mesh.size(mesh.ndim - 1)
    number = place + (coordinate[0] * size if mesh.ndim > 1 else 0)
    if not is_cut:
        return Shards(shape, 1, 0, zero_stage, mesh.size(), number)
    return Shards(shape, size, place, zero_stage, mesh.size() // size, number // size)


def rows_of(whole: torch.Tensor, like: DTensor) -> DTensor:
    """A whole tensor cut over ranks as another one of its shape: this rank's rows, over the same memory."""
    shards = shards_of(like)
    begin, end = shards.rows(shards.rank)
    return with_local(like, whole[begin:end] if whole.dim() else whole)
