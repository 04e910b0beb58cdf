"""Homes: views and copies see the same bytes, storages are separate, nothing stays behind. On disk: bad disks are
errors, no file stays.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import forked
import pytest
import torch
from store_cases import MIB, open_fds, random_bytes

from chunkc.ir.errors import HomeError, OptionsError
from chunkc.runtime.storage.homes import DiskHome, Home, MemoryHome, Region, open_home

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.bool]


def random_tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randint(0, 100, shape).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views_and_copies_see_the_same_bytes(home: Home, dtype: torch.dtype) -> None:
    region = home.allocate(10_000)
    offset_nbytes = 64
    view = home.tensor(region, dtype, (3, 5), (5, 1), offset_nbytes)
    assert torch.equal(view, torch.zeros(3, 5, dtype=dtype))

    written = random_tensor(dtype, 3, 5)
    view.copy_(written)
    out = torch.ones(3, 5, dtype=dtype)
    home.read(region, offset_nbytes, out)
    assert torch.equal(out, written)

    written = random_tensor(dtype, 3, 5)
    home.write(region, offset_nbytes, written)
    assert torch.equal(view, written)


def test_a_copy_touches_its_bytes_only(home: Home) -> None:
    region, other = home.allocate(9000), home.allocate(9000)
    whole, neighbour = (home.tensor(each, torch.uint8, (9000,), (1,), 0) for each in (region, other))
    expected = random_bytes(9000)
    whole.copy_(expected)
    home.write(region, 4095, torch.full((3,), 7, dtype=torch.uint8))
    expected[4095:4098] = 7
    assert torch.equal(whole, expected)
    assert not neighbour.any()
    buffer = torch.full((10,), 9, dtype=torch.uint8)
    home.read(region, 8997, buffer[3:6])
    assert buffer.tolist() == [9] * 3 + expected[8997:].tolist() + [9] * 4


@pytest.mark.parametrize(("shape", "stride"), [((), ()), ((0,), (1,)), ((3, 0), (1, 3)), ((1, 1), (7, 7))])
def test_scalars_and_empty_tensors(home: Home, shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    region = home.allocate(4)
    view = home.tensor(region, torch.float32, shape, stride, 0)
    assert view.shape == shape
    source = torch.full(shape, 2.5)
    home.write(region, 0, source)
    assert torch.equal(view, source)
    home.read(region, 0, torch.empty(shape))


def test_strided_views(home: Home) -> None:
    region = home.allocate(4096)
    home.write(region, 8, torch.arange(12, dtype=torch.float32))
    transposed = home.tensor(region, torch.float32, (3, 4), (1, 3), 8)
    assert torch.equal(transposed, torch.arange(12.0).reshape(4, 3).t())
    assert transposed.stride() == (1, 3)
    spread = home.tensor(region, torch.float32, (2, 2), (8, 2), 8)
    assert spread.tolist() == [[0, 2], [8, 10]]
    assert spread.untyped_storage().nbytes() == 11 * 4
    broadcast = home.tensor(region, torch.float32, (2, 3), (0, 1), 8)
    assert broadcast.tolist() == [[0, 1, 2], [0, 1, 2]]


def test_what_is_forgotten_is_zeros_that_take_no_memory(home: Home) -> None:
    """In RAM; a file keeps its bytes."""
    region, other = home.allocate(MIB + 1), home.allocate(5000)
    for each in (region, other):
        home.write(each, 0, torch.ones(each.nbytes, dtype=torch.uint8))
    assert home.forget(region) == (not isinstance(home, DiskHome))
    if isinstance(home, DiskHome):
        assert home.bytes(region).all()
        return
    num_pages = -(-region.nbytes // mmap.PAGESIZE)
    present = (ctypes.c_ubyte * num_pages)()
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    mincore.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
    assert mincore(home.address(region), num_pages * mmap.PAGESIZE, present) == 0
    assert not any(present)
    assert not home.bytes(region).any()
    assert home.bytes(other).all()


def test_regions_are_page_aligned_and_apart(home: Home) -> None:
    regions = [home.allocate(nbytes) for nbytes in (1, mmap.PAGESIZE, mmap.PAGESIZE + 1, 100)]
    ends = [0]
    for region in regions:
        assert region.offset % mmap.PAGESIZE == 0
        assert region.offset >= ends[-1]
        ends.append(region.offset + region.nbytes)
        assert home.tensor(region, torch.uint8, (1,), (1,), 0).data_ptr() % mmap.PAGESIZE == 0
    assert [region.nbytes for region in regions] == [1, mmap.PAGESIZE, mmap.PAGESIZE + 1, 100]


def test_a_view_owns_a_storage_of_its_own_size(home: Home) -> None:
    region = home.allocate(MIB)
    view = home.tensor(region, torch.bfloat16, (4, 8), (8, 1), 512)
    next_view = home.tensor(region, torch.bfloat16, (4, 8), (8, 1), 512 + 64)
    shadow = home.tensor(region, torch.bfloat16, (4, 8), (8, 1), 512)
    assert view.untyped_storage().nbytes() == view.numel() * view.itemsize
    assert view.storage_offset() == 0
    assert not view._is_view()
    storages = {each.untyped_storage()._cdata for each in (view, next_view, shadow)}
    assert len(storages) == 3
    assert next_view.data_ptr() - view.data_ptr() == 64
    view.fill_(3)  # no copy was made: the bytes are the home's, and shared
    assert torch.equal(shadow, view)
    assert not next_view.any()


def test_views_outlive_the_home(home: Home) -> None:
    region = home.allocate(MIB)
    view = home.tensor(region, torch.uint8, (MIB,), (1,), 0)
    expected = random_bytes(MIB)
    home.write(region, 0, expected)
    home.close()
    assert torch.equal(view, expected)
    view.add_(1)
    assert torch.equal(view, expected + 1)
    for call in (lambda: home.allocate(1), lambda: home.read(region, 0, torch.zeros(1))):
        with pytest.raises(HomeError, match="closed"):
            call()
    home.close()


def test_everything_goes_with_the_last_user(tmp_path: Path) -> None:
    before = open_fds()
    home = DiskHome(str(tmp_path))
    view = home.tensor(home.allocate(MIB), torch.uint8, (MIB,), (1,), 0)
    assert open_fds() > before
    del home
    assert view.sum() == 0
    del view
    assert open_fds() == before


def test_closing_does_not_pull_the_file_from_under_a_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = DiskHome(str(tmp_path))
    region = home.allocate(100)
    expected = random_bytes(100)
    home.write(region, 0, expected)
    inside, closed, real = threading.Event(), threading.Event(), os.preadv

    def slow_preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        inside.set()
        assert closed.wait(10)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", slow_preadv)
    out = torch.empty(100, dtype=torch.uint8)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(home.read, region, 0, out)
        assert inside.wait(10)
        home.close()
        closed.set()
        reading.result()
    assert torch.equal(out, expected)


def test_bytes_outside_a_region_are_refused(home: Home) -> None:
    region = home.allocate(100)
    for offset_nbytes, nbytes in ((0, 101), (99, 2), (-1, 1), (101, 0)):
        buffer = torch.zeros(nbytes, dtype=torch.uint8)
        for copied in (home.read, home.write):
            with pytest.raises(ValueError, match="not all in"):
                copied(region, offset_nbytes, buffer)
        with pytest.raises(ValueError, match="not all in"):
            home.tensor(region, torch.uint8, (nbytes,), (1,), offset_nbytes)
    with pytest.raises(ValueError, match="not a multiple of"):
        home.tensor(region, torch.float32, (1,), (1,), 2)
    with pytest.raises(HomeError, match="not of this home"):
        home.read(Region(8 * MIB, 100), 0, torch.zeros(1))
    with pytest.raises(ValueError, match="at least one byte"):
        home.allocate(0)


def test_many_threads_read_and_write_at_once(home: Home) -> None:
    region = home.allocate(MIB)
    expected = random_bytes(MIB)
    home.write(region, 0, expected)
    part_nbytes = MIB // 16

    def mix(part: int) -> bool:
        """Rewrite one part over and over, and read the parts that no thread rewrites."""
        numbers, good = random.Random(part), True
        start = (8 + part) * part_nbytes
        for _ in range(20):
            written = random_bytes(part_nbytes)
            home.write(region, start, written)
            out = torch.empty_like(written)
            home.read(region, start, out)
            good &= torch.equal(out, written)
            offset_nbytes = numbers.randrange(7 * part_nbytes)
            home.read(region, offset_nbytes, out)
            good &= torch.equal(out, expected[offset_nbytes : offset_nbytes + part_nbytes])
        return good

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(mix, range(8)))


MAX_LOOKS = 200
"""On a busy machine the other thread may not come to run during a short copy, though it may."""


def test_copies_release_the_gil(home: Home) -> None:
    region = home.allocate(32 * MIB)
    slot = torch.ones(32 * MIB, dtype=torch.uint8)
    for copied in (home.write, home.read):
        assert any(_runs_during(partial(copied, region, 0, slot)) for _ in range(MAX_LOOKS)), copied.__name__


def _runs_during(job: Callable[[], None]) -> bool:
    """Whether another thread ran before the job was over, which it does only where the job gives way."""
    copying, ran_while_copying = True, False
    go = threading.Event()

    def look() -> None:
        nonlocal ran_while_copying
        go.wait()
        ran_while_copying = copying

    thread = threading.Thread(target=look)
    thread.start()
    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(10)
    try:
        go.set()
        job()
        copying = False
        thread.join()
    finally:
        sys.setswitchinterval(switch_s)
    return ran_while_copying


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("numel", [1, 1000, 3 * MIB], ids=["one", "some", "of several pieces"])
def test_what_is_read_as_a_cast_is_cast(home: Home, dtype: torch.dtype, to: torch.dtype, numel: int) -> None:
    region = home.allocate(numel * dtype.itemsize + 64)
    values = torch.randn(numel, dtype=dtype)
    home.write(region, 0, values)
    out = torch.zeros(numel + 2, dtype=to)
    home.read_cast(region, dtype, out[:numel])
    assert torch.equal(out[:numel], values.to(to))
    assert not out[numel:].any(), "beyond its end"
    home.tensor(region, dtype, (numel,), (1,), 0).mul_(3)
    home.read_cast(region, dtype, out[:numel])
    assert torch.equal(out[:numel], (values * 3).to(to)), "what was written since is not cast"


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


@pytest.mark.parametrize(
    ("place", "message", "code"),
    [
        ("nowhere", "nowhere: it does not exist", errno.ENOENT),
        ("file", "file: it is not a directory", errno.ENOTDIR),
        ("file/below", "file/below: it does not exist", None),
    ],
)
def test_what_is_no_directory(tmp_path: Path, place: str, message: str, code: int | None) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HomeError, match=message) as caught:
        DiskHome(str(tmp_path / place))
    assert code is None or caught.value.errno == code


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
