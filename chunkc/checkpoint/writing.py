"""A checkpoint on its way to the medium, on a thread of its own.

Data that any code may change at any time is written first: `save` waits for that. Then data that only an optimizer's
step changes: the next step waits for that. Then both go on, while the medium is waited for and the checkpoint gets its
name.

Where ranks save together, each has such a thread, and these meet by messages of their own: when all have written, rank
0 names the checkpoint, and tells the others.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
import traceback
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import torch

from chunkc.checkpoint.checksums import Piece, joined
from chunkc.checkpoint.manifest import NAME, Manifest
from chunkc.checkpoint.placement import FileToWrite
from chunkc.checkpoint.sources import Source
from chunkc.distributed.agreement import together
from chunkc.ir.errors import CheckpointError
from chunkc.runtime.distributed.transport import CHECKPOINTS, Transport
from chunkc.session.pending_readers import declare_reader

T = TypeVar("T")

logger = logging.getLogger(__name__)

Finish = Callable[[Path], str | None]
"""Gives its name to a directory with all files on the medium. Returns what failed then, though the checkpoint is
complete."""


class Writing:
    """The thread that writes one checkpoint.

    Args:
        path: an empty directory, which goes again if the checkpoint does not become complete.
        files: as `checkpoint.placement` orders them. The list is emptied, so that tensors are held no longer than
            needed.
        finish: called when everything is on the medium, by rank 0.
        transport: by which ranks meet that save together; None: one process saves alone.
    """

    def __init__(
        self, path: Path, step: int, files: list[FileToWrite], finish: Finish, transport: Transport | None = None
    ) -> None:
        self._path, self._step, self._files, self._finish = path, step, files, finish
        self._transport, self._is_first = transport, transport is None or transport.rank == 0
        self._late: str | None = None
        self._num_open = sum(not source.is_guarded for file in files for source in file.sources)
        self._open_written, self._all_read = threading.Event(), threading.Event()
        self._problem: BaseException | None = None
        # No daemon: an interpreter that ends, on Ctrl-C too, waits for the checkpoint.
        self._thread = threading.Thread(target=self._run, name=f"chunkc checkpoint {step}")

    def start(self, parameters: Iterable[torch.Tensor]) -> None:
        """Begin, and return when nothing is left to write but what an optimizer's step changes.

        Args:
            parameters: optimizer steps of these wait until everything has been read.

        Raises:
            CheckpointError: there is no thread to be had; nothing is left of the checkpoint.
        """
        try:
            self._thread.start()
        except RuntimeError as error:
            self._refuse(error)
            self._remove()
            raise _named(error, self._step, self._path) from error
        finally:
            if self._thread.ident is not None:
                declare_reader(parameters, self._all_read)
        self._open_written.wait()

    def finish(self) -> None:
        """Block until the checkpoint is complete.

        Raises:
            CheckpointError: it will never be, and nothing is left of it; or it is, but older ones could not be removed.
        """
        if self._thread.ident is not None:
            self._thread.join()
        if self._problem is not None:
            raise _named(self._problem, self._step, self._path)
        if self._late is not None:
            raise CheckpointError(self._late)

    def _run(self) -> None:
        try:
            written = self._together(self._write_files)
            (self._late, *_) = self._together(lambda: self._complete(written) if self._is_first else None)
        except BaseException as error:
            self._remove()
            self._problem = error
            logger.error(
                "%s", _named(error, self._step, self._path)
            )  # a waiting caller gets it, too; there may be none
        finally:
            del self._finish  # which keeps the directory's lock, and may be the last to do so

    def _refuse(self, problem: BaseException) -> None:
        """Tell the other ranks that this one writes nothing."""

        def refuse() -> None:
            raise problem

        with suppress(type(problem)):
            self._together(refuse)

    def _together(self, action: Callable[[], T]) -> list[T]:
        phase = f"writing the checkpoint of step {self._step}"
        return together(self._transport, phase, action, CheckpointError, CHECKPOINTS)

    def _write_files(self) -> dict[str, list[Piece]]:
        """Write this rank's files, and return their pieces once all are on the medium; always releases waiting
        threads."""
        try:
            return self._write_each()
        except BaseException as error:
            self._files.clear()
            _let_go(error)
            raise
        finally:
            self._open_written.set()
            self._all_read.set()

    def _write_each(self) -> dict[str, list[Piece]]:
        descriptors: list[int] = []
        try:
            written: dict[str, list[Piece]] = {}
            while self._files:
                file = self._files.pop(0)
                descriptors.append(_new_file(self._path / file.name))
                written[file.name] = self._write_file(descriptors[-1], file)
                del file
            self._all_read.set()
            for fd in descriptors:
                os.fsync(fd)
            return written
        finally:
            for fd in descriptors:
                os.close(fd)

    def _write_file(self, fd: int, file: FileToWrite) -> list[Piece]:
        pieces = [Piece(0, *_write_all(fd, memoryview(file.beginning)))] if file.beginning else []
        for source, offset_nbytes in zip(file.sources, file.offsets, strict=True):
            pieces.append(_write_runs(fd, source, offset_nbytes))
            assert pieces[-1].nbytes == source.nbytes, source.key
            source.check()
            if not source.is_guarded:
                self._num_open -= 1
                if self._num_open == 0:
                    self._open_written.set()
        return pieces

    def _complete(self, written: Sequence[Mapping[str, list[Piece]]]) -> str | None:
        """Rank 0's last work, when every rank has written: the manifest, and the name."""
        names = dict.fromkeys(name for of_rank in written for name in of_rank)
        files = {name: joined(piece for of_rank in written for piece in of_rank.get(name, ())) for name in names}
        fd = _new_file(self._path / NAME)
        try:
            _write_all(fd, memoryview(Manifest(self._step, files).render()))
            os.fsync(fd)
        finally:
            os.close(fd)
        return self._finish(self._path)

    def _remove(self) -> None:
        """Leave nothing of the checkpoint; rank 0 does, when no other rank writes any more."""
        if self._is_first:
            shutil.rmtree(self._path, ignore_errors=True)


def _let_go(error: BaseException | None) -> None:
    """Clear what the frames of an error hold: views of parameters, for as long as the error is referenced."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def _new_file(path: Path) -> int:
    """A file to write, which another rank may have made already; the directory is new.

    Raises:
        CheckpointError: the directory is gone.
    """
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path.parent} was removed while it was being written: by rank 0, where another rank has failed or ended, "
            "or by another program"
        ) from None


def _write_runs(fd: int, source: Source, offset_nbytes: int) -> Piece:
    """Write what this rank has of a tensor that begins there: run by run, each where it is in the whole."""
    written, runs, left_nbytes = Piece(offset_nbytes, 0, 0), source.runs(), 0
    for content in source.pieces():
        rest = content
        while rest:
            if not left_nbytes:
                begin_nbytes, left_nbytes = offset_nbytes + next(runs), source.run_nbytes
                os.lseek(fd, begin_nbytes, os.SEEK_SET)
            now, rest = rest[:left_nbytes], rest[left_nbytes:]
            written = written.followed_by(Piece(begin_nbytes, *_write_all(fd, now)))
            begin_nbytes += len(now)
            left_nbytes -= len(now)
    return written


def _write_all(fd: int, content: memoryview) -> tuple[int, int]:
    """Write all bytes; how many they are, and their checksum."""
    left = content
    while left:
        moved = os.write(fd, left)
        if not moved:
            raise OSError(errno.EIO, "nothing more can be written")
        left = left[moved:]
    return len(content), zlib.crc32(content)


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
