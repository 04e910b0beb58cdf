"""Map a safetensors file (see `chunkc.weights.safetensors`) as tensors, whatever their alignment in the file is."""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from chunkc.ir.errors import CheckpointError
from chunkc.kernels.fused_pass import host_empty
from chunkc.weights.safetensors import NAMES

_MAX_HEADER_NBYTES = 100_000_000
"""Limit of the safetensors library."""

_DTYPES = {name: dtype for dtype, name in NAMES.items()}


@dataclass(frozen=True)
class Entry:
    """A tensor in a file; `offset_nbytes` counts from the beginning of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset_nbytes: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class MappedFile:
    """A safetensors file as tensors over its pages: pages are read when used, and writes to tensors stay in memory.

    Args:
        fd: of a regular file; may be closed afterwards.
        title: the file's name in errors.

    Raises:
        CheckpointError: it is not a safetensors file, or its tensors do not fill it exactly.
    """

    def __init__(self, fd: int, title: str) -> None:
        nbytes = os.fstat(fd).st_size
        if nbytes < 8:
            raise CheckpointError(f"{title} has {nbytes} bytes, which is no safetensors file")
        self._memory = mmap.mmap(fd, nbytes, access=mmap.ACCESS_COPY)
        try:
            self.entries = _entries(self._memory, nbytes)
        except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
            raise CheckpointError(f"{title} has a header that is none of a safetensors file: {error}") from error

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor over the file's pages, or a copy if it is not aligned to its elements.

        Raises:
            CheckpointError: the file has no tensor of that name.
        """
        entry = self.entries.get(name)
        if entry is None:
            raise CheckpointError(f"the checkpoint has no {name}")
        if entry.nbytes == 0:
            return torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        flat = torch.frombuffer(self._memory, dtype=torch.uint8, count=entry.nbytes, offset=entry.offset_nbytes)
        if entry.offset_nbytes % entry.dtype.itemsize:
            room = host_empty((entry.nbytes,), torch.uint8)
            np.copyto(room.numpy(), flat.numpy())
            flat = room
        return flat.view(entry.dtype).view(entry.shape)


class Overlaid:
    """Several files as one; of tensors with the same name, that of the last file counts."""

    def __init__(self, files: Sequence[MappedFile]) -> None:
        self._of = {key: file for file in files for key in file.entries}
        self.entries = {key: file.entries[key] for key, file in self._of.items()}

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor as `MappedFile.tensor` does.

        Raises:
            CheckpointError: no file has a tensor of that name.
        """
        if name not in self._of:
            raise CheckpointError(f"the checkpoint has no {name}")
        return self._of[name].tensor(name)


def _entries(memory: mmap.mmap, nbytes: int) -> dict[str, Entry]:
    (header_nbytes,) = struct.unpack("<Q", memory[:8])
    if header_nbytes > min(_MAX_HEADER_NBYTES, nbytes - 8):
        raise ValueError(f"it would be {header_nbytes} bytes long")
    content = json.loads(memory[8 : 8 + header_nbytes])
    found: dict[str, Entry] = {}
    end_nbytes = begin_nbytes = 8 + header_nbytes
    for name, about in content.items():
        if name == "__metadata__":
            continue
        first, last = about["data_offsets"]  # in bytes after the header; `last` is exclusive
        entry = Entry(_DTYPES[about["dtype"]], tuple(about["shape"]), begin_nbytes + first)
        if entry.offset_nbytes != end_nbytes or last - first != entry.nbytes or min(entry.shape, default=0) < 0:
            raise ValueError(f"{name} would lie at {first} to {last}")
        end_nbytes += entry.nbytes
        found[name] = entry
    if end_nbytes != nbytes:
        raise ValueError(f"its tensors end at {end_nbytes} of {nbytes} bytes")
    return found
