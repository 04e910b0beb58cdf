"""Reads of a disk home: several at once, past the page cache, and always what was written last."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_gpu import FakeGpu
from store_cases import MIB, random_bytes

from chunkc.ir.errors import HomeError
from chunkc.runtime.storage.disk_reads import NUM_UNDER_WAY, PIECE_NBYTES, is_cached
from chunkc.runtime.storage.homes import DiskHome, Region
from chunkc.runtime.storage.maps import drop_pages
from chunkc.runtime.storage.pinned import PinnedHome
from chunkc.runtime.storage.staging import StagedDiskHome

pytestmark = pytest.mark.timeout(120)

Make = Callable[..., DiskHome]


def staged(directory: str, **options: Any) -> StagedDiskHome:
    gpu = FakeGpu()
    home = StagedDiskHome(directory, gpu, PinnedHome(gpu), **options)
    home.gpu_of_test = gpu  # type: ignore[attr-defined]
    return home


MAKES = [pytest.param(DiskHome, id="cpu"), pytest.param(staged, id="staged")]


def read(home: DiskHome, region: Region, offset: int, nbytes: int) -> torch.Tensor:
    out = torch.zeros(nbytes, dtype=torch.uint8)
    home.read(region, offset, out)
    if isinstance(home, StagedDiskHome):
        home.gpu_of_test.compute.synchronize()  # type: ignore[attr-defined]
    return out


def file_of(home: DiskHome, region: Region) -> Any:
    mapping = home._mappings[region.offset]
    assert mapping.file is not None
    return mapping.file, mapping.offset


@pytest.fixture
def file_system_that_reads_directly(tmp_path: Path) -> Path:
    home = DiskHome(str(tmp_path))
    file, _ = file_of(home, home.allocate(1))
    if file.past_cache_fd is None:
        pytest.skip("this file system does not say that it reads past the page cache")
    return tmp_path


@pytest.fixture
def under_way(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many reads were under way, as each began; each takes a while."""
    lock, now, seen, real = threading.Lock(), [0], list[int](), os.preadv

    def slow(*arguments: Any) -> int:
        with lock:
            now[0] += 1
            seen.append(now[0])
        time.sleep(0.02)
        try:
            return real(*arguments)
        finally:
            with lock:
                now[0] -= 1

    monkeypatch.setattr(os, "preadv", slow)
    yield seen
    assert now[0] == 0, "a read was under way after all were said to be over"


@pytest.mark.parametrize("make", MAKES)
def test_several_requests_are_under_way_at_once(tmp_path: Path, make: Make, under_way: list[int]) -> None:
    home = make(str(tmp_path))
    nbytes = 2 * NUM_UNDER_WAY * PIECE_NBYTES + 1000
    region, expected = home.allocate(nbytes), random_bytes(nbytes)
    home.write(region, 0, expected)
    assert torch.equal(read(home, region, 0, nbytes), expected)
    assert max(under_way) == NUM_UNDER_WAY


@pytest.mark.parametrize("make", MAKES)
def test_what_is_on_the_medium_only_is_read_past_the_cache(file_system_that_reads_directly: Path, make: Make) -> None:
    home = make(str(file_system_that_reads_directly))
    region, expected = home.allocate(3 * PIECE_NBYTES), random_bytes(3 * PIECE_NBYTES)
    home.write(region, 0, expected)
    home.write_out(region, forget=True)
    assert not is_cached(home._mappings[region.offset], 0, MIB)
    assert torch.equal(read(home, region, 0, len(expected)), expected)
    assert not is_cached(home._mappings[region.offset], 0, MIB)


@pytest.mark.parametrize("make", MAKES)
def test_what_is_in_the_cache_is_copied_from_there(
    file_system_that_reads_directly: Path, monkeypatch: pytest.MonkeyPatch, make: Make
) -> None:
    home = make(str(file_system_that_reads_directly))
    region, expected = home.allocate(3 * PIECE_NBYTES), random_bytes(3 * PIECE_NBYTES)
    home.write(region, 0, expected)
    file, _ = file_of(home, region)
    assert is_cached(home._mappings[region.offset], 0, region.nbytes)
    used, real = set(), os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, *rest: (used.add(fd), real(fd, *rest))[1])
    assert torch.equal(read(home, region, 0, len(expected)), expected)
    assert used == {file.fd}


