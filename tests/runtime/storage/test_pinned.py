"""Pinned home memory: exact bookkeeping, views in place, copies in the stream's order, and the limit of pinning. And
what it asks of the system: large pages, as pinning takes time per page, no forks, and to be near the GPU.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import logging
import mmap
import os
import platform
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import forked
import pytest
import torch
from fake_gpu import FakeEvent, FakeGpu, FakeStream, NoWait

import chunkc.runtime.storage.pinned
from chunkc.ir.errors import HomeError
from chunkc.ir.layout import Chunk
from chunkc.runtime.device import numa
from chunkc.runtime.device.cuda import CudaLink, CudaMark
from chunkc.runtime.device.streams import Launch
from chunkc.runtime.storage.arena import Arena
from chunkc.runtime.storage.homes import MemoryHome, Region
from chunkc.runtime.storage.pinned import PinnedHome, _Retired, _Unpinner, populate, unpinner
from chunkc.runtime.storage.staging import open_arena

pytestmark = pytest.mark.timeout(30)

PAGE = mmap.PAGESIZE


def test_regions_are_pinned_exactly_and_unpinned_when_nobody_uses_them() -> None:
    gpu = FakeGpu()
    home = PinnedHome(gpu)
    first, second = home.allocate(3 * PAGE + 1), home.allocate(PAGE)
    assert sorted(gpu.pinned.values()) == [PAGE, 4 * PAGE]  # whole pages, no powers of two
    assert home.pinned_nbytes == 5 * PAGE
    view = home.tensor(first, torch.float32, (4,), (1,), 8)
    home.free(first)
    gc.collect()
    assert home.pinned_nbytes == 5 * PAGE  # the view is still there
    view.fill_(2.0)
    del view
    gc.collect()
    assert home.pinned_nbytes == PAGE
    home.close()
    gc.collect()
    unpinner.drain()
    assert gpu.pinned == {}
    assert home.pinned_nbytes == 0
    with pytest.raises(HomeError, match="closed"):
        home.bytes(second)


def test_a_home_that_is_dropped_unpins() -> None:
    gpu = FakeGpu()
    home = PinnedHome(gpu)
    home.allocate(PAGE)
    del home
    gc.collect()
    unpinner.drain()
    assert gpu.pinned == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_a_view_is_the_home_s_memory(dtype: torch.dtype) -> None:
    home = PinnedHome(FakeGpu())
    region = home.allocate(4096)
    assert not home.bytes(region).any()
    view = home.tensor(region, dtype, (3, 5), (1, 3), 64)
    assert (view.shape, view.stride(), view.dtype) == ((3, 5), (1, 3), dtype)
    assert view.untyped_storage().nbytes() == 15 * dtype.itemsize  # no neighbours to be saved with it
    assert view._base is None
    view.copy_(torch.arange(15).view(3, 5))
    flat = home.bytes(region)[64 : 64 + 15 * dtype.itemsize].view(dtype)
    assert torch.equal(flat, torch.arange(15).view(3, 5).t().reshape(-1).to(dtype))


def test_an_empty_view_and_bad_places() -> None:
    home = PinnedHome(FakeGpu())
    region = home.allocate(128)
    assert home.tensor(region, torch.float32, (0, 4), (4, 1), 0).shape == (0, 4)
    with pytest.raises(ValueError, match="multiple"):
        home.tensor(region, torch.float32, (1,), (1,), 2)
    with pytest.raises(ValueError, match="not all in"):
        home.tensor(region, torch.float32, (33,), (1,), 0)
    with pytest.raises(ValueError, match="not all in"):
        home.read(region, 96, torch.empty(9))
    with pytest.raises(HomeError, match="not of this home"):
        home.bytes(Region(1 << 30, 8))


def test_copies_return_at_once_and_come_in_the_stream_s_order() -> None:
    gpu = FakeGpu()
    home = PinnedHome(gpu)
    region = home.allocate(64)
    gate, stream = threading.Event(), gpu.new_stream()
    stream.jobs.submit(lambda: assert_true(gate.wait(10)))
    slot = torch.full((8,), 3.0)
    back = torch.zeros(8)
    with gpu.using(stream):
        home.write(region, 32, slot)
        home.read(region, 32, back)
    assert not home.bytes(region).any()
    gate.set()
    stream.synchronize()
    assert torch.equal(back, slot)


def assert_true(value: bool) -> None:
    assert value


def read_as_casts(gpu: FakeGpu, regions: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Small integers in fp32 from the home, each tensor as a cast and on a stream of its own; then back in fp32."""
    home, found = PinnedHome(gpu), []
    for values in regions:
        home.tensor(region := home.allocate(values.nbytes), values.dtype, values.shape, (1,), 0).copy_(values)
        found.append(torch.zeros_like(values, dtype=torch.bfloat16))
        with gpu.using(gpu.new_stream()):
            home.read_cast(region, values.dtype, found[-1])
    for stream in gpu.streams:
        stream.synchronize()
    return [cast.float() for cast in found]


