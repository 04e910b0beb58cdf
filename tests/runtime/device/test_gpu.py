"""The door to CUDA itself. All but the first test need a GPU; what is above the door is tested without one."""

from __future__ import annotations

import gc
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from chunkc.ir.errors import UnsupportedError
from chunkc.runtime.device.cuda import CudaTier, memory_limit
from chunkc.runtime.device.gpu import TorchGpu, has_kernels_for
from chunkc.runtime.device.streams import Launch
from chunkc.runtime.storage.homes import Region
from chunkc.runtime.storage.pinned import PinnedHome
from chunkc.runtime.storage.staging import StagedDiskHome

_skip = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def needs_gpu(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.gpu(_skip(test))


pytestmark = pytest.mark.timeout(120)

MIB = 1 << 20
LONG_CYCLES = 200_000_000
"""A kernel of about a tenth of a second."""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(UnsupportedError, match="no CUDA device"):
        TorchGpu()


@pytest.mark.parametrize(
    ("capability", "built_for", "expected"),
    [
        ((7, 0), ["sm_75", "sm_80", "compute_120"], False),
        ((7, 0), ["sm_50", "sm_70"], True),
        ((8, 6), ["sm_80"], True),
        ((8, 0), ["sm_86"], False),
        ((9, 0), ["sm_80"], False),
        ((12, 1), ["sm_90", "compute_90"], True),
        ((9, 4), ["gfx942"], True),
    ],
)
def test_a_build_of_torch_has_kernels_for_a_device(
    capability: tuple[int, int], built_for: list[str], expected: bool
) -> None:
    assert has_kernels_for(capability, built_for) is expected


def test_memory_that_torch_would_copy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    other = torch.zeros(16, dtype=torch.uint8)
    monkeypatch.setattr(torch, "as_tensor", lambda *_, **__: other)
    gpu = object.__new__(TorchGpu)
    gpu.device = torch.device("cuda:1")
    monkeypatch.setattr(gpu, "_driver_says", lambda attribute: True)
    assert gpu.view(other.data_ptr(), 16, None) is other
    with pytest.raises(UnsupportedError, match=r"cuda:1 cannot address .* in place.*CUDA_VISIBLE_DEVICES"):
        gpu.view(other.data_ptr() + 1, 15, None)
    monkeypatch.setattr(gpu, "_driver_says", lambda attribute: attribute != 91)
    with pytest.raises(UnsupportedError, match="addresses of its own"):
        gpu.view(other.data_ptr(), 16, None)


@pytest.fixture
def gpu() -> Iterator[TorchGpu]:
    yield TorchGpu()
    torch.cuda.synchronize()


@needs_gpu
@pytest.mark.arithmetic
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_home_view_is_host_memory_in_place(gpu: TorchGpu, dtype: torch.dtype) -> None:
    home = PinnedHome(gpu)
    region = home.allocate(MIB)
    view = home.tensor(region, dtype, (64, 32), (1, 64), 256)
    assert view.device == gpu.device
    assert view.stride() == (1, 64)
    view.copy_(torch.arange(2048, device=gpu.device).view(64, 32))
    torch.cuda.synchronize()
    flat = home.bytes(region)[256 : 256 + 2048 * dtype.itemsize].view(dtype)
    assert torch.equal(flat, torch.arange(2048).view(64, 32).t().reshape(-1).to(dtype))
    flat.fill_(3.0)
    assert (view == 3.0).all().item()
    home.free(region)
    gc.collect()
    assert (view == 3.0).all().item()  # it keeps its memory
    assert home.pinned_nbytes == MIB
    del view
    gc.collect()
    assert home.pinned_nbytes == 0


@needs_gpu
@pytest.mark.arithmetic
def test_a_pin_that_fails_leaves_nothing_for_the_next_kernel(gpu: TorchGpu) -> None:
    memory = mmap.mmap(-1, MIB)
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    assert gpu.pin(address, MIB) is None
    assert gpu.pin(address, MIB) is not None  # pinned already
    assert torch.ones(4, device=gpu.device).sum().item() == 4.0
    assert gpu.unpin(address) is None
    assert gpu.unpin(address) is not None
    assert torch.ones(4, device=gpu.device).sum().item() == 4.0


@needs_gpu
@pytest.mark.memory_and_values
def test_streams_are_no_others(gpu: TorchGpu) -> None:
    """torch hands out 32 in turn: from the 33rd on they are somebody else's, too."""
    torch_s = {torch.cuda.Stream(gpu.device).cuda_stream for _ in range(64)}
    streams = [gpu.new_stream() for _ in range(40)]
    handles = {stream.cuda_stream for stream in streams}
    assert len(torch_s) == 32
    assert len(handles) == 40
    assert not handles & torch_s
    with gpu.using(streams[0]):
        x = torch.ones(4, device=gpu.device)
        assert gpu.current_stream() == streams[0]
    streams[0].synchronize()
    assert x.device == gpu.device
    del streams
    gc.collect()
    again = [gpu.new_stream() for _ in range(40)]
    assert {stream.cuda_stream for stream in again} == handles


@needs_gpu
@pytest.mark.real_gpu
def test_a_round_trip_does_not_hold_the_host_and_keeps_its_order(gpu: TorchGpu) -> None:
    """Behind a long kernel: the write-back waits for it, the compute stream for the write-back, the host for none."""
    tier, home = CudaTier(gpu), PinnedHome(gpu)
    region = home.allocate(4 * MIB)
    slot, back = (tier.allocate_slot(MIB, torch.float32) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG_CYCLES)
    slot.fill_(2.0)
    out = tier.links["to_home"].submit(_launch(home.write, region, slot), after=tier.mark())
    tier.hold_for(out)
    slot.fill_(-1.0)
    into = tier.links["to_device"].submit(_launch(home.read, region, back), after=tier.mark())
    assert not out.done()
    tier.hold_for(into)
    assert (back == 2.0).all().item()
    tier.drain()
    assert tier.links["to_home"].busy_s > 0.0
    assert tier.links["to_device"].busy_s > 0.0


@needs_gpu
@pytest.mark.arithmetic
def test_a_disk_behind_the_gpu(gpu: TorchGpu, tmp_path: Path) -> None:
    tier = CudaTier(gpu)
    home = StagedDiskHome(str(tmp_path), gpu, PinnedHome(gpu), piece_nbytes=MIB // 4)
    region = home.allocate(4 * MIB + 12)
    data = torch.randn(MIB + 3, device=gpu.device)
    slot, back = data.clone(), torch.zeros_like(data)
    out = tier.links["to_home"].submit(lambda: home.write(region, 0, slot), after=tier.mark())
    tier.hold_for(out)
    slot.zero_()
    assert torch.equal(home.tensor(region, torch.float32, (MIB + 3,), (1,), 0), data.cpu())
    into = tier.links["to_device"].submit(lambda: home.read(region, 0, back), after=tier.mark())
    tier.hold_for(into)
    assert torch.equal(back, data)


@needs_gpu
@pytest.mark.arithmetic
@pytest.mark.files_in_place
def test_a_file_in_place(gpu: TorchGpu, tmp_path: Path) -> None:
    """Eager code reads and writes the file through a tensor of the device's, by kernels and by copies."""
    if (problem := gpu.cannot_view_pageable()) is not None:
        with pytest.raises(UnsupportedError, match="reads files in place"):
            StagedDiskHome(str(tmp_path), gpu, PinnedHome(gpu), views_on_device=True)
        pytest.skip(problem)
    home = StagedDiskHome(str(tmp_path), gpu, PinnedHome(gpu), views_on_device=True)
    region = home.allocate(4 * MIB)
    view = home.tensor(region, torch.float32, (1000, 1000), (1, 1000), 4096)
    assert view.device == gpu.device
    values = torch.randn(1000, 1000)
    host = home.bytes(region)[4096 : 4096 + 4_000_000].view(torch.float32).view(1000, 1000).t()
    host.copy_(values)
    assert torch.equal(view + 1.0, values.to(gpu.device) + 1.0)
    assert torch.equal(view.cpu(), values)
    assert torch.equal(view.clone(), values.to(gpu.device))
    view.mul_(2.0)
    torch.cuda.synchronize()
    assert torch.equal(host, values * 2.0)
    for source in (values, values.to(gpu.device), values.to(gpu.device).t().contiguous().t()):
        view.zero_()
        view.copy_(source)
        torch.cuda.synchronize()
        assert torch.equal(host, values)
    flat, back = view.t().reshape(-1), torch.empty(1_000_000, device=gpu.device)
    home.read(region, 4096, back)
    assert torch.equal(back, flat)
    home.write(region, 4096, -back)
    assert torch.equal(view, -values.to(gpu.device))


@needs_gpu
def test_slots_are_metered_to_the_allocator_s_rounding(gpu: TorchGpu) -> None:
    tier = CudaTier(gpu)
    before = torch.cuda.memory_allocated(gpu.device)
    tier.lap_peak_nbytes()
    slot = tier.allocate_slot(MIB, torch.float32)
    assert torch.cuda.memory_allocated(gpu.device) - before == 4 * MIB
    del slot
    assert tier.lap_peak_nbytes() == before + 4 * MIB  # type: ignore[operator]
    assert tier.lap_peak_nbytes() == before


@needs_gpu
def test_the_memory_limit_holds(gpu: TorchGpu) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    with memory_limit(torch.cuda.memory_reserved() + 64 * MIB, gpu.device):
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(256 * MIB, dtype=torch.uint8, device=gpu.device)
        torch.empty(16 * MIB, dtype=torch.uint8, device=gpu.device)
    torch.empty(256 * MIB, dtype=torch.uint8, device=gpu.device)


def _launch(call: Callable[..., None], region: Region, tensor: torch.Tensor) -> Launch:
    return Launch(call, region, 0, tensor)
