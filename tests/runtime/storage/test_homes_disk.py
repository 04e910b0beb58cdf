"""Homes on disk: bad disks are errors, no file stays."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import forked
import pytest
import torch
from runtime_helpers import MIB, open_fds, random_bytes

from chunkc.ir.errors import HomeError, OptionsError
from chunkc.runtime.storage.homes import DiskHome, MemoryHome, open_home


def test_short_reads_and_writes_are_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = DiskHome(str(tmp_path))
    region = home.allocate(10_000)
    view = home.tensor(region, torch.uint8, (10_000,), (1,), 0)
    calls = []

    def shortened(real):
        def call(fd: int, buffers: list[memoryview], offset: int) -> int:
            calls.append(offset)
            return real(fd, [buffers[0][:777]], offset)

        return call

    monkeypatch.setattr(os, "preadv", shortened(os.preadv))
    monkeypatch.setattr(os, "pwritev", shortened(os.pwritev))
    expected = random_bytes(9000)
    home.write(region, 1000, expected)
    assert torch.equal(view[1000:], expected)
    assert not view[:1000].any()
    out = torch.empty_like(expected)
    home.read(region, 1000, out)
    assert torch.equal(out, expected)
    assert calls == [*range(1000, 10_000, 777)] * 2


def test_signals_do_not_break_a_copy(tmp_path: Path) -> None:
    home = DiskHome(str(tmp_path))
    region, expected, signals = home.allocate(4 * MIB), random_bytes(4 * MIB), []
    previous = signal.signal(signal.SIGUSR1, lambda *_: signals.append(1))
    stop, main = threading.Event(), threading.get_ident()

    def send() -> None:
        while not stop.wait(0.0005):
            signal.pthread_kill(main, signal.SIGUSR1)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        for _ in range(20):
            home.write(region, 0, expected)
            out = torch.empty_like(expected)
            home.read(region, 0, out)
            assert torch.equal(out, expected)
    finally:
        stop.set()
        sender.join()
        signal.signal(signal.SIGUSR1, previous)
    assert signals


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_io_errors_are_home_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    home = DiskHome(str(tmp_path))
    region = home.allocate(100)

    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "preadv", fail)
    monkeypatch.setattr(os, "pwritev", fail)
    for verb, copied in (("read", home.read), ("write", home.write)):
        with pytest.raises(HomeError, match=f"cannot {verb} 100 bytes") as caught:
            copied(region, 0, torch.zeros(100, dtype=torch.uint8))
        assert caught.value.errno == code
        assert str(tmp_path) in str(caught.value)
        assert os.strerror(code) in str(caught.value)


def test_a_file_that_ended_early_is_an_error_and_no_endless_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = DiskHome(str(tmp_path))
    region = home.allocate(100)
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(HomeError, match="ended early"):
        home.read(region, 0, torch.zeros(100, dtype=torch.uint8))
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with pytest.raises(HomeError, match="takes no more"):
        home.write(region, 0, torch.zeros(100, dtype=torch.uint8))


def refuse_nameless_files(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A file system without O_TMPFILE. Returns the refusals."""
    real, refused = os.open, []

    def refuse(path, flags: int, *arguments, **keywords) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            refused.append(flags)
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real(path, flags, *arguments, **keywords)

    monkeypatch.setattr(os, "open", refuse)
    return refused


@pytest.mark.parametrize("nameless", [True, False])
def test_no_file_is_to_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nameless: bool) -> None:
    refused = [] if nameless else refuse_nameless_files(monkeypatch)
    home = DiskHome(str(tmp_path))
    region = home.allocate(MIB)
    assert list(tmp_path.iterdir()) == []
    assert bool(refused) != nameless
    source = random_bytes(MIB)
    home.write(region, 0, source)
    assert torch.equal(home.tensor(region, torch.uint8, (MIB,), (1,), 0), source)