def test_the_waits_for_buffers_of_casts_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer is filled anew only when the copy out of it is over, on whichever stream."""
    monkeypatch.setattr(chunkc.runtime.storage.pinned, "CAST_PIECE_NBYTES", 2 * PAGE)
    regions = [torch.randint(-99, 99, (numel,)).float() for numel in (1, PAGE, 7 * PAGE + 3, 5 * PAGE)]
    right, wrong = 0, 0
    for seed in range(20):
        for event in (FakeEvent, NoWait):
            gpu = FakeGpu(longest_s=0.002)
            gpu.reseed(seed)
            monkeypatch.setattr(gpu, "new_event", event)
            same = all(map(torch.equal, read_as_casts(gpu, regions), regions))
            right, wrong = right + (same and event is FakeEvent), wrong + (not same)
    assert right == 20
    assert wrong > 0


def test_the_process_s_end_waits_for_what_is_being_unpinned_and_for_no_more() -> None:
    """A thread that comes back from a call of CUDA's when the interpreter is gone ends the process as a failure."""
    begun, may_go_on = threading.Event(), threading.Event()

    class SlowGpu(FakeGpu):
        def unpin(self, address: int) -> str | None:
            begun.set()
            may_go_on.wait()
            return None

    gpu, pinned, own = SlowGpu(), {1: PAGE, 2: PAGE}, _Unpinner()
    own.start()
    for address in list(pinned):
        own.put(_Retired(gpu, pinned, address, mmap.mmap(-1, PAGE)))
    begun.wait()
    ending = threading.Thread(target=own.end)
    ending.start()
    ending.join(0.1)
    assert ending.is_alive()
    may_go_on.set()
    ending.join()
    assert pinned == {2: PAGE}
    assert own._thread is not None
    assert not own._thread.is_alive()


def test_unpinning_waits_for_copies_under_way() -> None:
    gpu = FakeGpu(longest_s=0.01)
    home = PinnedHome(gpu)
    region = home.allocate(1 << 16)
    slot = torch.empty(1 << 14)
    home.bytes(region).fill_(1)
    with gpu.using(gpu.new_stream()):
        for _ in range(10):
            home.read(region, 0, slot)
        copied = gpu.new_event()
        copied.record(gpu.current_stream())
    home.free(region)
    gc.collect()
    unpinner.drain()
    assert gpu.pinned == {}
    assert copied.query()


@pytest.mark.parametrize("failing", [0, 1, 3])
def test_the_limit_of_pinning_is_one_clear_error(failing: int) -> None:
    """What was pinned before stays, what failed leaves nothing behind."""
    gpu = FakeGpu(lockable_nbytes=failing * PAGE)
    home = PinnedHome(gpu)
    regions = [home.allocate(PAGE) for _ in range(failing)]
    with pytest.raises(HomeError, match="cannot pin") as caught:
        home.allocate(PAGE)
    for part in ("out of memory", "ulimit -l", 'home="disk"'):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    gc.collect()
    assert len(gpu.pinned) == failing
    assert home.pinned_nbytes == failing * PAGE
    for region in regions:
        home.bytes(region).fill_(1)
        home.free(region)
    gc.collect()
    for _ in regions:
        home.allocate(PAGE)


