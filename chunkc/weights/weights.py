"""Map tensors from files of weights; pages are read when a tensor is read."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from chunkc.ir.errors import FileError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""Names in a Hugging Face directory: one file of weights, or the index of several. If both exist, the file counts."""

_IN_DIRECTORIES = (SINGLE, INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")


def tensors_in(path: Path) -> dict[str, torch.Tensor]:
    """Map the tensors of a file, of an index of files, or of a directory with one of these, by name.

    Formats: safetensors, and a `state_dict` that `torch.save` wrote, loaded with `weights_only`.

    Raises:
        FileError: there is no such file, or it is in none of these formats.
    """
    try:
        if path.is_dir():
            path = _in_directory(path)
        if path.name.endswith(".index.json"):
            return {name: tensor for part in shards_of(path) for name, tensor in _in_file(part).items()}
        return _in_file(path)
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror or error}") from error


def _in_directory(directory: Path) -> Path:
    for name in _IN_DIRECTORIES:
        if (directory / name).is_file():
            return directory / name
    raise FileError(f"the directory {directory} has none of {', '.join(_IN_DIRECTORIES)}")


def shards_of(index: Path) -> list[Path]:
    """List the files that an index names, which must be in its directory.

    Raises:
        FileError: it is not an index, or names files elsewhere.
        OSError: it cannot be read.
    """
    try:
        names = json.loads(index.read_text())["weight_map"].values()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileError(f'{index} is no index of weights: JSON with a "weight_map" is expected') from error
    for name in (unique := dict.fromkeys(names)):
        if not isinstance(name, str) or Path(name).name != name:
            raise FileError(f"{index} names {name!r}: files of weights lie in the directory of their index")
    return [index.parent / name for name in unique]


def _in_file(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no dictionary
        except SafetensorError as error:
            raise FileError(f"{path} is damaged, or no safetensors file: {error}") from error
    try:
        found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        raise FileError(f"{path} is neither safetensors nor data that torch.save wrote: {error}") from error
    if not isinstance(found, Mapping) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        what = (
            f"entries such as {', '.join(map(repr, list(found)[:3]))}" if isinstance(found, Mapping) else "no mapping"
        )
        raise FileError(
            f"{path} is no `state_dict`, since it has {what}: take the part that is one and give it to "
            "`model.load_state_dict` (`torch.load(..., mmap=True)` keeps it on the disk)"
        )
    return dict(found)