@pytest.mark.second_tier
def test_no_file_is_left_after_sigkill(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys, torch; from chunkc.runtime.storage.homes import open_home\n"
        "home = open_home('disk:' + sys.argv[1]); region = home.allocate(1 << 20)\n"
        "home.tensor(region, torch.uint8, (1 << 20,), (1,), 0).fill_(1)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    program, directory = tmp_path / "program.py", tmp_path / "home"
    program.write_text(script)
    directory.mkdir()
    assert forked.run(program, directory).returncode == -signal.SIGKILL
    assert list(directory.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB, where the machine lets us mount one."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    try:
        mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("mounting a small tmpfs needs root")
    yield tmp_path
    subprocess.run(["umount", "--lazy", tmp_path], check=True)


def test_a_really_full_disk(small_disk: Path) -> None:
    home = DiskHome(str(small_disk))
    kept = home.allocate(MIB // 2)
    fds = open_fds()
    with pytest.raises(HomeError) as caught:
        home.allocate(MIB)
    message = str(caught.value)
    assert caught.value.errno == errno.ENOSPC
    assert str(small_disk) in message
    assert "1.00 MiB (1,048,576 bytes)" in message
    assert "512.00 KiB (524,288 bytes) are free" in message
    assert open_fds() == fds
    second = home.allocate(MIB // 2)  # what the failed one had reserved is free again
    for region in (kept, second):
        home.tensor(region, torch.uint8, (MIB // 2,), (1,), 0).fill_(5)  # no SIGBUS: the space was reserved
    with pytest.raises(HomeError):
        home.allocate(1)


def test_no_space_to_reserve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = DiskHome(str(tmp_path))
    fds = open_fds()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(HomeError, match=r"cannot reserve 1\.00 MiB") as caught:
        home.allocate(MIB)
    assert caught.value.errno == errno.ENOSPC
    assert str(tmp_path) in str(caught.value)
    assert " are free" in str(caught.value)
    assert open_fds() == fds


def test_space_is_reserved_not_promised(tmp_path: Path) -> None:
    home = DiskHome(str(tmp_path))
    region = home.allocate(MIB)
    mapping = home._mappings[region.offset]
    assert mapping.file is not None
    assert os.fstat(mapping.file.fd).st_blocks * 512 >= MIB


def test_too_much_memory_is_a_home_error() -> None:
    with pytest.raises(HomeError, match="cannot map") as caught:
        MemoryHome().allocate(1 << 55)
    assert caught.value.errno == errno.ENOMEM


def test_a_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(HomeError, match="nowhere: it does not exist") as caught:
        DiskHome(str(tmp_path / "nowhere"))
    assert caught.value.errno == errno.ENOENT


def test_a_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HomeError, match="file: it is not a directory"):
        DiskHome(str(tmp_path / "file"))
    with pytest.raises(HomeError, match="file/below: it does not exist"):
        DiskHome(str(tmp_path / "file" / "below"))


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
def test_an_unwritable_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    home = DiskHome(str(tmp_path))

    def refuse(*_: object, **__: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "open", refuse)
    for call in (lambda: DiskHome(str(tmp_path)), lambda: home.allocate(1)):
        with pytest.raises(HomeError, match="it is not writable") as caught:
            call()
        assert caught.value.errno == code
        assert str(tmp_path) in str(caught.value)


def test_open_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(open_home("cpu")) is MemoryHome
    default, named = open_home("disk"), open_home(f"disk:{tmp_path}")
    assert isinstance(default, DiskHome)
    assert isinstance(named, DiskHome)
    assert default.directory == tempfile.gettempdir()
    assert named.directory == str(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a:b").mkdir()
    relative = open_home("disk:a:b")
    monkeypatch.chdir("/")
    relative.allocate(1)
    for wrong in ("", "cuda", "cpu:", "cpu:x", "disk:", "Disk", "disc:/tmp"):
        with pytest.raises(OptionsError, match="disk:DIR"):
            open_home(wrong)
