"""Tell which parameters can live in chunks, as far as their own memory decides it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from chunkc.ir.errors import UnsupportedError
from chunkc.ir.strides import is_dense
from chunkc.runtime.storage.device_views import home_memory_of
from chunkc.runtime.storage.maps import map_at
from chunkc.runtime.store.shards import LocalShard
from chunkc.torch_private.engine import storage_use_count


def can_move(parameter: nn.Parameter) -> bool:
    """Whether a parameter can live in a chunk.

    It is a dense tensor in memory that fills its own storage, without other references to it (see `shares_memory`)."""
    return (
        type(parameter) in (nn.Parameter, LocalShard)
        and parameter.device.type in ("cpu", "cuda")
        and (is_chunkable(parameter) or (isinstance(parameter, LocalShard) and parameter.numel() == 0))
        and parameter.untyped_storage().nbytes() == parameter.nbytes
        and not shares_memory(parameter)
    )


def refuse_residents(named: Mapping[str, nn.Parameter]) -> None:
    """Refuse parameters that are cut over ranks and cannot live in chunks, which alone are gathered.

    Raises:
        UnsupportedError: there is one.
    """
    for name, parameter in named.items():
        if isinstance(parameter, LocalShard) and not can_move(parameter):
            raise UnsupportedError(
                f"this rank's part of {name} shares its memory with other tensors (an earlier state_dict, say) or is "
                "no dense tensor of real numbers: delete the others before the first call"
            )


def will_move(parameter: nn.Parameter) -> bool:
    """Whether a parameter on the meta device can live in a chunk once it has memory (see `can_move`)."""
    return type(parameter) is nn.Parameter and parameter.is_meta and is_chunkable(parameter)


def shares_memory(parameter: torch.Tensor) -> bool:
    """Whether a parameter's memory has other users, which would not follow it home.

    These are tensors over the same storage, such as an earlier `state_dict`, or other processes."""
    if type(parameter) not in (nn.Parameter, LocalShard) or parameter.device.type not in ("cpu", "cuda"):
        return False
    storage = parameter.untyped_storage()
    own = 2  # the tensor's, and this object's
    return storage_use_count(storage) > own or is_shared_memory(parameter)


def is_shared_memory(tensor: torch.Tensor) -> bool:
    """Whether a CPU tensor lies in memory that other processes may have, or in a file that is written with it.

    PyTorch says so of private maps of files too (`torch.load(mmap=True)`), which are the process's own.
    """
    if tensor.device.type != "cpu" or not tensor.is_shared():
        return False
    found = map_at(tensor.untyped_storage().data_ptr())
    return found is None or found.is_shared


def present_nbytes(parameters: Sequence[torch.Tensor], device: torch.device) -> int:
    """Return the bytes that parameters take on a GPU already. On a CPU, used RAM is counted elsewhere."""
    storages = [p.untyped_storage() for p in parameters if p.device == device and device.type == "cuda"]
    own = [storage for storage in storages if home_memory_of(storage) is None]  # a placed model's copies are at home
    return sum({storage.data_ptr(): storage.nbytes() for storage in own}.values())


def is_chunkable(tensor: torch.Tensor) -> bool:
    """Whether a tensor can be copied into a chunk as it lies in memory: dense real numbers.

    These may be integers of a quantized base."""
    is_dense_tensor = tensor.layout is torch.strided and tensor.numel() > 0 and is_dense(tensor)
    return is_dense_tensor and not tensor.is_complex() and tensor.dtype is not torch.bool