def test_an_arena_reserves_all_chunks_or_none() -> None:
    """Each chunk is pinned by itself, so the limit shows between two; those before it are given back."""
    gpu = FakeGpu(lockable_nbytes=5 * PAGE)
    arena = Arena(PinnedHome(gpu))
    arena.reserve({Chunk("param", 0): PAGE, Chunk("param", 1): PAGE})
    assert len(gpu.pinned) == 2
    with pytest.raises(HomeError, match="cannot pin"):
        arena.reserve({Chunk("param", i): PAGE for i in range(2, 7)})
    gc.collect()
    unpinner.drain()
    assert gpu.num_pins == 6
    assert len(gpu.pinned) == 2
    assert set(arena.chunks) == {Chunk("param", 0), Chunk("param", 1)}


def test_without_pinning_it_works_and_says_what_that_costs(caplog: pytest.LogCaptureFixture) -> None:
    gpu = FakeGpu(lockable_nbytes=PAGE)
    home = PinnedHome(gpu, allow_unpinned=True)
    with caplog.at_level(logging.WARNING):
        regions = home.allocate(PAGE), home.allocate(2 * PAGE), home.allocate(PAGE)
    (record,) = caplog.records  # told once
    for part in ("unpinned", "half the rate", "a thread waits", "lockable"):
        assert part in record.getMessage()
    assert home.pinned_nbytes == PAGE
    assert [home.only_launches(region) for region in regions] == [True, False, False]
    for region in regions:
        home.tensor(region, torch.float32, (4,), (1,), 0).fill_(5.0)
        slot = torch.empty(4)
        home.read(region, 0, slot)
        gpu.compute.synchronize()
        assert slot.tolist() == [5.0] * 4


@pytest.mark.parametrize("views_pageable", [False, True])
def test_what_cannot_be_pinned_the_device_may_read_all_the_same(views_pageable: bool) -> None:
    """Parameters then need no pinned memory; optimizer states never do."""
    gpu = FakeGpu(lockable_nbytes=0, views_pageable=views_pageable)
    viewed: list[int] = []
    view = gpu.view_pageable
    gpu.view_pageable = lambda host: (viewed.append(host.nbytes()), view(host))[1]  # type: ignore[method-assign]
    arena = open_arena("cpu", gpu)
    arena.reserve({Chunk("exp_avg", 0): PAGE})
    arena.view(Chunk("exp_avg", 0), torch.float32, (4,), (1,), 16).fill_(2.0)
    if not views_pageable:
        assert not viewed
        with pytest.raises(HomeError, match="cannot pin"):
            arena.reserve({Chunk("param", 0): PAGE})
        return
    arena.reserve({Chunk("param", 0): PAGE})
    home_view = arena.view(Chunk("param", 0), torch.float32, (2, 3), (1, 2), 16)
    home_view.copy_(torch.arange(6.0).view(2, 3))
    assert viewed == [16, 24]
    assert arena.host_view(Chunk("param", 0), torch.float32, 10).tolist() == [0.0] * 4 + [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]
    assert arena.view(Chunk("param", 0), torch.float32, (0,), (1,), 0).shape == (0,)
    assert not isinstance(arena.reader(Chunk("param", 0), 0, torch.empty(4)), Launch)


@pytest.mark.parametrize("launched", [False, True])
def test_copies_of_unpinned_memory_need_a_thread_that_waits(launched: bool) -> None:
    """The driver reads such memory when it is told to copy, not when the stream is that far: too early, if launched."""
    gpu = FakeGpu(lockable_nbytes=0)
    home = PinnedHome(gpu, allow_unpinned=True)
    region, slot, link = home.allocate(PAGE), torch.zeros(4), CudaLink(gpu, "to_device")
    computed = gpu.new_event()

    def write_late() -> None:
        time.sleep(0.05)
        home.bytes(region).view(torch.float32)[:4] = 3.0

    gpu.compute.jobs.submit(write_late)
    computed.record(gpu.compute)
    job = (Launch if launched else functools.partial)(home.read, region, 0, slot)
    copied = link.submit(job, after=[CudaMark(computed)])
    copied.wait()
    assert slot.tolist() == [0.0 if launched else 3.0] * 4


