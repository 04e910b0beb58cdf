"""Save a model's weights to safetensors files, one tensor after the other: `chunkc.save`."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn

from chunkc.distributed.agreement import together
from chunkc.ir.errors import FileError, OptionsError
from chunkc.options import parse_size
from chunkc.session.session import all_entered, sessions_of
from chunkc.weights import safetensors
from chunkc.weights.load import place_of, plain, weights_module
from chunkc.weights.over_ranks import SAVE, send_to_first, transport_of_module, whole_on_first
from chunkc.weights.weights import INDEX, SINGLE

Whole = Callable[[torch.Tensor], torch.Tensor]
"""Gathers a sharded tensor; returns any other as it is."""

_SHARD = re.compile(r"model(-[0-9a-f]{8})?-\d{5}-of-\d{5}\.safetensors")


def save(model: nn.Module, path: str | os.PathLike[str], *, max_shard_size: int | str = "5GB") -> None:
    """Save a model's weights as safetensors files that `transformers` and the safetensors library can read.

    Entries of the module's own `state_dict` are saved, without the prefixes that `torch.compile` inserts into names.
    Tensors are streamed: one at a time is in memory, in addition to the model. A shared weight is written once.

    Whenever the process ends, the directory has the new weights or the old ones: files are written under other names
    and synced, and one rename or removal makes them count. Other files in the directory stay. The configuration of a
    `transformers` model is saved too, before its weights.

    If ranks train the model (`chunkc.distribute`), all of them call this. Rank 0 writes, with one whole tensor at a
    time in memory, and the others send it their shards. Buffers are those of rank 0.

    Args:
        model: compiled or not.
        path: a directory, which is made if needed; or a file with a name that ends in `.safetensors`.
        max_shard_size: largest size of a directory's files: bytes, or text such as `"5GB"`. A larger tensor has a file
            of its own.

    Raises:
        FileError: the files cannot be written; weights that were saved there before are unchanged.
        UnsupportedError: the `state_dict` has an entry that safetensors files cannot hold.
        OptionsError: the size is not valid.
        DistributedError: a rank is gone, or calls something else.
    """
    limit = parse_size(max_shard_size, "max_shard_size") if isinstance(max_shard_size, str) else max_shard_size
    if limit < 1:
        raise OptionsError(f"max_shard_size is {max_shard_size!r}; a file holds at least one byte")
    module, target = weights_module(model), Path(path)
    sessions, transport = sessions_of(module.parameters()), transport_of_module(module)
    is_file = target.suffix == ".safetensors"
    whole = partial(whole_on_first, transport=transport)

    def write() -> None:
        if is_file:
            _write(target, shards[0], whole)
        else:
            target.mkdir(parents=True, exist_ok=True)
            _save_configuration(module, target)
            _write_directory(target, shards, whole)

    try:
        with all_entered(sessions):
            for session in sessions:
                session.store.updates.finish()
            entries = module.state_dict().items()
            found = {plain(name): safetensors.check_storable(name, value) for name, value in entries}
            tensors = _tensors_of(module, found)
            shards = [tensors] if is_file else _sharded(tensors, limit)
            names = together(transport, SAVE, lambda: list(map(safetensors.in_order, shards)), FileError)[0]
            if transport is not None and transport.rank != 0:
                send_to_first([found[name] for shard in names for name in shard], transport)
            is_writer = transport is None or transport.rank == 0
            together(transport, SAVE, write if is_writer else lambda: None, FileError)
    except OSError as error:
        raise FileError(
            f"cannot save to {path}: {error.strerror or error}; weights that were saved there before are unchanged"
        ) from error


def _tensors_of(module: nn.Module, found: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Select the entries to save: of several names of one tensor, the first that `transformers` does not call tied."""
    secondary = getattr(module, "all_tied_weights_keys", None) or getattr(module, "_tied_weights_keys", None) or ()
    kept: dict[tuple[Any, ...], str] = {}
    for name, tensor in found.items():
        key = place_of(tensor) if tensor.numel() else (name,)
        if key not in kept or (kept[key] in secondary and name not in secondary):
            kept[key] = name
    names = set(kept.values())
    return {name: tensor for name, tensor in found.items() if name in names}


def _sharded(tensors: Mapping[str, torch.Tensor], limit_nbytes: int) -> list[dict[str, torch.Tensor]]:
    """Split the tensors, in order, into files of at most `limit_nbytes`, or of one larger tensor."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    room = limit_nbytes
    for name, tensor in tensors.items():
        if tensor.nbytes > room and shards[-1]:
            shards.append({})
            room = limit_nbytes
        shards[-1][name] = tensor
        room -= tensor.nbytes
    return shards


def _write_directory(directory: Path, shards: Sequence[Mapping[str, torch.Tensor]], whole: Whole) -> None:
    """Write all files. Readers see the new ones from one rename or removal on; then former shards are removed."""
    if len(shards) == 1:
        names: list[str] = []
        _write(directory / SINGLE, shards[0], whole)  # readers prefer it to an index
        (directory / INDEX).unlink(missing_ok=True)
    else:
        names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
        if any((directory / name).exists() for name in names):
            # Not over former shards: the index may name them until it is replaced.
            names = [name.replace("model-", f"model-{secrets.token_hex(4)}-", 1) for name in names]
        for name, shard in zip(names, shards, strict=True):
            _write(directory / name, shard, whole)
        total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
        weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
        with _replacing(directory / INDEX) as file:
            file.write(text.encode())
        (directory / SINGLE).unlink(missing_ok=True)  # after the index: readers prefer this file to it
    _sync_directory(directory)
    for other in directory.iterdir():
        if _SHARD.fullmatch(other.name) and other.name not in names:
            other.unlink()


def _write(path: Path, tensors: Mapping[str, torch.Tensor], whole: Whole) -> None:
    with _replacing(path) as file:
        safetensors.write(file, tensors, whole)


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a new file that replaces `path` when all of it is on the disk; an error removes it instead."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.saving")
    try:
        with aside.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _save_configuration(module: nn.Module, directory: Path) -> None:
    """Save the configuration of a `transformers` model as its own `save_pretrained` does; of other models nothing."""
    config: Any = getattr(module, "config", None)
    if not hasattr(config, "save_pretrained"):
        return
    config = copy.deepcopy(config)
    config.architectures = [type(module).__name__]
    dtype = getattr(module, "dtype", None)
    if isinstance(dtype, torch.dtype):
        config.dtype = str(dtype).removeprefix("torch.")
    generation: Any = getattr(module, "generation_config", None)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".", suffix=".saving") as aside:
        for part in (config, generation):
            if hasattr(part, "save_pretrained"):
                part.save_pretrained(aside)
        for written in Path(aside).iterdir():
            written.replace(directory / written.name)
