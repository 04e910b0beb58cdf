"""Which parameters can live in chunks, as far as their own memory decides it."""

from __future__ import annotations

import torch
from torch import nn

from chunkc.ir.strides import is_dense
from chunkc.torch_private.engine import storage_use_count


def can_move(parameter: nn.Parameter) -> bool:
    """Whether a parameter can live in a chunk: a dense tensor in memory that fills its own storage, and is nobody
    else's (see `shares_memory`)."""
    return (
        type(parameter) is nn.Parameter
        and parameter.device.type in ("cpu", "cuda")
        and is_chunkable(parameter)
        and parameter.untyped_storage().nbytes() == parameter.nbytes
        and not shares_memory(parameter)
    )


def shares_memory(parameter: torch.Tensor) -> bool:
    """Whether others have the parameter's memory, and would not follow it home: tensors over the same storage, such as
    an earlier `state_dict`, or other processes."""
    if type(parameter) is not nn.Parameter or parameter.device.type not in ("cpu", "cuda"):
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
    address = tensor.untyped_storage().data_ptr()
    try:
        with open("/proc/self/maps") as maps:
            for line in maps:
                span, permissions = line.split()[:2]
                begin, end = (int(bound, 16) for bound in span.split("-"))
                if begin <= address < end:
                    return permissions.endswith("s")
    except OSError:
        pass
    return True


def is_chunkable(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values can be laid into a chunk as they lie: dense floating-point numbers."""
    return tensor.layout is torch.strided and tensor.dtype.is_floating_point and tensor.numel() > 0 and is_dense(tensor)
