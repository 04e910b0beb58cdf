"""Write a checkpoint to the medium on a thread of its own.

1. Data that any code may change at any time is written; `save` waits for this.
2. Data that only an optimizer's step changes is written; the next step waits for this.
3. Files are synced, and the checkpoint gets its name; only `wait` and the next `save` wait for this.

On several ranks each rank runs one writing thread, and these threads communicate over a separate transport. When all
ranks have written, rank 0 names the checkpoint and sends the name to the other ranks.
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
"""Called with a directory when its files are on the medium: renames it as a complete checkpoint. Returns None, or an
error message about work after that."""


class Writing:
    """A thread that writes one checkpoint.

    Args:
        path: an empty directory, removed if the checkpoint does not become complete.
        files: in the order of `checkpoint.placement`. The list is emptied, so that tensors are held no longer than
            needed.
        finish: called on rank 0 when everything is on the medium.
        transport: of the ranks that save; None: this process saves alone.
    """

    def __init__(
        self, path: Path, step: int, files: list[FileToWrite], finish: Finish, transport: Transport | None = None
    ) -> None:
        self._path, self._step, self._files, self._finish = path, step, files, finish
        self._transport, self._is_first = transport, transport is None or transport.rank == 0
        self._late: str | None = None  # why work after the commit failed
        # Sources that are not guarded and not yet written: `start` waits for these.
        self._num_open = sum(not source.is_guarded for file in files for source in file.sources)
        self._open_written, self._all_read = threading.Event(), threading.Event()
        self._problem: BaseException | None = None
        # Not a daemon: when the interpreter ends, also by Ctrl-C, it waits for the checkpoint.
        self._thread = threading.Thread(target=self._run, name=f"chunkc checkpoint {step}")

    def start(self, parameters: Iterable[torch.Tensor]) -> None:
        """Start the thread, and block until only data that an optimizer's step changes is left to write.

        Args:
            parameters: their optimizer steps wait until everything has been read.

        Raises:
            CheckpointError: the thread cannot be started; nothing is left of the checkpoint.
        """
        try:
            self._thread.start()
        except RuntimeError as error:
            self._refuse(error)
            self._remove()
            raise _named(error, self._step, self._path) from error
        finally:  # also on Ctrl-C: once the thread runs, steps must wait for it
            if self._thread.ident is not None:
                declare_reader(parameters, self._all_read)
        self._open_written.wait()

    def finish(self) -> None:
        """Block until the checkpoint is complete.

        Raises:
            CheckpointError: it could not be saved, and nothing is left of it; or it is complete, but older checkpoints
                could not be removed.
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
            logger.error("%s", _named(error, self._step, self._path))  # `finish` raises it too, but may never be called
        finally:
            del self._finish  # it holds the Checkpoint, and with it the directory's lock

    def _refuse(self, problem: BaseException) -> None:
        """Tell the other ranks that this one cannot write; their threads then raise the problem."""

        def refuse() -> None:
            raise problem

        with suppress(type(problem)):
            self._together(refuse)

    def _together(self, action: Callable[[], T]) -> list[T]:
        phase = f"writing the checkpoint of step {self._step}"
        return together(self._transport, phase, action, CheckpointError, CHECKPOINTS)

    def _write_files(self) -> dict[str, list[Piece]]:
        """Write this rank's files, and return their pieces when all are on the medium; release waiters in any case."""
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
            self._all_read.set()  # before fsync, which takes long and reads no tensors: steps may go on
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
            source.check()  # after the last read: a change before it may be in the file
            if not source.is_guarded:
                self._num_open -= 1
                if self._num_open == 0:
                    self._open_written.set()
        return pieces

    def _complete(self, written: Sequence[Mapping[str, list[Piece]]]) -> str | None:
        """Write the manifest and name the checkpoint; rank 0 does this after every rank has written.

        Args:
            written: pieces by file name, from each rank.
        """
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
        """Remove the unfinished checkpoint, on rank 0."""
        if self._is_first:
            shutil.rmtree(self._path, ignore_errors=True)


def _let_go(error: BaseException | None) -> None:
    """Clear the frames of an error and its contexts: while the error is referenced, they hold views of parameters."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def _new_file(path: Path) -> int:
    """Open a file for writing in the checkpoint's new directory; another rank may have made the file already.

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
    """Write this rank's block of a tensor, run by run; the whole tensor begins at `offset_nbytes` in the file."""
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
    """Write all bytes at the file's position; return their number and their CRC-32."""
    left = content
    while left:
        moved = os.write(fd, left)
        if not moved:
            raise OSError(errno.EIO, "nothing more can be written")
        left = left[moved:]
    return len(content), zlib.crc32(content)


def _named(problem: BaseException, step: int, path: Path) -> CheckpointError:
    """Make the user's error for a checkpoint that could not be saved."""
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
