"""Copy a model onto fake tensors, to trace the copy in its place: nothing is allocated, and the model stays as it is.

For a model that `parallelize_module` has cut (see `chunkc.distributed.tensor_parallel`), the copy has this rank's shard
of each parameter, an ordinary tensor. Its modules read the `DTensor` around that shard, as on real ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from chunkc.distributed.tensor_parallel import local, placing
from chunkc.distributed.whole_parameters import let_read
from chunkc.ir.errors import UnsupportedError
from chunkc.session.session import owner
from chunkc.torch_private.dynamo import OptimizedModule, is_marked_dynamic, mark_alike, unwrapped
from chunkc.torch_private.fake import FakeTensor, FakeTensorMode


@dataclass(frozen=True)
class FakeCopy:
    """A copy of a model on fake tensors; ties stay ties.

    Attributes:
        names: of its parameters, by identity.
        elsewhere_numel: name -> elements that only other ranks have, for parameters of layers that are cut over ranks.
        values: identity of a fake tensor that is no parameter -> the tensor for which it stands.
    """

    model: nn.Module
    names: Mapping[int, str]
    elsewhere_numel: Mapping[str, int] = field(default_factory=dict)
    values: Mapping[int, Tensor] = field(default_factory=dict)

    @property
    def is_tensor_parallel(self) -> bool:
        """Whether layers are cut over ranks."""
        return bool(self.elsewhere_numel)


def mode_of(model: nn.Module, arguments: Iterable[Any]) -> FakeTensorMode:
    """Return the mode of the fake tensors in a model and among the arguments of a call; a new one if there are none.

    Raises:
        UnsupportedError: they have several modes.
    """
    values = [*(local(tensor) for tensor in _tensors(model)), *arguments]
    modes = {id(value.fake_mode): value.fake_mode for value in values if isinstance(value, FakeTensor)}
    if len(modes) > 1:
        raise UnsupportedError("the fake tensors of the model and of its arguments must come from one FakeTensorMode")
    return next(iter(modes.values()), None) or FakeTensorMode(allow_non_fake_inputs=True)


def may_move(parameter: nn.Parameter) -> bool:
    """Whether the parameter can live in a chunk, as far as its own storage decides it (see `session.movable`)."""
    if owner(parameter) is not None or isinstance(parameter, FakeTensor | DTensor):
        return True
    return type(parameter) is nn.Parameter and parameter.untyped_storage().nbytes() == parameter.nbytes


def has_dynamic_dimensions(arguments: Any) -> bool:
    """Whether a dimension of any tensor among the arguments is marked as dynamic."""
    return any(is_marked_dynamic(leaf) for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor))


def fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """Return a fake tensor on the CPU like the given one.

    Raises:
        UnsupportedError: it is sparse, or distributed.
    """
    if isinstance(tensor, FakeTensor) and not (has_dynamic_dimensions(tensor) and _owns_its_storage(tensor)):
        return tensor
    if isinstance(tensor, DTensor):
        raise UnsupportedError("a DTensor that is no parameter cannot be explained; give the model ordinary tensors")
    if tensor.layout is not torch.strided:
        raise UnsupportedError(f"a {tensor.layout} tensor cannot be explained; make it dense")
    with mode:
        made = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu", requires_grad=tensor.requires_grad
        )
    mark_alike(made, tensor)
    return made


def values_by_fake(given: Iterable[Any], made: Iterable[Any]) -> dict[int, Tensor]:
    """Identity of each fake tensor in `made` -> the tensor at its place in `given`, where that has values."""
    pairs = ((value, stand_in) for value, stand_in in zip(given, made, strict=True) if isinstance(value, Tensor))
    return {id(made): value for value, made in pairs if not isinstance(value, FakeTensor) and not value.is_meta}


def _owns_its_storage(tensor: Tensor) -> bool:
    """Whether a tensor is as large as its storage.

    The storage of a view is traced with a fixed size. So a view of a whole storage is traced as an ordinary tensor.
    """
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize


def fake_copy(model: nn.Module, mode: FakeTensorMode) -> FakeCopy:
    """Copy a model onto fake tensors.

    Raises:
        UnsupportedError: something in the model cannot be copied.
    """
    memo: dict[int, Any] = {}
    readers: dict[int, Callable[[Any], Tensor]] = {}
    elsewhere: dict[int, int] = {}
    values: dict[int, Tensor] = {}
    for tensor in _tensors(model):
        if not isinstance(tensor, nn.Parameter):
            made = memo.setdefault(id(tensor), fake(tensor, mode))
            values |= values_by_fake([tensor], [made])
        elif id(tensor) not in memo:
            own = fake(local(tensor), mode)
            made = memo[id(tensor)] = nn.Parameter(own.detach(), requires_grad=tensor.requires_grad)
            if isinstance(tensor, DTensor):
                readers[id(made)], elsewhere[id(made)] = placing(tensor), tensor.numel() - made.numel()
    memo |= {id(mesh): mesh for mesh in _meshes(model)}
    try:
        copied = copy.deepcopy(model, memo)
    except (TypeError, RuntimeError) as error:
        raise UnsupportedError(f"{type(model).__name__} cannot be copied to be explained: {error}") from error
    for module in list(copied.modules()):
        # The copy of a submodule that is compiled by itself would call the original.
        inner = {
            name: unwrapped(child) for name, child in module._modules.items() if isinstance(child, OptimizedModule)
        }
        module._modules.update(inner)
        reading = {name: readers[id(p)] for name, p in module._parameters.items() if id(p) in readers}
        if reading:
            let_read(module, reading)
    names = {id(parameter): name for name, parameter in copied.named_parameters()}
    return FakeCopy(copied, names, {names[at]: numel for at, numel in elsewhere.items() if at in names}, values)


def _tensors(model: nn.Module) -> list[Tensor]:
    """Return parameters, buffers, and tensors in plain attributes, or in lists and dictionaries in these."""
    return [*model.parameters(), *model.buffers(), *(leaf for leaf in _plain(model) if isinstance(leaf, Tensor))]


def _meshes(model: nn.Module) -> list[DeviceMesh]:
    """Return the meshes that modules keep, which must not be copied."""
    return [leaf for leaf in _plain(model) if isinstance(leaf, DeviceMesh)]


def _plain(model: nn.Module) -> list[Any]:
    """Return the values of modules' plain attributes, and in lists and dictionaries in these."""
    attributes = [
        value
        for module in model.modules()
        for key, value in vars(module).items()
        if key not in ("_parameters", "_buffers", "_modules")
    ]
    return pytree.tree_leaves(attributes)