def test_a_copy_to_unpinned_memory_is_over_when_it_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host reads such memory itself: no stream's order helps it."""
    found = []
    for waits in (True, False):
        gpu = FakeGpu(lockable_nbytes=0)
        home = PinnedHome(gpu, allow_unpinned=True)
        region = home.allocate(PAGE)
        gpu.compute.jobs.submit(lambda: time.sleep(0.05))
        if not waits:
            monkeypatch.setattr(FakeStream, "synchronize", lambda self: None)
        home.write(region, 0, torch.full((4,), 3.0))
        found.append(home.tensor(region, torch.float32, (4,), (1,), 0).tolist())
    assert found == [[3.0] * 4, [0.0] * 4]


def test_a_failing_unpin_is_told(caplog: pytest.LogCaptureFixture) -> None:
    gpu = FakeGpu()
    home = PinnedHome(gpu)
    home.allocate(PAGE)
    gpu.pinned.clear()
    with caplog.at_level(logging.WARNING):
        home.close()
        gc.collect()
        assert home.pinned_nbytes == 0  # blocks until the thread has tried
    assert "could not unpin" in caplog.text


def test_states_may_live_elsewhere_than_parameters() -> None:
    pinned, plain = PinnedHome(FakeGpu()), MemoryHome()
    arena = Arena(pinned, plain)
    states = {Chunk("exp_avg", i): 128 for i in range(40)}
    arena.reserve({Chunk("param", 0): 64, **states, Chunk("grad", 0): 64})
    assert len(pinned._mappings) == 2
    assert len(plain._mappings) == len(states)
    buffer = torch.empty(4)
    assert isinstance(arena.reader(Chunk("param", 0), 0, buffer), Launch)
    assert isinstance(arena.writer(Chunk("grad", 0), 0, buffer), Launch)
    assert not isinstance(arena.reader(Chunk("exp_avg", 0), 0, buffer), Launch)
    arena.writer(Chunk("exp_avg", 1), 32, torch.full((4,), 7.0))()
    assert arena.view(Chunk("exp_avg", 1), torch.float32, (4,), (1,), 32).tolist() == [7.0] * 4
    assert not arena.view(Chunk("exp_avg", 0), torch.float32, (32,), (1,), 0).any()
    arena.free([Chunk("param", 0), Chunk("exp_avg", 0)])
    gc.collect()
    assert len(pinned._mappings) == 1
    assert arena.view(Chunk("exp_avg", 1), torch.float32, (4,), (1,), 32).tolist() == [7.0] * 4
    arena.free([chunk for chunk in states if chunk != Chunk("exp_avg", 0)])
    assert not plain._mappings


