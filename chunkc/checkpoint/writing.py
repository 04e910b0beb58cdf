"""A checkpoint on its way to the medium, on a thread of its own.

First all that anybody may change at any time is written: `save` waits for that. Then what only an optimizer's step
changes: the next step waits for that. Then both go on, while the medium is waited for and the checkpoint gets its name.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
import traceback
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from chunkc.checkpoint.manifest import NAME, File, Manifest
from chunkc.checkpoint.sources import Source
from chunkc.files.safetensors import header_of
from chunkc.ir.errors import CheckpointError
from chunkc.readers import declare_reader

logger = logging.getLogger(__name__)

Finish = Callable[[Path], None]
"""What is done with a directory whose files are all on the medium: it gets its name."""


@dataclass(frozen=True)
class FileToWrite:
    """A file's bytes: a beginning, and then tensors in this order."""

    name: str
    beginning: bytes
    sources: tuple[Source, ...] = ()


def files_of(sources: Sequence[Source]) -> list[FileToWrite]:
    """The files of all sources: first those without anything guarded; what is not guarded comes first in each."""
    by_file: dict[str, list[Source]] = {}
    for source in sorted(sources, key=lambda source: source.is_guarded):
        by_file.setdefault(source.file, []).append(source)
    ordered = sorted(by_file.items(), key=lambda item: item[1][-1].is_guarded)
    return [
        FileToWrite(name, header_of([(s.key, s.dtype, s.shape) for s in of_file]), tuple(of_file))
        for name, of_file in ordered
    ]


class Writing:
    """The thread that writes one checkpoint.

    Args:
        path: an empty directory, which goes again if the checkpoint does not become complete.
        files: as `files_of` orders them. The list is emptied: nobody holds tensors longer than it takes.
        finish: called when everything is on the medium.
    """

    def __init__(self, path: Path, step: int, files: list[FileToWrite], finish: Finish) -> None:
        self._path, self._step, self._files, self._finish = path, step, files, finish
        self._num_open = sum(not source.is_guarded for file in files for source in file.sources)
        self._open_written, self._all_read = threading.Event(), threading.Event()
        self._problem: BaseException | None = None
        # No daemon: an interpreter that ends, on Ctrl-C too, waits for the checkpoint.
        self._thread = threading.Thread(target=self._run, name=f"chunkc checkpoint {step}")

    def start(self, parameters: Iterable[torch.Tensor]) -> None:
        """Begin, and return when nothing is left to write but what an optimizer's step changes.

        Args:
            parameters: whose steps wait until everything has been read.

        Raises:
            CheckpointError: there is no thread to be had; nothing is left of the checkpoint.
        """
        try:
            self._thread.start()
        except RuntimeError as error:
            shutil.rmtree(self._path, ignore_errors=True)
            raise _named(error, self._step, self._path) from error
        finally:
            if self._thread.ident is not None:
                declare_reader(parameters, self._all_read)
        self._open_written.wait()

    def finish(self) -> None:
        """Block until the checkpoint is complete.

        Raises:
            CheckpointError: it will never be; nothing is left of it.
        """
        if self._thread.ident is not None:
            self._thread.join()
        if self._problem is not None:
            raise _named(self._problem, self._step, self._path)

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:
            shutil.rmtree(self._path, ignore_errors=True)
            self._files.clear()
            _let_go(error)
            self._problem = error
            logger.error("%s", _named(error, self._step, self._path))  # whoever waits is told, too; maybe nobody does
        finally:
            del self._finish  # which keeps the directory's lock, and may be the last to do so
            self._open_written.set()
            self._all_read.set()

    def _write(self) -> None:
        descriptors: list[int] = []
        try:
            written: dict[str, File] = {}
            while self._files:
                file = self._files.pop(0)
                descriptors.append(_new_file(self._path / file.name))
                written[file.name] = self._write_file(descriptors[-1], file)
                del file
            self._all_read.set()
            for fd in descriptors:
                os.fsync(fd)
            descriptors.append(_new_file(self._path / NAME))
            _write_all(descriptors[-1], [memoryview(Manifest(self._step, written).render())])
            os.fsync(descriptors[-1])
        finally:
            for fd in descriptors:
                os.close(fd)
        self._finish(self._path)

    def _write_file(self, fd: int, file: FileToWrite) -> File:
        nbytes, crc32 = _write_all(fd, [memoryview(file.beginning)])
        for source in file.sources:
            added_nbytes, crc32 = _write_all(fd, source.pieces(), crc32)
            assert added_nbytes == source.nbytes, source.key
            nbytes += added_nbytes
            source.check()
            if not source.is_guarded:
                self._num_open -= 1
                if self._num_open == 0:
                    self._open_written.set()
        return File(nbytes, crc32)


def _let_go(error: BaseException | None) -> None:
    """Clear what the frames of an error hold: views of parameters, for as long as anybody has the error."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def _new_file(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)


def _write_all(fd: int, pieces: Iterable[memoryview], crc32: int = 0) -> tuple[int, int]:
    """Write pieces one after the other; their bytes, and the checksum that begins with `crc32`."""
    nbytes = 0
    for piece in pieces:
        left = piece
        while left:
            moved = os.write(fd, left)
            if not moved:
                raise OSError(errno.EIO, "nothing more can be written")
            crc32 = zlib.crc32(left[:moved], crc32)
            left = left[moved:]
        nbytes += len(piece)
    return nbytes, crc32


def _named(problem: BaseException, step: int, path: Path) -> CheckpointError:
    """The error of a checkpoint that did not become complete, for its user."""
    what = f"the checkpoint of step {step} was not saved to {path.parent}"
    if isinstance(problem, OSError):
        text = f"{what}: {problem.strerror or problem}"
        if problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            text += "; make room, or keep fewer checkpoints"
        text += ". Those saved before are as they were"
    else:
        text = f"{what}: {problem}"
    error = CheckpointError(text)
    error.__cause__ = problem
    return error
