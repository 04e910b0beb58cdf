"""Who saves where, what is kept, and media that fail."""

from __future__ import annotations

import errno
import gc
import os
import resource
import signal
import threading
import types
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import chunkc
from chunkc.checkpoint.folder import Complete, Folder
from chunkc.ir.errors import CheckpointError


def checkpoint(folder: Path, **options: Any) -> chunkc.Checkpoint:
    torch.manual_seed(0)
    return chunkc.Checkpoint(folder, model=nn.Linear(64, 64), **options)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def step(number: int, attempt: int = 0) -> str:
    return Complete(number, attempt).name


def test_the_newest_are_kept(tmp_path: Path) -> None:
    with checkpoint(tmp_path, keep=2) as ck:
        assert ck.load_latest() is None
        for number in (5, 10, 15):
            ck.save(number)
        ck.save(15)
    assert names(tmp_path) == [step(10), step(15, 1)]
    assert checkpoint(tmp_path).load_latest() == 15


def test_a_directory_with_later_steps_is_another_runs(tmp_path: Path) -> None:
    with checkpoint(tmp_path) as ck:
        ck.save(10)
    with checkpoint(tmp_path) as ck, pytest.raises(CheckpointError, match=r"later steps than 5, up to step-0*10; load"):
        ck.save(5)
    assert names(tmp_path) == [step(10)]


def test_what_was_left_by_a_killed_process_goes(tmp_path: Path) -> None:
    for name in (".writing-000000000007", f".removing-{step(3)}"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"some")
    (tmp_path / "notes.txt").write_text("the user's")
    with checkpoint(tmp_path) as ck:
        assert ck.load_latest() is None
        ck.save(1)
    assert names(tmp_path) == ["notes.txt", step(1)]


def test_a_second_object_of_the_process_is_refused(tmp_path: Path) -> None:
    one, two = checkpoint(tmp_path), checkpoint(tmp_path)
    one.save(1)
    with pytest.raises(CheckpointError, match="another Checkpoint of this process saves to"):
        two.save(2)
    one.wait()
    assert two.load_latest() == 1  # reading is for all
    one.close()
    two.save(2)
    two.wait()
    del two, one
    gc.collect()
    with checkpoint(tmp_path) as ck:
        ck.save(3)


def test_an_object_that_is_replaced_leaves_the_directory_to_its_successor(tmp_path: Path) -> None:
    """As when a notebook's cell runs again, which closes nothing; no collection is needed."""
    gc.disable()
    try:
        ck = checkpoint(tmp_path)
        ck.save(1)
        for thread in threading.enumerate():
            if thread.name.startswith("chunkc checkpoint"):
                thread.join()
        ck = checkpoint(tmp_path)
        ck.save(2)
        ck.close()
    finally:
        gc.enable()


def test_another_process_is_refused_and_named(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    other = os.fork()
    if other == 0:
        try:
            folder = Folder(tmp_path)
            folder.lock()
            os.write(writing, b"locked")
            signal.pause()
        finally:
            os._exit(1)
    os.close(writing)
    try:
        assert os.read(reading, 6) == b"locked"
        ck = checkpoint(tmp_path)
        with pytest.raises(CheckpointError, match=rf"process {other} on .* saves to .* already; use another"):
            ck.save(1)
    finally:
        os.close(reading)
        os.kill(other, signal.SIGKILL)  # no chance to unlock
        os.waitpid(other, 0)
    ck.save(1)
    ck.close()
    assert names(tmp_path) == [step(1)]


def test_a_child_of_fork_does_not_keep_the_lock(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.lock()
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    folder.unlock()
    try:
        other = Folder(tmp_path)
        other.lock()
        other.unlock()
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


# --- media that fail; what was saved before stays ---


def saved_before(folder: Path) -> chunkc.Checkpoint:
    ck = checkpoint(folder)
    ck.save(1)
    ck.wait()
    return ck


def assert_intact(ck: chunkc.Checkpoint, folder: Path) -> None:
    assert names(folder) == [step(1)]
    assert ck.load_latest() == 1
    ck.save(2)  # once there is room again
    ck.close()
    assert names(folder) == [step(1), step(2)]


def test_a_disk_that_is_full_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ck = saved_before(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda path: types.SimpleNamespace(f_bavail=1, f_frsize=4096))
    with pytest.raises(CheckpointError, match=r"no room in .* for a checkpoint of .*4,096 bytes\) are free; make room"):
        ck.save(2)
    monkeypatch.undo()
    assert_intact(ck, tmp_path)


def test_a_limit_on_files(tmp_path: Path) -> None:
    """As a quota: the kernel says it in the midst of a file."""
    ck = saved_before(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    try:
        ck.save(2)
        with pytest.raises(CheckpointError, match=r"step 2 was not saved to .*: File too large; make room"):
            ck.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert_intact(ck, tmp_path)


@pytest.mark.parametrize("call", ["write", "fsync", "rename", "open"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_any_call_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int) -> None:
    ck = saved_before(tmp_path)
    real = getattr(os, call)
    num_calls = 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        if call == "open" and "model.safetensors" not in str(args[0]):
            return real(*args, **kwargs)
        num_calls += 1
        if call in ("rename", "open") or num_calls == 3:
            raise OSError(number, os.strerror(number))
        return real(*args, **kwargs)

    monkeypatch.setattr(os, call, failing)
    ck.save(2)
    tells = ck.wait if number == errno.EIO else partial(ck.save, 3)
    with pytest.raises(CheckpointError, match=rf"step 2 was not saved to .*: {os.strerror(number)}.*as they were"):
        tells()
    monkeypatch.undo()
    ck.wait()  # told once
    assert_intact(ck, tmp_path)


def test_a_directory_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ck = saved_before(tmp_path)
    if os.geteuid() == 0:  # for whom permissions are none

        def refusing(*args: Any, **kwargs: Any) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        monkeypatch.setattr(Path, "mkdir", refusing)
        problem = "Read-only file system"
    else:
        tmp_path.chmod(0o500)
        problem = "Permission denied"
    with pytest.raises(CheckpointError, match=f"cannot save to .*: {problem}"):
        ck.save(2)
    monkeypatch.undo()
    tmp_path.chmod(0o700)
    assert_intact(ck, tmp_path)


def test_what_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        ck = checkpoint(path)
        with pytest.raises(CheckpointError, match="cannot"):
            ck.save(1)


def test_older_ones_that_cannot_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ck = checkpoint(tmp_path, keep=1)
    ck.save(1)
    ck.wait()

    def refusing(path: object) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    ck.save(2)
    ck.wait()
    monkeypatch.setattr("chunkc.checkpoint.folder.shutil.rmtree", refusing)
    ck.save(3)
    with pytest.raises(CheckpointError, match=r"step-0*3 is complete, but older checkpoints cannot be removed"):
        ck.wait()
    monkeypatch.undo()
    ck.close()
    with checkpoint(tmp_path, keep=1) as other:
        assert other.load_latest() == 3
        other.save(4)
    assert names(tmp_path) == [step(4)]
