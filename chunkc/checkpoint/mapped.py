"""Tensors over the pages of a safetensors file, wherever its header may say (see `chunkc.weights.safetensors`)."""

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
"""As in the package."""

_DTYPES = {name: dtype for dtype, name in NAMES.items()}


@dataclass(frozen=True)
class Entry:
    """A tensor in a file: `offset_nbytes` from the beginning of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset_nbytes: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class MappedFile:
    """A safetensors file as tensors over its pages: nothing is read before it is used, and writes stay in memory.

    Args:
        fd: of a regular file; may be closed afterwards.
        title: for errors.

    Raises:
        CheckpointError: it is no such file, or says that tensors lie where they cannot.
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
        """A tensor of the file, over its pages where they are aligned to its elements.

        Raises:
            CheckpointError: there is none of that name.
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
    """Files as one: where several have a tensor of a name, that of the last counts."""

    def __init__(self, files: Sequence[MappedFile]) -> None:
        self._of = {key: file for file in files for key in file.entries}
        self.entries = {key: file.entries[key] for key, file in self._of.items()}

    def tensor(self, name: str) -> torch.Tensor:
        """Read a tensor by name, as a `MappedFile` does."""
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
        first, last = about["data_offsets"]
        entry = Entry(_DTYPES[about["dtype"]], tuple(about["shape"]), begin_nbytes + first)
        if entry.offset_nbytes != end_nbytes or last - first != entry.nbytes or min(entry.shape, default=0) < 0:
            raise ValueError(f"{name} would lie at {first} to {last}")
        end_nbytes += entry.nbytes
        found[name] = entry
    if end_nbytes != nbytes:
        raise ValueError(f"its tensors end at {end_nbytes} of {nbytes} bytes")
    return found
