"""A disk behind a GPU: any size through small buffers, whatever is late; and the waits that make it so."""

from __future__ import annotations

import errno
import functools
import gc
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_gpu import FakeGpu, NoWait

from chunkc.ir.errors import HomeError, UnsupportedError
from chunkc.ir.layout import Chunk
from chunkc.runtime.device.cuda import CudaLink
from chunkc.runtime.storage.pinned import PinnedHome, unpinner
from chunkc.runtime.storage.staging import StagedDiskHome, open_arena

pytestmark = pytest.mark.timeout(60)

PIECE = 64


def staged(
    directory: Path,
    gpu: FakeGpu,
    make: Callable[..., StagedDiskHome] = StagedDiskHome,
    num_pieces: int = 2,
    piece_nbytes: int = PIECE,
) -> StagedDiskHome:
    return make(str(directory), gpu, PinnedHome(gpu), piece_nbytes=piece_nbytes, num_pieces=num_pieces)


@pytest.mark.parametrize("nbytes", [1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 7 * PIECE + 5])
@pytest.mark.parametrize("num_pieces", [1, 3])
def test_bytes_of_any_size_go_through(tmp_path: Path, nbytes: int, num_pieces: int) -> None:
    gpu = FakeGpu(longest_s=0.001)
    home = staged(tmp_path, gpu, num_pieces=num_pieces)
    region = home.allocate(nbytes + 16)
    data = torch.arange(nbytes, dtype=torch.int64).to(torch.uint8)
    home.write(region, 16, data)
    assert torch.equal(home.tensor(region, torch.uint8, (nbytes,), (1,), 16), data)  # it is in the file by now
    back = torch.zeros_like(data)
    home.read(region, 16, back)
    gpu.compute.synchronize()
    assert torch.equal(back, data)
    assert not home.tensor(region, torch.uint8, (16,), (1,), 0).any()


