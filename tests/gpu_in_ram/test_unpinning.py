"""Memory that nobody views any more is unpinned by a thread: no finalizer waits, nor breaks what a user is about."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import cuda_in_ram
import pytest
import torch
from device_process import on_a_device

from chunkc.runtime.device.cuda import CudaTier
from chunkc.runtime.device.gpu import TorchGpu
from chunkc.runtime.device.streams import Launch
from chunkc.runtime.storage.pinned import PinnedHome, unpinner

MIB = 1 << 20


@pytest.fixture(autouse=True)
def late() -> Iterator[None]:
    torch.cuda.init()
    with cuda_in_ram.choose(late=1, late_us=0):
        yield


@pytest.fixture
def home() -> PinnedHome:
    return PinnedHome(TorchGpu())


def drop_one(home: PinnedHome) -> None:
    """A region and its only view."""
    region = home.allocate(MIB)
    view = home.tensor(region, torch.uint8, (MIB,), (1,), 0)
    home.free(region)
    del view
    gc.collect()


def test_a_view_that_goes_holds_nobody_up(home: PinnedHome) -> None:
    """The driver takes its time, and the device has work that takes longer."""
    with cuda_in_ram.choose(register_us=300_000):
        region = home.allocate(MIB)
        view = home.tensor(region, torch.uint8, (MIB,), (1,), 0)
        home.free(region)
        cuda_in_ram.enqueue(torch.cuda.current_stream().cuda_stream, lambda: time.sleep(0.3))
        began_s = time.perf_counter()
        del view
        assert time.perf_counter() - began_s < 0.2
        assert home.pinned_nbytes == 0
        assert time.perf_counter() - began_s >= 0.6


@pytest.mark.parametrize("whose", ["a link's", "the current one", "that of a finalizer's thread"])
def test_memory_stays_until_the_streams_that_use_it_are_done(home: PinnedHome, whose: str) -> None:
    tier, side = CudaTier(home._gpu, meter=False), torch.cuda.Stream()
    region, slot = home.allocate(MIB), torch.full((MIB,), 7, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    ended: list[float] = []

    def work() -> None:
        time.sleep(0.3)
        ended.append(time.perf_counter())

    if whose == "a link's":
        home_link = tier.links["to_home"]
        cuda_in_ram.enqueue(home_link._stream.cuda_stream, work)
        home_link.submit(Launch(home.write, region, 0, slot))
        home.free(region)
    else:
        stream = side if whose == "that of a finalizer's thread" else torch.cuda.current_stream()
        with torch.cuda.stream(stream):
            view = home.tensor(region, torch.uint8, (MIB,), (1,), 0)
            cuda_in_ram.enqueue(stream.cuda_stream, work)
            view.copy_(slot)
            home.free(region)
            del view
    gc.collect()
    unpinner.drain()
    assert ended, "unpinned and unmapped under a copy"


def test_no_capture_of_a_graph_is_broken(home: PinnedHome) -> None:
    drop_one(home)
    unpinner.drain()
    region = home.allocate(MIB)
    broken = cuda_in_ram.num_broken_captures()
    with cuda_in_ram.choose(capturing=0):
        cuda_in_ram.configure_now(capturing=1)
        home.free(region)
        gc.collect()
        unpinner.drain()
        pinned = dict(home._pinned)
        cuda_in_ram.configure_now(capturing=0)
    assert pinned == {}
    assert cuda_in_ram.num_broken_captures() == broken


def test_on_a_broken_device_the_books_are_right_and_it_is_said(
    home: PinnedHome, caplog: pytest.LogCaptureFixture
) -> None:
    region = home.allocate(MIB)
    cuda_in_ram.break_device()
    try:
        home.free(region)
        gc.collect()
        assert home.pinned_nbytes == 0
    finally:
        cuda_in_ram.break_device(0)
    assert "could not unpin 1.00 MiB" in caplog.text
    drop_one(home)
    assert home.pinned_nbytes == 0


def test_a_process_that_ends_meanwhile_ends_well() -> None:
    """The interpreter ends no thread that is in a call of the driver's: that would abort the process."""
    script = """
import gc, time
from chunkc.runtime.device.gpu import TorchGpu
from chunkc.runtime.storage.pinned import PinnedHome
home = PinnedHome(TorchGpu())
home.allocate(1 << 20)
home.close()
gc.collect()
time.sleep(0.1)  # the thread is in the driver
"""
    on_a_device("register_us=1000000", script)  # which looks at the exit code
