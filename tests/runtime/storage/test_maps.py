"""Ranges of one file: their bytes go with the last tensor over them, and their pages when nobody needs these."""

from __future__ import annotations

import gc
import mmap
import os
from pathlib import Path

import pytest
import torch
from store_cases import MIB, open_fds, random_bytes

from chunkc.runtime.storage import maps
from chunkc.runtime.storage.homes import DiskHome, MemoryHome
from chunkc.runtime.storage.maps import NamelessFile, drop_pages, evict_pages
from chunkc.session.movable import is_shared_memory


def on_disk_nbytes(file: NamelessFile) -> int:
    return os.fstat(file.fd).st_blocks * 512


def mapped_nbytes(tensor: torch.Tensor) -> int:
    """Bytes of the map that a tensor begins in which are in RAM, for this process."""
    begin = f"{tensor.data_ptr():x}-"
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    assert any(line.startswith(begin) for line in lines)
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss:"))


def file_nbytes() -> int:
    """Bytes of files that are mapped and in RAM, for this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssFile:"))


def test_maps_of_files_with_names_that_are_no_text_are_read_too(tmp_path: Path) -> None:
    shared, large = torch.zeros(4).share_memory_(), torch.zeros(1 << 22)
    with open(os.fsencode(tmp_path) + b"/caf\xe9", "wb+") as file:
        file.truncate(mmap.PAGESIZE)
        with mmap.mmap(file.fileno(), mmap.PAGESIZE):
            assert is_shared_memory(shared)
            evict_pages(large)


def test_ranges_of_one_file_do_not_overlap_and_take_no_descriptors(tmp_path: Path) -> None:
    home = DiskHome(str(tmp_path))
    num_fds = open_fds()
    regions = [home.allocate(10_000) for _ in range(20)]
    assert open_fds() <= num_fds + 2  # one to read past the page cache
    expected = [random_bytes(10_000) for _ in regions]
    for region, values in zip(regions, expected, strict=True):
        home.write(region, 0, values)
    for region, values in zip(regions, expected, strict=True):
        assert torch.equal(home.tensor(region, torch.uint8, (10_000,), (1,), 0), values)


def test_the_disk_has_a_range_again_when_its_last_tensor_is_gone(tmp_path: Path) -> None:
    home = DiskHome(str(tmp_path))
    kept, left = home.allocate(MIB), home.allocate(MIB)
    views = [home.tensor(region, torch.uint8, (MIB,), (1,), 0).fill_(3) for region in (kept, left)]
    file = home._mappings[kept.offset].file
    assert file is not None
    home.free(left)
    gc.collect()
    assert on_disk_nbytes(file) >= 2 * MIB
    assert bool((views.pop() == 3).all())
    gc.collect()
    assert MIB <= on_disk_nbytes(file) < 2 * MIB
    assert bool((views[0] == 3).all())


def test_dropped_pages_leave_the_memory_and_keep_their_bytes(tmp_path: Path) -> None:
    home = DiskHome(str(tmp_path))
    view = home.tensor(home.allocate(4 * MIB), torch.float32, (1024, 1024), (1, 1024), 0)
    expected = torch.randn(1024, 1024)
    view.copy_(expected)
    assert mapped_nbytes(view) == 4 * MIB
    drop_pages(view)
    assert mapped_nbytes(view) == 0
    assert torch.equal(view, expected)


def test_nothing_happens_to_other_memory() -> None:
    home = MemoryHome()
    for tensor in (home.tensor(home.allocate(MIB), torch.uint8, (MIB,), (1,), 0), torch.empty(MIB, dtype=torch.uint8)):
        drop_pages(tensor.fill_(7))
        assert bool((tensor == 7).all())


@pytest.mark.parametrize("columns", [1024, 512])
def test_a_file_that_a_library_mapped_is_evicted_and_read_again(columns: int, tmp_path: Path) -> None:
    expected = torch.randn(4096, 1024)
    torch.save(expected, tmp_path / "saved.pt")
    with open(tmp_path / "saved.pt", "rb") as file:
        os.fsync(file.fileno())  # dirty pages stay
    mapped = torch.load(tmp_path / "saved.pt", mmap=True, weights_only=True)
    assert torch.equal(mapped, expected)
    mapped[0, 0] = 7.0  # a private page, which the file does not have
    before_nbytes = file_nbytes()
    evict_pages(mapped[:, :columns])
    assert file_nbytes() <= before_nbytes - 8 * MIB  # the kernel leaves some of 16
    assert mapped[0, 0] == 7.0
    assert torch.equal(mapped[1:], expected[1:])


def test_a_child_takes_nothing_out_of_the_parents_file(tmp_path: Path) -> None:
    home = DiskHome(str(tmp_path))
    view = home.tensor(home.allocate(MIB), torch.uint8, (MIB,), (1,), 0).fill_(5)
    pid = os.fork()
    if pid == 0:
        home.close()
        del view
        gc.collect()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    drop_pages(view)
    assert bool((view == 5).all())


def test_no_page_beyond_the_map_is_dropped(tmp_path: Path) -> None:
    """A span that is remembered from a tensor that is gone may reach further than what lies there now."""
    home = DiskHome(str(tmp_path))
    tensor = home.tensor(home.allocate(MIB), torch.float32, (MIB // 4,), (1,), 0)
    dropped: list[tuple[int, int]] = []

    class Libc:
        def madvise(self, begin: int, nbytes: int, advice: int) -> int:
            dropped.append((begin, nbytes))
            return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(maps, "_libc", Libc())
        maps.drop_span(tensor.data_ptr(), 4 * MIB)
    assert dropped == [(tensor.data_ptr(), MIB)]