def is_resident(address: int, nbytes: int) -> bool:
    """Whether the kernel has found pages for all of a map."""
    pages = (ctypes.c_ubyte * (nbytes // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), pages) == 0
    return all(page & 1 for page in pages)


def test_several_threads_find_pages_for_a_large_region() -> None:
    nbytes = 160 << 20
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    assert not is_resident(address, nbytes)
    populate(address, nbytes)
    if tuple(map(int, platform.release().split(".")[:2])) >= (5, 14):
        assert is_resident(address, nbytes)


def test_a_child_of_a_fork_neither_unpins_nor_unmaps() -> None:
    """The child has none of the memory: what lies at its address there is the child's own."""
    gpu = FakeGpu()
    home = PinnedHome(gpu)
    region = home.allocate(1 << 20)
    address = home.bytes(region).data_ptr()
    child = os.fork()
    if child == 0:
        try:
            own = map_at(address, 1 << 20)
            home.close()
            gc.collect()
            ctypes.memset(own, 1, 1 << 20)  # would be a fault if it had been unmapped
            os._exit(0 if gpu.pinned == {address: 1 << 20} else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    home.close()
    gc.collect()
    unpinner.drain()
    assert not gpu.pinned


def map_at(address: int, nbytes: int) -> int:
    """Map new memory at an address where nothing is."""
    call = ctypes.CDLL(None).mmap
    call.restype = ctypes.c_void_p
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    found = call(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    assert found == address
    return found


NUMA_MAPS = Path("/proc/self/numa_maps")
SMAPS = Path("/proc/self/smaps")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def flags_at(address: int) -> list[str]:
    """The kernel's flags of the mapping that has an address."""
    inside = False
    for line in SMAPS.read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            begin, end = (int(part, 16) for part in words[0].split("-"))
            inside = begin <= address < end
        elif inside and words[0] == "VmFlags:":
            return words[1:]
    raise AssertionError("no mapping has this address")


@pytest.mark.skipif(not (SMAPS.exists() and HUGE_PAGES.exists()), reason="this kernel has no large pages to ask for")
def test_regions_ask_for_large_pages() -> None:
    home = PinnedHome(FakeGpu())
    region = home.allocate(8 << 20)
    assert "hg" in flags_at(home.bytes(region).data_ptr())


@pytest.mark.skipif(not SMAPS.exists(), reason="this kernel does not say how it treats memory")
def test_no_child_of_a_fork_gets_a_copy() -> None:
    home = PinnedHome(FakeGpu())
    assert "dc" in flags_at(home.bytes(home.allocate(1 << 20)).data_ptr())


def test_a_system_without_them_declines_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmap.MADV_HUGEPAGE", -1, raising=False)  # an advice that no kernel knows
    home = PinnedHome(FakeGpu())
    region = home.allocate(1 << 20)
    assert int(home.bytes(region).sum()) == 0
    assert home.pinned_nbytes == 1 << 20


def policy_at(address: int) -> str:
    """Where the kernel takes pages from for the mapping that begins at an address."""
    lines = (line.split() for line in NUMA_MAPS.read_text().splitlines())
    return next(words[1] for words in lines if int(words[0], 16) == address)


@pytest.mark.skipif(not NUMA_MAPS.exists(), reason="this kernel knows of no nodes")
@pytest.mark.parametrize(("node", "expected"), [(0, "prefer:0"), (None, "default"), (900, "default")])
def test_regions_come_from_the_node_that_the_gpu_is_on(
    node: int | None, expected: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chunkc.runtime.storage.pinned._LOG_EVERY_NBYTES", 1 << 20)
    home = PinnedHome(FakeGpu(node=node))
    with caplog.at_level(logging.INFO, "chunkc"):
        region = home.allocate(1 << 20)
    assert policy_at(home.bytes(region).data_ptr()) == expected
    assert ("on the GPU's NUMA node 0 while it has room" in caplog.text) == (expected == "prefer:0")


def test_a_device_s_node_is_what_the_system_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "PCI_DEVICES", tmp_path)
    for address, text in (("0000:65:00.0", "1\n"), ("0000:17:00.0", "-1\n")):
        (tmp_path / address).mkdir()
        (tmp_path / address / "numa_node").write_text(text)
    assert [numa.node_of(f"0000:{bus}:00.0") for bus in ("65", "17", "ca")] == [1, None, None]


@pytest.mark.second_tier
@pytest.mark.skipif(not NUMA_MAPS.exists(), reason="this kernel knows of no nodes")
def test_what_numactl_has_chosen_stays(tmp_path: Path) -> None:
    script = """
import ctypes, mmap
from chunkc.runtime.device import numa
INTERLEAVE, SET_MEMPOLICY = 3, {"x86_64": 238, "aarch64": 237}[numa.platform.machine()]
assert numa._syscall(SET_MEMPOLICY, INTERLEAVE, ctypes.byref(ctypes.c_uint64(1)), ctypes.c_ulong(65)) == 0
memory = mmap.mmap(-1, 1 << 20)
assert not numa.prefer_node(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 1 << 20, 0)
"""
    program = tmp_path / "program.py"
    program.write_text(script)
    done = forked.run(program)
    assert done.returncode == 0, done.stderr
