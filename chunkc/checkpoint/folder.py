"""Manage the directory of a run's checkpoints: lock it, name complete checkpoints, remove old ones.

DIR/step-000000000050/       a complete checkpoint: renamed to this once all its bytes were on the medium
DIR/step-000000000050.1/     the same step, saved again; the newer one counts
DIR/.writing-000000000100/   being written, or left by a process that ended meanwhile
DIR/.removing-.../           being removed
DIR/.lock                    locked by the process that saves
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import socket
import weakref
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from chunkc.ir.errors import CheckpointError
from chunkc.ir.units import format_nbytes

_LOCK = ".lock"
_WRITING, _REMOVING = ".writing-", ".removing-"
_COMPLETE = re.compile(r"step-(\d{12})(?:\.(\d{1,6}))?")

_held: dict[tuple[int, int], Path] = {}
"""Directories that this process saves to, by device and inode. A POSIX lock does not keep out its own process, and ends
when the process closes any descriptor of the file: so this is looked up before the lock file is opened again."""


@dataclass(frozen=True, order=True)
class Complete:
    """A complete checkpoint, ordered by step, then by age: `attempt` counts how often the step was saved before."""

    step: int
    attempt: int

    @property
    def name(self) -> str:
        return f"step-{self.step:012d}" + (f".{self.attempt}" if self.attempt else "")


class Folder:
    """A directory of checkpoints; `lock` creates it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self.release: weakref.finalize | None = None

    def complete(self) -> list[Complete]:
        """List the complete checkpoints, oldest first.

        Raises:
            CheckpointError: the directory cannot be read.
        """
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _error(f"cannot read {self.path}", error) from error
        matches = [match for name in names if (match := _COMPLETE.fullmatch(name))]
        return sorted(Complete(int(match[1]), int(match[2] or 0)) for match in matches)

    def open(self, checkpoint: Complete) -> int:
        """Open a checkpoint's directory and return the descriptor.

        Raises:
            CheckpointError: it is gone, or a symbolic link.
        """
        path = self.path / checkpoint.name
        try:
            return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError as error:
            if os.path.islink(path):
                raise CheckpointError("it is a symbolic link, which may lead anywhere") from error
            raise _error("it cannot be opened", error) from error

    def lock(self) -> None:
        """Lock the directory until `unlock` or the object's end, and remove unfinished checkpoints.

        Raises:
            CheckpointError: another object or process holds the lock, or the directory cannot be written.
        """
        if self.release is not None:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            about = os.stat(self.path)
            key = about.st_dev, about.st_ino
            if key in _held:
                raise CheckpointError(
                    f"another Checkpoint of this process saves to {self.path}; use one object, or close() the other"
                )
            fd = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise _error(f"cannot save to {self.path}", error) from error
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        except OSError as error:
            holder = os.pread(fd, 200, 0).decode(errors="replace") or "another process"
            os.close(fd)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise CheckpointError(f"{holder} saves to {self.path} already; use another directory") from error
            raise _error(f"cannot lock {self.path}", error) from error
        _held[key] = self.path
        self.release = weakref.finalize(self, _unlock, fd, key)
        self._remove_leftovers()

    def unlock(self) -> None:
        """Unlock the directory."""
        if self.release is not None:
            self.release()
            self.release = None

    def writing(self, step: int) -> Path:
        """Return the path of a checkpoint that is being written."""
        return self.path / f"{_WRITING}{step:012d}"

    def join(self, step: int) -> None:
        """Check that this process sees the directory that rank 0 has made with `begin`.

        Raises:
            CheckpointError: it does not.
        """
        if not self.writing(step).is_dir():
            raise CheckpointError(
                f"{self.path} is not there as rank 0 has it: all ranks save to one directory, on a file system that "
                "they share"
            )

    def begin(self, step: int, nbytes: int) -> Path:
        """Make an empty directory for a checkpoint of about `nbytes`.

        Raises:
            CheckpointError: there is no room, or the directory cannot be made.
        """
        path = self.writing(step)
        try:
            disk = os.statvfs(self.path)
            free_nbytes = disk.f_bavail * disk.f_frsize
            if free_nbytes < nbytes:
                raise CheckpointError(
                    f"no room in {self.path} for a checkpoint of {format_nbytes(nbytes)}: {format_nbytes(free_nbytes)} "
                    "are free; make room, or keep fewer checkpoints"
                )
            _remove(path)
            path.mkdir()
        except OSError as error:
            raise _error(f"cannot save to {self.path}", error) from error
        return path

    def commit(self, writing: Path, step: int) -> Complete:
        """Rename a directory as a complete checkpoint; its files must be on the medium.

        Raises:
            OSError: the medium failed; earlier checkpoints are unchanged.
        """
        attempts = [other.attempt for other in self.complete() if other.step == step]
        done = Complete(step, max(attempts, default=-1) + 1)
        sync_folder(writing)  # before the rename: a complete checkpoint must not lack files after a crash
        os.rename(writing, self.path / done.name)
        sync_folder(self.path)
        return done

    def prune(self, keep: int, damaged: Collection[Complete]) -> None:
        """Remove all but the newest `keep` checkpoints, and of one step all but the newest; damaged ones do not count.

        Raises:
            OSError: the medium failed.
        """
        newest = {checkpoint.step: checkpoint for checkpoint in self.complete() if checkpoint not in damaged}
        kept = sorted(newest.values())[-keep:]
        for checkpoint in self.complete():
            is_older = checkpoint < kept[0]
            is_replaced = checkpoint.step in newest and checkpoint < newest[checkpoint.step]
            if is_older or is_replaced:
                self._discard(self.path / checkpoint.name)

    def _discard(self, path: Path) -> None:
        """Remove a complete checkpoint; the rename comes first, so that none is ever seen in part."""
        aside = self.path / f"{_REMOVING}{path.name}"
        _remove(aside)
        os.rename(path, aside)
        _remove(aside)

    def _remove_leftovers(self) -> None:
        """Remove directories of processes that ended while they wrote or removed a checkpoint."""
        try:
            for name in os.listdir(self.path):
                if name.startswith((_WRITING, _REMOVING)):
                    _remove(self.path / name)
        except OSError as error:
            raise _error(f"cannot remove an unfinished checkpoint from {self.path}", error) from error


def sync_folder(path: Path) -> None:
    """Write the names in a directory to the medium."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove(path: Path) -> None:
    """Remove a directory, or a link in its place, if it is there."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _unlock(fd: int, key: tuple[int, int]) -> None:
    _held.pop(key, None)
    os.close(fd)


def _error(message: str, cause: OSError) -> CheckpointError:
    return CheckpointError(f"{message}: {cause.strerror or cause}")
