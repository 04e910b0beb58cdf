"""Assign bytes of files to the ranks that write them.

A checkpoint of several ranks is one of one process, and a few files more. Parameters and states that are cut over ranks
have a file together, in which they are whole: rows of a tensor are a range of bytes, parts of rows are several ranges,
and each rank writes its own. So any number of ranks can load it, and any program that reads safetensors. What each rank
has for itself (buffers, generators, the position in its data) is in the same files for rank 0, and in files of their
own for the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from chunkc.checkpoint.sources import Source
from chunkc.ir.errors import CheckpointError, UnsupportedError
from chunkc.weights.safetensors import header_of


@dataclass(frozen=True)
class FileToWrite:
    """A rank's bytes of a file: a beginning, and tensors, or what this rank has of them.

    Attributes:
        beginning: what stands before all tensors, where this rank writes it.
        offsets: in bytes; where each source's tensor begins in the file.
    """

    name: str
    beginning: bytes
    sources: tuple[Source, ...] = ()
    offsets: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        return len(self.beginning) + sum(source.nbytes for source in self.sources)


@dataclass(frozen=True)
class FileTensor:
    """A whole tensor in a file."""

    offset_nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype


FileTensors = Mapping[tuple[str, str], FileTensor]
"""By file and key."""


def of_rank(rank: int, name: str) -> str:
    """The name of a rank's own file; rank 0's has no prefix."""
    return f"rank-{rank}.{name}" if rank else name


def is_of_a_rank(name: str) -> bool:
    """Whether a file is of a rank for itself, and not of rank 0."""
    return name.startswith("rank-")


def files_of(sources: Sequence[Source]) -> tuple[list[FileToWrite], dict[tuple[str, str], FileTensor]]:
    """The files of all sources of rank 0, and where tensors that are cut over ranks lie in them.

    First come those without anything guarded; what is not guarded comes first in each.

    Raises:
        UnsupportedError: two tensors would have one name, or safetensors files have none for a dtype.
    """
    by_file: dict[str, list[Source]] = {}
    for source in sorted(sources, key=lambda source: source.is_guarded):
        by_file.setdefault(source.file, []).append(source)
    files: list[FileToWrite] = []
    tensors: dict[tuple[str, str], FileTensor] = {}
    for name, of_file in sorted(by_file.items(), key=lambda item: item[1][-1].is_guarded):
        keys = [source.key for source in of_file]
        if len(set(keys)) < len(keys):
            raise UnsupportedError(f"two tensors would be called {next(key for key in keys if keys.count(key) > 1)}")
        header = header_of([(source.key, source.dtype, source.shape) for source in of_file])
        offsets, end = [], len(header)
        for source in of_file:
            offsets.append(end)
            if source.block is not None:
                tensors[name, source.key] = FileTensor(end, source.shape, source.dtype)
            end += source.whole_nbytes
        files.append(FileToWrite(name, header, tuple(of_file), tuple(offsets)))
    return files, tensors


def files_of_other_rank(rank: int, sources: Sequence[Source], tensors: FileTensors) -> list[FileToWrite]:
    """The files of another rank's sources: its own ones, and its shards of tensors that rank 0 has placed.

    Raises:
        CheckpointError: this rank has other tensors than rank 0.
        UnsupportedError: as `files_of`.
    """
    cut = {(source.file, source.key): source for source in sources if source.block is not None}
    here = {where: (source.shape, source.dtype) for where, source in cut.items()}
    there = {where: (tensor.shape, tensor.dtype) for where, tensor in tensors.items()}
    if here != there:
        differing = sorted({*here.items()} ^ {*there.items()}, key=lambda item: item[0])
        raise CheckpointError(f"{differing[0][0][1]} of {differing[0][0][0]} is not alike on this rank and on rank 0")
    own = [replace(source, file=of_rank(rank, source.file)) for source in sources if source.block is None]
    files, _ = files_of(own)
    for name in dict.fromkeys(file for file, _ in cut):
        of_file = [source for source in cut.values() if source.file == name]
        offsets = [tensors[name, source.key].offset_nbytes for source in of_file]
        files.append(FileToWrite(name, b"", tuple(of_file), tuple(offsets)))
    return files