@pytest.mark.parametrize("past_cache", [True, False])
@pytest.mark.parametrize("make", MAKES)
def test_reads_find_what_was_written_last(tmp_path: Path, make: Make, past_cache: bool) -> None:
    """By either way, anywhere, whatever of it the cache has forgotten meanwhile."""
    draw = random.Random(0)
    home = make(str(tmp_path))
    home._past_cache = past_cache
    nbytes = 3 * PIECE_NBYTES // 2 + 777
    region, expected = home.allocate(nbytes), torch.zeros(nbytes, dtype=torch.uint8)
    view = home.tensor(region, torch.uint8, (nbytes,), (1,), 0)
    for _ in range(60):
        begin, end = sorted(draw.sample(range(nbytes + 1), 2))
        values = random_bytes(end - begin)
        match draw.randrange(4):
            case 0:
                view[begin:end] = values
                expected[begin:end] = values
            case 1:
                home.write(region, begin, values)
                expected[begin:end] = values
            case 2:
                del view
                drop_and_forget(home, region)
                view = home.tensor(region, torch.uint8, (nbytes,), (1,), 0)
            case 3:
                pass
        begin, end = sorted(draw.sample(range(nbytes + 1), 2))
        assert torch.equal(read(home, region, begin, end - begin), expected[begin:end])


def drop_and_forget(home: DiskHome, region: Region) -> None:
    drop_pages(home.bytes(region))
    home.write_out(region, forget=True)


@pytest.mark.parametrize("make", MAKES)
def test_who_writes_beside_a_read_changes_nothing_of_it(tmp_path: Path, make: Make) -> None:
    """In the same pages, through the map and by positional writes, while the kernel writes out and forgets them."""
    home = make(str(tmp_path))
    part = PIECE_NBYTES // 2 + 100  # neighbours share a page
    region = home.allocate(3 * part)
    expected, over = random_bytes(part), threading.Event()
    home.write(region, part, expected)
    others = DiskHome.write

    def by_writes() -> None:
        values = random_bytes(part)
        while not over.is_set():
            others(home, region, 0, values)
            home.write_out(region, forget=True)

    def by_the_map() -> None:
        view = home.tensor(region, torch.uint8, (part,), (1,), 2 * part)
        while not over.is_set():
            view += 1

    writers = [threading.Thread(target=by_writes), threading.Thread(target=by_the_map)]
    if isinstance(home, StagedDiskHome):
        writers.pop(0)  # a staged home's writes are of device tensors
    for writer in writers:
        writer.start()
    try:
        for _ in range(40):
            assert torch.equal(read(home, region, part, part), expected)
    finally:
        over.set()
        for writer in writers:
            writer.join()


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("which", [0, 1, 5])
def test_when_one_piece_fails_nothing_is_under_way_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Make, which: int, under_way: list[int]
) -> None:
    home = make(str(tmp_path))
    region = home.allocate(7 * PIECE_NBYTES)
    _, start = file_of(home, region)
    real = os.preadv

    def failing(fd: int, buffers: list[memoryview], offset: int, *flags: int) -> int:
        if offset == start + which * PIECE_NBYTES:
            raise OSError(5, "the disk is on fire")
        return real(fd, buffers, offset, *flags)

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(HomeError, match="on fire"):
        read(home, region, 0, region.nbytes)
    monkeypatch.setattr(os, "preadv", real)
    expected = random_bytes(MIB)
    DiskHome.write(home, region, 0, expected)
    assert torch.equal(read(home, region, 0, MIB), expected)


def test_the_pages_of_a_reader_wait_for_the_copy_out_of_them(tmp_path: Path) -> None:
    """A piece that comes while a slow device still copies the former one out of the same pages."""
    data = random_bytes(3 * PIECE_NBYTES)
    for seed in range(5):
        gpu = FakeGpu(longest_s=0.01)
        gpu.reseed(seed)
        home = StagedDiskHome(str(tmp_path), gpu, PinnedHome(gpu), piece_nbytes=MIB, num_pieces=2)
        region = home.allocate(len(data))
        home.write(region, 0, data)
        out = torch.zeros_like(data)
        home.read(region, 0, out)
        gpu.compute.synchronize()
        assert torch.equal(out, data)


def test_a_file_system_that_cannot_is_read_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, under_way: list[int]
) -> None:
    monkeypatch.setattr("chunkc.runtime.storage.maps.open_past_cache", lambda fd: None)
    home = DiskHome(str(tmp_path))
    nbytes = NUM_UNDER_WAY * PIECE_NBYTES
    region, expected = home.allocate(nbytes), random_bytes(nbytes)
    home.write(region, 0, expected)
    home.write_out(region, forget=True)
    assert torch.equal(read(home, region, 0, nbytes), expected)
    assert max(under_way) == NUM_UNDER_WAY
