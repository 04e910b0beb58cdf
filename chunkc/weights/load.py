"""Load weights from files into a model's own memory, one tensor after the other: `chunkc.load`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from chunkc.distributed.agreement import together
from chunkc.ir.errors import FileError, UnsupportedError
from chunkc.runtime.storage.maps import drop_pages, evict_pages
from chunkc.runtime.store.shards import shard_like
from chunkc.session.session import all_entered, sessions_of
from chunkc.torch_private.dtensor import DTensor, local_of
from chunkc.torch_private.dynamo import unwrapped
from chunkc.weights.over_ranks import LOAD, transport_of_module
from chunkc.weights.weights import tensors_in

OF_COMPILED = "_orig_mod."
"""The prefix that `torch.compile` puts before the names of a module's parameters."""


class IncompatibleKeys(NamedTuple):
    """Names that only the model or only the files have, as `load_state_dict` returns them."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def load(model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True) -> IncompatibleKeys:
    """Load weights from files into a model, wherever its parameters live, as `load_state_dict` does.

    Values are copied into the model's parameters and buffers, and converted to their dtypes. One tensor at a time is in
    memory in addition to the model, so the model may be larger than the RAM (see `chunkc.init`). Files may have a
    shared weight under any of its names.

    If ranks train the model (`chunkc.distribute`), all of them call this, and each copies its shard of each tensor.

    Args:
        model: compiled or not; names in files are those of the module itself.
        path: a file of safetensors or of `torch.save`, an index such as `model.safetensors.index.json`, or a directory
            as Hugging Face lays it out.
        strict: refuse files with other names than the model's.

    Returns:
        Names that the files lack, and names that the model lacks.

    Raises:
        FileError: a file cannot be read, or is in none of these formats; or another rank could not load.
        RuntimeError: as `load_state_dict`: shapes differ or, with `strict`, names.
        UnsupportedError: parameters are on the meta device, or only some of them are sharded.
        DistributedError: a rank is gone, or calls something else.
    """
    module = weights_module(model)
    for name, parameter in module.named_parameters():
        if parameter.is_meta:
            raise UnsupportedError(
                f"{name} is on the meta device, with no memory to load into: build the model inside "
                "`with chunkc.init():`, or make it with `chunkc.place(model, init=...)`"
            )
    transport = transport_of_module(module)
    found: dict[str, torch.Tensor] = {}
    together(transport, LOAD, lambda: found.update(tensors_in(Path(path))), FileError)
    own = module.state_dict(keep_vars=True)
    known = {plain(name): name for name in own}  # inside submodules that are compiled, names have prefixes
    tensors = {known.get(plain(name), plain(name)): tensor for name, tensor in found.items()}
    for names in _shared(module):
        present = next((tensors[name] for name in names if name in tensors), None)
        if present is not None:
            tensors |= {name: present for name in names if name not in tensors}
    tensors = {name: _as_cut(tensor, own.get(name)) for name, tensor in tensors.items()}
    sessions = sessions_of(module.parameters())
    with all_entered(sessions):
        for session in sessions:
            session.store.updates.finish()
        with _OneAtATime():
            loaded = together(transport, LOAD, lambda: tuple(module.load_state_dict(tensors, strict=strict)), FileError)
            return IncompatibleKeys(*loaded[0])


def weights_module(model: nn.Module) -> nn.Module:
    """Return the module inside its wrappers: `torch.compile`'s, and any with the names of its `module`'s `state_dict`.

    The latter are those of `chunkc.engine.Engine` and Lightning Fabric.
    """
    found = unwrapped(model)
    inner = found._modules.get("module")
    if inner is None or list(found.state_dict()) != list(inner.state_dict()):
        return found
    return weights_module(inner)


def plain(name: str) -> str:
    """Return a name without the prefixes that compiled modules insert."""
    return name.replace(OF_COMPILED, "")


def place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for the same tensor, and for tensors over the same memory (`b.data = a.data`)."""
    if isinstance(tensor, DTensor):
        return place_of(local_of(tensor)) if local_of(tensor).numel() else (id(tensor),)
    if tensor.numel() == 0 or tensor.device.type == "meta":
        return (id(tensor),)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _as_cut(tensor: torch.Tensor, own: object) -> torch.Tensor:
    """Return this rank's shard of a tensor if the model's tensor `own` is sharded, else the whole tensor.

    It stays whole if the shapes differ, too: `load_state_dict` raises then.
    """
    return shard_like(tensor, own) if isinstance(own, DTensor) and own.shape == tensor.shape else tensor


def _shared(module: nn.Module) -> list[list[str]]:
    """List the names of each tensor that has several."""
    by_place: dict[tuple[Any, ...], list[str]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor):
            by_place.setdefault(place_of(tensor), []).append(name)
    return [names for names in by_place.values() if len(names) > 1]


class _OneAtATime(TorchFunctionMode):
    """Drop the pages of both sides after each `copy_`, if they are mapped from a file."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.copy_:
            target, source = (local_of(side) if isinstance(side, DTensor) else side for side in args[:2])
            drop_pages(target)
            evict_pages(source)
        return result
