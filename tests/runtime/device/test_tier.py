"""The compute tier: exact slots, its meter, and copies that are waited for."""

from __future__ import annotations

import threading

import pytest
import torch
from store_cases import raiser

from chunkc.ir.errors import HomeError, StreamError
from chunkc.runtime.device import cpu_allocator
from chunkc.runtime.device.tier import CpuTier

pytestmark = pytest.mark.timeout(30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_slot_is_flat_and_charged_to_the_byte(dtype: torch.dtype) -> None:
    cpu_allocator.install()
    tier = CpuTier()
    before = cpu_allocator.current_nbytes()
    slot = tier.allocate_slot(1001, dtype)
    assert (slot.shape, slot.dtype, slot.device) == ((1001,), dtype, tier.device)
    assert cpu_allocator.current_nbytes() - before == 1001 * dtype.itemsize == slot.untyped_storage().nbytes()
    del slot
    assert cpu_allocator.current_nbytes() == before


def test_the_lap_peak_starts_anew_each_time() -> None:
    cpu_allocator.install()
    tier = CpuTier()
    tier.lap_peak_nbytes()
    base = cpu_allocator.current_nbytes()
    tier.allocate_slot(1 << 20, torch.uint8)
    assert tier.lap_peak_nbytes() == base + (1 << 20)
    assert tier.lap_peak_nbytes() == base


def test_without_a_meter_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """None, not a made-up number."""
    monkeypatch.setattr(cpu_allocator, "_library", None)
    assert CpuTier().lap_peak_nbytes() is None


def test_the_two_directions_do_not_wait_for_each_other() -> None:
    """Each job waits for a sign from the other stream's: on one thread neither would end."""
    tier, there, back = CpuTier(), threading.Event(), threading.Event()

    def go() -> None:
        there.set()
        assert back.wait(10)

    def come() -> None:
        back.set()
        assert there.wait(10)

    events = [tier.links["to_device"].submit(go), tier.links["to_home"].submit(come)]
    for event in events:
        event.wait()


def test_drain_waits_for_both_directions() -> None:
    tier, done = CpuTier(delay=lambda: 0.05), []
    tier.links["to_device"].submit(lambda: done.append("to_device"))
    tier.links["to_home"].submit(lambda: done.append("to_home"))
    assert done == []
    tier.drain()
    assert sorted(done) == ["to_device", "to_home"]


@pytest.mark.parametrize("stream", ["to_device", "to_home", "from_disk", "to_disk"])
def test_who_holds_or_drains_is_told_what_a_copy_raised(stream: str) -> None:
    tier = CpuTier()
    with pytest.raises(HomeError, match="on fire"):
        tier.hold_for(tier.links[stream].submit(raiser(HomeError("the disk is on fire"))))
    tier.links[stream].submit(raiser(HomeError("the disk is on fire")))
    with pytest.raises(HomeError, match="on fire"):
        tier.drain()
    tier.links[stream].submit(raiser(ZeroDivisionError("oops")))
    with pytest.raises(StreamError, match="oops") as caught:
        tier.drain()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    tier.drain()  # told once


def test_on_a_cpu_the_host_computes_and_waits_itself() -> None:
    tier, done, gate = CpuTier(), [], threading.Event()
    tier.enqueue(done.append, 1)
    assert done == [1]
    assert tier.mark() == ()
    threading.Timer(0.05, gate.set).start()
    tier.hold_for(tier.links["to_home"].submit(lambda: done.append(gate.wait(10))))
    assert done == [1, True]
    tier.materialise()
