"""List a checkpoint's files with checksums: `manifest.json`, written last, and read before anything else.

A manifest's bytes are determined by its content. Reading compares them with what would be written, so any changed byte
is detected. Checksums are CRC-32: they detect accidents at the speed of memory. They do not protect from forgery, nor
need they: nothing in a checkpoint is ever executed, and no name in it leads out of its directory.
"""

from __future__ import annotations

import json
import os
import re
import stat
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from chunkc.ir.errors import CheckpointError

NAME = "manifest.json"
FORMAT = 1
"""Version of the format; increased when older versions of chunkc could no longer read it."""

_MAX_NBYTES = 64 << 20
_BLOCK_NBYTES = 4 << 20
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}")


@dataclass(frozen=True)
class File:
    """Expected size and checksum of a checkpoint's file."""

    nbytes: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's step, and its files by name."""

    step: int
    files: Mapping[str, File]

    def render(self) -> bytes:
        """Return the manifest's bytes."""
        files = {name: {"nbytes": file.nbytes, "crc32": f"{file.crc32:08x}"} for name, file in self.files.items()}
        content = {"format": FORMAT, "step": self.step, "files": files}
        checksum = zlib.crc32(json.dumps(content, sort_keys=True).encode())
        return json.dumps(content | {"crc32": f"{checksum:08x}"}, indent=1, sort_keys=True).encode() + b"\n"


def is_plain_name(name: object) -> bool:
    """Whether a name can only be of a file in the checkpoint's directory: no separator, no `..`, not hidden."""
    return isinstance(name, str) and _PLAIN_NAME.fullmatch(name) is not None


def read_manifest(folder_fd: int) -> Manifest:
    """Read the manifest of an open checkpoint directory.

    Raises:
        CheckpointError: it is missing, damaged, or of a newer format.
    """
    with opened(folder_fd, NAME) as fd:
        text = os.pread(fd, _MAX_NBYTES + 1, 0)
    try:
        content = json.loads(text)
        version = content["format"]
        files = {name: File(file["nbytes"], int(file["crc32"], 16)) for name, file in content["files"].items()}
        manifest = Manifest(content["step"], files)
        is_whole = version == FORMAT and manifest.render() == text
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{NAME} is damaged ({type(error).__name__})") from error
    if isinstance(version, int) and version > FORMAT:
        raise CheckpointError(f"{NAME} is of format {version}, and this chunkc reads up to {FORMAT}; use a newer one")
    if not is_whole:
        raise CheckpointError(f"{NAME} is damaged: its checksum is not of what it says")
    for name in manifest.files:
        if not is_plain_name(name):
            raise CheckpointError(f"{NAME} names the file {name!r}, which is not in the checkpoint's directory")
    return manifest


def verify(folder_fd: int, files: Mapping[str, File]) -> None:
    """Compare the sizes and checksums of a checkpoint's files with the manifest's.

    Raises:
        CheckpointError: a file is missing or damaged; the message names it.
    """
    for name, file in files.items():
        with opened(folder_fd, name) as fd:
            nbytes, crc32 = os.fstat(fd).st_size, 0
            if nbytes != file.nbytes:
                raise CheckpointError(f"{name} has {nbytes} bytes instead of {file.nbytes}")
            room = bytearray(min(_BLOCK_NBYTES, max(nbytes, 1)))
            at = 0
            while moved := os.preadv(fd, [room], at):
                crc32 = zlib.crc32(memoryview(room)[:moved], crc32)
                at += moved
        if crc32 != file.crc32:
            raise CheckpointError(f"{name} is damaged: its checksum is {crc32:08x} instead of {file.crc32:08x}")


@contextmanager
def opened(folder_fd: int, name: str) -> Iterator[int]:
    """Open a regular file in an open directory, and give its descriptor.

    Raises:
        CheckpointError: there is none, it is a link or another kind of file, or reading it failed inside the context.
    """
    if not is_plain_name(name):
        raise CheckpointError(f"the file {name!r} is not in the checkpoint's directory")
    try:
        # O_NONBLOCK: opening a FIFO would wait for its writer.
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder_fd)
    except OSError as error:
        problem = "a symbolic link" if _is_link(folder_fd, name) else str(error.strerror)
        raise CheckpointError(f"{name} cannot be read: {problem}") from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise CheckpointError(f"{name} is no regular file")
        yield fd
    except OSError as error:
        raise CheckpointError(f"{name} cannot be read: {error.strerror}") from error
    finally:
        os.close(fd)


def _is_link(folder_fd: int, name: str) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=folder_fd, follow_symlinks=False).st_mode)
    except OSError:
        return False
