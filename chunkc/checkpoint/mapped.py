"""Map a safetensors file (see `chunkc.weights.safetensors`) as tensors, whatever their alignment in the file is."""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from dataclasses import dataclass

import numpy as np
import torch

from chunkc.ir.errors import CheckpointError
from chunkc.kernels.host_memory import host_empty
from chunkc.weights.safetensors import NAMES

_MAX_HEADER_NBYTES = 100_000_000
"""Limit of the safetensors library."""

_DTYPES = {name: dtype for dtype, name in NAMES.items()}


@dataclass(frozen=True)
class Mapped:
    """A tensor in a mapped file; `offset_nbytes` counts from the beginning of the file."""

    memory: mmap.mmap
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset_nbytes: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def tensor(self) -> torch.Tensor:
        """Return a tensor over the file's pages, or a copy if it is not aligned to its elements.

        Pages are read when used, and writes to the tensor stay in memory.
        """
        if self.nbytes == 0:
            return torch.empty(self.shape, dtype=self.dtype, device="cpu")
        flat = torch.frombuffer(self.memory, dtype=torch.uint8, count=self.nbytes, offset=self.offset_nbytes)
        if self.offset_nbytes % self.dtype.itemsize:
            room = host_empty((self.nbytes,), torch.uint8)
            np.copyto(room.numpy(), flat.numpy())
            flat = room
        return flat.view(self.dtype).view(self.shape)


def mapped(fd: int, title: str) -> dict[str, Mapped]:
    """Map the tensors of a safetensors file, by name.

    Args:
        fd: of a regular file; may be closed afterwards.
        title: the file's name in errors.

    Raises:
        CheckpointError: it is not a safetensors file, or its tensors do not fill it exactly.
    """
    nbytes = os.fstat(fd).st_size
    if nbytes < 8:
        raise CheckpointError(f"{title} has {nbytes} bytes, which is no safetensors file")
    memory = mmap.mmap(fd, nbytes, access=mmap.ACCESS_COPY)
    try:
        return _entries(memory, nbytes)
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise CheckpointError(f"{title} has a header that is none of a safetensors file: {error}") from error


def _entries(memory: mmap.mmap, nbytes: int) -> dict[str, Mapped]:
    (header_nbytes,) = struct.unpack("<Q", memory[:8])
    if header_nbytes > min(_MAX_HEADER_NBYTES, nbytes - 8):
        raise ValueError(f"it would be {header_nbytes} bytes long")
    content = json.loads(memory[8 : 8 + header_nbytes])
    found: dict[str, Mapped] = {}
    end_nbytes = begin_nbytes = 8 + header_nbytes
    for name, about in content.items():
        if name == "__metadata__":
            continue
        first, last = about["data_offsets"]  # in bytes after the header; `last` is exclusive
        entry = Mapped(memory, _DTYPES[about["dtype"]], tuple(about["shape"]), begin_nbytes + first)
        if entry.offset_nbytes != end_nbytes or last - first != entry.nbytes or min(entry.shape, default=0) < 0:
            raise ValueError(f"{name} would lie at {first} to {last}")
        end_nbytes += entry.nbytes
        found[name] = entry
    if end_nbytes != nbytes:
        raise ValueError(f"its tensors end at {end_nbytes} of {nbytes} bytes")
    return found
