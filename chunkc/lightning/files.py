"""Write and read Lightning's own checkpoint files without a copy of them in memory.

If tensors are sharded over ranks, rank 0 writes the file that one process would write. It gathers one whole tensor
after another into a nameless file in the checkpoint's directory, and saves the tensors from a memory map of that file.
Each rank loads its shards from a memory map of the checkpoint.
"""

from __future__ import annotations

import contextlib
import copy
import mmap
import os
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from torch import nn

from chunkc.distributed.agreement import agree, together
from chunkc.ir.errors import CheckpointError, HomeError
from chunkc.runtime.distributed.transport import Transport
from chunkc.runtime.storage.maps import NamelessFile, drop_pages
from chunkc.runtime.store.shards import shard_like
from chunkc.torch_private.dtensor import DTensor
from chunkc.weights.load import place_of
from chunkc.weights.over_ranks import send_to_first, whole_on_first

_PHASE = "saving a checkpoint of Lightning's"


class MappedCheckpointIO(TorchCheckpointIO):
    """Write and read Lightning's own files without a copy of them in memory: the default of both strategies.

    A file on a local disk is written under a temporary name, then renamed; it is read as a memory map. Other files are
    left to Lightning.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if storage_options is not None or not _is_local(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        temporary = f"{path}.{os.getpid()}.part"
        try:
            torch.save(checkpoint, temporary)
            os.replace(temporary, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        if map_location is None:
            map_location = "cpu"
        if not _is_local(path) or not zipfile.is_zipfile(path):  # older `torch.save` formats cannot be mapped
            return super().load_checkpoint(path, map_location, weights_only)
        return torch.load(path, map_location=map_location, mmap=True, weights_only=weights_only)


def _is_local(path: Any) -> bool:
    return "://" not in str(path)


def save_over_ranks(
    checkpoint: dict[str, Any], path: Any, transport: Transport, write: Callable[[dict[str, Any]], None]
) -> None:
    """Write one checkpoint of all ranks; all of them call this, each with its own shards.

    Args:
        checkpoint: this rank's checkpoint; the same tensors in the same order on all ranks.
        path: path of the checkpoint.
        write: writes a checkpoint of whole tensors; called on rank 0 only.

    Raises:
        CheckpointError: rank 0 cannot write it.
        DistributedError: the ranks' checkpoints have different tensors, or a rank is gone.
    """
    found = list(_distributed_in(checkpoint))
    agree(transport, {"the tensors of the checkpoint": repr([(tuple(one.shape), one.dtype) for one in found])})
    is_writer = transport.rank == 0
    firsts = together(transport, _PHASE, lambda: _firsts(found), CheckpointError)[0]
    sent = sorted(set(firsts))
    if not is_writer:  # collectives in the order of rank 0's: `_map_tensors`, each tensor, `_written`
        together(transport, _PHASE, lambda: None, CheckpointError)
        send_to_first([found[at] for at in sent], transport)
        together(transport, _PHASE, lambda: None, CheckpointError)
        return
    mapped: dict[int, torch.Tensor] = {}
    distinct = {at: found[at] for at in sent}
    together(transport, _PHASE, lambda: mapped.update(_map_tensors(distinct, _folder_of(path))), CheckpointError)
    for at, tensor in mapped.items():
        tensor.copy_(whole_on_first(found[at], transport))
        drop_pages(tensor)
    whole = _replaced(checkpoint, iter([mapped[first] for first in firsts]))
    together(transport, _PHASE, lambda: _written(write, whole, path), CheckpointError)


def _written(write: Callable[[dict[str, Any]], None], checkpoint: dict[str, Any], path: Any) -> None:
    try:
        write(checkpoint)
    except OSError as error:
        raise CheckpointError(f"cannot save {path}: {error.strerror or error}") from error


def _distributed_in(value: Any) -> Iterator[DTensor]:
    """Yield the distributed tensors in a checkpoint, in order."""
    if isinstance(value, DTensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _distributed_in(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _distributed_in(inner)


def _replaced(value: Any, whole: Iterator[torch.Tensor]) -> Any:
    """Return a checkpoint with each distributed tensor replaced by the next whole one; other values are not copied."""
    if isinstance(value, DTensor):
        return next(whole)
    if next(_distributed_in(value), None) is None:
        return value
    if isinstance(value, Mapping):
        made: Any = copy.copy(value)  # keeps the class and attributes: a `state_dict` has `_metadata`
        for key, inner in value.items():
            made[key] = _replaced(inner, whole)
        return made
    items = [_replaced(inner, whole) for inner in value]
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _firsts(tensors: Sequence[DTensor]) -> list[int]:
    """Return, per tensor, the index of the first one with the same memory: a tied weight is saved once."""
    known: dict[tuple[Any, ...], int] = {}
    return [known.setdefault((*place_of(tensor), tuple(tensor.shape)), at) for at, tensor in enumerate(tensors)]


def _folder_of(path: Any) -> str:
    return os.path.dirname(os.path.abspath(path)) if _is_local(path) else tempfile.gettempdir()


def _map_tensors(tensors: Mapping[int, DTensor], folder: str) -> dict[int, torch.Tensor]:
    """Map memory for whole tensors, by index, from a nameless file, which is closed with the last of them.

    Raises:
        CheckpointError: the file system has no room, or the folder or the file cannot be made.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        file = NamelessFile(folder)
        return {at: _map_tensor(tensor, file) for at, tensor in tensors.items()}
    except (OSError, HomeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"no room in {folder} for the tensors of a checkpoint, which are put together there ({reason}): a save "
            "needs twice the checkpoint's bytes for a while"
        ) from error


def _map_tensor(tensor: DTensor, file: NamelessFile) -> torch.Tensor:
    if tensor.numel() == 0:
        return torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="cpu")
    nbytes = tensor.numel() * tensor.dtype.itemsize
    mapping = file.map(-(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
    return torch.frombuffer(mapping.memory, dtype=tensor.dtype, count=tensor.numel()).view(tuple(tensor.shape))


def own_weights(module: nn.Module, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """Copy a `state_dict` with this rank's shards, as views, in place of whole tensors that the module has sharded."""
    own = module.state_dict(keep_vars=True)
    cut: Any = copy.copy(state_dict)
    for name, tensor in state_dict.items():
        like = own.get(name)
        if isinstance(like, DTensor) and not isinstance(tensor, DTensor) and tensor.shape == like.shape:
            cut[name] = shard_like(tensor, like)
    return cut