@pytest.mark.parametrize("numel", [1, PIECE // 4 - 1, PIECE // 4, 7 * PIECE + 5])
def test_a_cast_is_of_what_the_file_holds(tmp_path: Path, numel: int) -> None:
    gpu = FakeGpu(longest_s=0.001)
    home = staged(tmp_path, gpu, num_pieces=3)
    region = home.allocate(4 * numel + 16)
    for _ in range(2):  # what is written later, too
        data = torch.randn(numel)
        home.write(region, 0, data)
        cast = torch.zeros(numel + 1, dtype=torch.float16)
        home.read_cast(region, torch.float32, cast[:numel])
        gpu.compute.synchronize()
        assert torch.equal(cast[:numel], data.half())
        assert cast[numel] == 0


def test_the_buffers_are_all_the_pinned_memory_it_takes(tmp_path: Path) -> None:
    gpu = FakeGpu()
    home = staged(tmp_path, gpu, num_pieces=3)
    home.allocate(1 << 20)
    assert gpu.num_pins == 6
    assert not home.only_launches(home.allocate(64))  # a thread must run it


class _NeverWaits(StagedDiskHome):
    """A home that uses its buffers again without waiting for the copies out of them, or before those into them."""

    def _record(self) -> Any:
        event = super()._record()
        ignored = NoWait()
        ignored.recorded = event.recorded
        return ignored


def _read_all(home: StagedDiskHome, gpu: FakeGpu, data: torch.Tensor) -> torch.Tensor:
    region = home.allocate(data.nbytes)
    home.tensor(region, data.dtype, tuple(data.shape), (1,), 0).copy_(data)
    back = torch.empty_like(data)
    home.read(region, 0, back)
    gpu.compute.synchronize()
    return back


def _write_all(home: StagedDiskHome, gpu: FakeGpu, data: torch.Tensor) -> torch.Tensor:
    region = home.allocate(data.nbytes)
    home.write(region, 0, data)
    gpu.compute.synchronize()
    return home.tensor(region, data.dtype, tuple(data.shape), (1,), 0)


def _cast_all(home: StagedDiskHome, gpu: FakeGpu, data: torch.Tensor) -> torch.Tensor:
    region = home.allocate(data.nbytes)
    home.tensor(region, data.dtype, tuple(data.shape), (1,), 0).copy_(data)
    cast = torch.empty_like(data, dtype=torch.bfloat16)
    home.read_cast(region, data.dtype, cast)
    gpu.compute.synchronize()
    return cast.float()  # exact: the elements are small integers


@pytest.mark.parametrize("way", [_read_all, _write_all, _cast_all])
def test_the_buffers_waits_matter(tmp_path: Path, way: Callable[..., torch.Tensor]) -> None:
    data = torch.randint(-99, 99, (10 * mmap.PAGESIZE,)).float()  # in pages: each comes where another was
    right, wrong = 0, 0
    for seed in range(20):
        gpu = FakeGpu(longest_s=0.002)
        gpu.reseed(seed)
        homes = [staged(tmp_path, gpu, make, piece_nbytes=mmap.PAGESIZE) for make in (StagedDiskHome, _NeverWaits)]
        right += torch.equal(way(homes[0], gpu, data), data)
        wrong += not torch.equal(way(homes[1], gpu, data), data)
    assert right == 20
    assert wrong > 0


@pytest.mark.parametrize("way", ["read", "write"])
def test_a_failing_disk_is_the_error_of_the_copy_s_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """After the first piece; whoever waits or holds is told, later copies go on, and `drain` tells it no more."""
    gpu = FakeGpu(longest_s=0.001)
    home = staged(tmp_path, gpu)
    region = home.allocate(4 * PIECE)
    transfer, num_calls = getattr(os, f"p{way}v"), 0

    def failing(*args: Any) -> int:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            raise OSError(errno.EIO, "the disk is on fire")
        return transfer(*args)

    monkeypatch.setattr(os, f"p{way}v", failing)
    link = CudaLink(gpu, way)
    slot = torch.zeros(PIECE)
    mark = link.submit(functools.partial(getattr(home, way), region, 0, slot))
    for _ in range(2):
        with pytest.raises(HomeError, match="on fire"):
            mark.hold(gpu.compute)
        with pytest.raises(HomeError, match="on fire"):
            mark.wait()
    link.submit(functools.partial(getattr(home, way), region, 0, slot)).wait()
    link.drain()
    assert link.busy_s >= 0.0


def test_an_option_names_the_homes(tmp_path: Path) -> None:
    memory = open_arena("cpu", FakeGpu())
    assert isinstance(memory.home, PinnedHome)
    assert isinstance(memory.state_home, PinnedHome)
    disk = open_arena(f"disk:{tmp_path}", FakeGpu())
    assert isinstance(disk.home, PinnedHome)
    assert isinstance(disk.state_home, StagedDiskHome)
    assert disk.state_home.directory == str(tmp_path)
    assert isinstance(open_arena("disk", FakeGpu()).state_home, StagedDiskHome)


def test_a_disk_may_hold_everything(tmp_path: Path) -> None:
    gpu = FakeGpu(views_pageable=True)
    arena = open_arena(f"disk:{tmp_path}", gpu, disk_holds_everything=True)
    assert isinstance(arena.home, StagedDiskHome)
    assert arena.state_home is None
    arena.reserve({Chunk("param", 0): 64, Chunk("exp_avg", 0): 64})
    view = arena.view(Chunk("param", 0), torch.float32, (2, 4), (1, 2), 16)
    assert (view.shape, view.stride(), view.untyped_storage().nbytes()) == ((2, 4), (1, 2), 32)
    view.copy_(torch.arange(8.0).view(2, 4))
    out, back = torch.zeros(16), torch.zeros(16)
    out[4:12] = torch.tensor([0.0, 4, 1, 5, 2, 6, 3, 7])
    assert arena.host_view(Chunk("param", 0), torch.float32, 16).equal(out)
    arena.reader(Chunk("param", 0), 0, back)()  # what eager code wrote in place is in the file,
    gpu.compute.synchronize()
    assert back.equal(out)
    arena.writer(Chunk("param", 0), 0, -out)()  # and it reads what was written there
    assert view.equal(-torch.arange(8.0).view(2, 4))
    empty = arena.view(Chunk("param", 0), torch.float32, (0, 3), (3, 1), 0)
    assert empty.shape == (0, 3)


def test_a_view_of_a_file_outlives_its_home(tmp_path: Path) -> None:
    gpu = FakeGpu(views_pageable=True)
    home = StagedDiskHome(str(tmp_path), gpu, PinnedHome(gpu), piece_nbytes=PIECE, views_on_device=True)
    view = home.tensor(home.allocate(64), torch.uint8, (64,), (1,), 0)
    home.close()
    del home
    gc.collect()
    view.fill_(7)
    assert view.eq(7).all()


def test_views_that_the_device_cannot_have_are_refused(tmp_path: Path) -> None:
    gpu = FakeGpu()
    with pytest.raises(UnsupportedError, match=r'reads files in place.*it is too old.*disk_holds="states"'):
        open_arena(f"disk:{tmp_path}", gpu, disk_holds_everything=True)
    unpinner.drain()
    assert not gpu.pinned
    assert isinstance(open_arena(f"disk:{tmp_path}", gpu).state_home, StagedDiskHome)
