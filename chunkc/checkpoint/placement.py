"""Assign bytes of files to the ranks that write them.

A checkpoint of several ranks has the files of a single process, and a few more. Sharded parameters and states are whole
in these files: a shard is one range of bytes if it has whole rows and several ranges otherwise, and each rank writes
its own. So any number of ranks can load them, and any program that reads safetensors. What each rank has by itself
(buffers, generators, the position in its data) is in the same files for rank 0, and in files of their own for others.
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
    """Bytes of a file that this rank writes.

    Attributes:
        beginning: the file's first bytes, such as a header; empty if rank 0 writes them.
        sources: tensors, or this rank's blocks of them.
        offsets: where the whole tensor of each source begins in the file, in bytes.
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
    """Place of a whole tensor in a file."""

    offset_nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype


FileTensors = Mapping[tuple[str, str], FileTensor]
"""Places of sharded tensors, by file and key."""


def of_rank(rank: int, name: str) -> str:
    """Return the name of a rank's own file; rank 0's has no prefix."""
    return f"rank-{rank}.{name}" if rank else name


def is_of_a_rank(name: str) -> bool:
    """Whether a file is another rank's own, and not of rank 0."""
    return name.startswith("rank-")


def files_of(sources: Sequence[Source]) -> tuple[list[FileToWrite], dict[tuple[str, str], FileTensor]]:
    """Lay out the files of rank 0's sources; return them, and the places of sharded tensors in them.

    Files without guarded sources come first, and in each file the sources that are not guarded: `save` waits for these.

    Raises:
        UnsupportedError: two tensors have the same name, or a name or dtype is impossible in safetensors files.
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
    """Lay out the files of another rank's sources: its own files, then its shards in the files of rank 0.

    Raises:
        CheckpointError: sharded tensors differ in name, shape or dtype from those of rank 0.
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
