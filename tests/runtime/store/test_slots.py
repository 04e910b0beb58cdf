"""Slots on the compute tier: every transition between chunk states, and copies that fail."""

from __future__ import annotations

import gc
import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from store_cases import (
    EMPTY,
    fetch,
    layout_of,
    make_parameters,
    placed,
    put_back,
    raiser,
    random_gradients,
    sink_all,
    taking,
)  # fmt: skip

from chunkc.ir.errors import ChunkStateError, HomeError, StreamError, UnsupportedError
from chunkc.ir.layout import Chunk
from chunkc.ir.links import QUEUES
from chunkc.runtime.device.streams import WorkerStream
from chunkc.runtime.device.tier import CpuTier
from chunkc.runtime.storage.arena import Arena
from chunkc.runtime.storage.homes import MemoryHome
from chunkc.runtime.store.slots import ChunkState, advance
from chunkc.runtime.store.store import ChunkStore

pytestmark = pytest.mark.timeout(30)


def test_debug_fills_slots_with_nan_when_taken_and_given_back() -> None:
    store, _ = placed()
    store.prefetch(Chunk("grad", 0))  # no gradients yet: nothing is read
    store.slots.wait(Chunk("grad", 0))
    fresh = store.slots.slot(Chunk("grad", 0)).buffer
    assert fresh.isnan().all()
    store.slots.evict(Chunk("grad", 0))
    fetch(store, Chunk("param", 0))
    buffer = store.slots.slot(Chunk("param", 0)).buffer
    view = store.views.slot_view(Chunk("param", 0), "conv")
    assert not view.isnan().any()
    store.slots.evict(Chunk("param", 0))
    assert buffer.isnan().all()
    assert view.isnan().all()  # a reader that came too late
    assert store.slots.slot(Chunk("param", 0)).buffer is None


def test_without_debug_a_released_slot_is_left_alone() -> None:
    store, parameters = placed(debug=False)
    fetch(store, Chunk("param", 2))
    buffer = store.slots.slot(Chunk("param", 2)).buffer
    store.slots.evict(Chunk("param", 2))
    assert torch.equal(buffer.view(2, 64), parameters["last"])


def test_a_slot_that_is_taken_in_inference_mode_is_written_to_outside_of_it() -> None:
    """By links' threads, and by later phases."""
    store, _ = placed()
    with torch.inference_mode():
        fetch(store, Chunk("param", 0))
    store.slots.slot(Chunk("param", 0)).buffer.zero_()


def test_only_a_chunk_that_is_there_and_ready_is_read() -> None:
    store, _ = placed()
    for prepare in (lambda: None, lambda: store.prefetch(Chunk("param", 0))):
        prepare()
        with pytest.raises(ChunkStateError, match="conv is read from chunk param:0"):
            store.views.slot_view(Chunk("param", 0), "conv")
        with pytest.raises(ChunkStateError):
            store.slots.begin_compute(Chunk("param", 0))
    store.slots.wait(Chunk("param", 0))
    store.views.slot_view(Chunk("param", 0), "conv")
    with pytest.raises(ChunkStateError, match="HOLD to PREFETCHING"):
        store.prefetch(Chunk("param", 0))


def test_a_refused_fetch_of_gradients_leaves_them_as_they_are() -> None:
    store, parameters = placed()
    fetch(store, Chunk("grad", 0))
    parameters["conv"].grad = mine = torch.ones_like(parameters["conv"])
    with pytest.raises(ChunkStateError, match="HOLD to PREFETCHING"):
        store.prefetch(Chunk("grad", 0))
    assert parameters["conv"].grad is mine


def test_a_chunk_under_a_copy_or_in_use_is_not_evicted() -> None:
    store, _ = placed()
    store.prefetch(Chunk("param", 0))
    with pytest.raises(ChunkStateError, match="PREFETCHING to FREE"):
        store.slots.evict(Chunk("param", 0))
    store.slots.wait(Chunk("param", 0))
    store.slots.begin_compute(Chunk("param", 0))
    with pytest.raises(ChunkStateError, match="COMPUTE to FREE"):
        store.slots.evict(Chunk("param", 0))
    store.slots.end_compute(Chunk("param", 0), wrote=True)
    with pytest.raises(ChunkStateError, match="before it was written back"):
        store.slots.evict(Chunk("param", 0))
    store.write_back(Chunk("param", 0))
    with pytest.raises(ChunkStateError, match="EVICTING to FREE"):
        store.slots.evict(Chunk("param", 0))
    store.slots.wait(Chunk("param", 0))
    store.slots.evict(Chunk("param", 0))
    assert store.slots.present == frozenset()


def test_a_clean_chunk_is_not_copied_home() -> None:
    store, _ = placed()
    fetch(store, Chunk("param", 0))
    put_back(store, Chunk("param", 0))
    nbytes = store.layout.groups[0].nbytes("param")
    assert (store.slots.traffic.to_device_nbytes, store.slots.traffic.to_home_nbytes) == (nbytes, 0)
    fetch(store, Chunk("param", 0))
    store.slots.begin_compute(Chunk("param", 0))
    store.slots.end_compute(Chunk("param", 0), wrote=True)
    put_back(store, Chunk("param", 0))
    assert (store.slots.traffic.to_device_nbytes, store.slots.traffic.to_home_nbytes) == (2 * nbytes, nbytes)


def test_waiting_is_measured() -> None:
    parameters = make_parameters()
    store = ChunkStore(EMPTY, Arena(MemoryHome()), CpuTier(delay=lambda: 0.03))
    store.place(layout_of(parameters), parameters, frozenset())
    fetch(store, Chunk("param", 0))
    assert 0.02 < store.slots.traffic.wait_s < 5


@pytest.mark.parametrize("error", [HomeError("the disk is on fire"), ZeroDivisionError("oops")])
def test_a_failed_read_is_raised_at_the_wait_and_releases_all_the_same(error: Exception) -> None:
    store, parameters = placed()
    read = store.arena.home.read
    store.arena.home.read = raiser(error)  # type: ignore[method-assign]
    store.prefetch(Chunk("param", 0))
    store.arena.home.read = read  # type: ignore[method-assign]
    store.prefetch(Chunk("param", 1))
    expected = HomeError if isinstance(error, HomeError) else StreamError
    with pytest.raises(expected, match=str(error)):
        store.slots.wait(Chunk("param", 0))
    with pytest.raises(expected, match=str(error)):
        store.release_slots()
    assert store.slots.present == frozenset()
    assert all(slot.buffer is None for slot in store.slots._slots.values())
    store.release_slots()  # nothing is left to tell
    fetch(store, Chunk("param", 0))
    assert torch.equal(store.views.slot_view(Chunk("param", 0), "conv"), parameters["conv"])


def test_release_writes_dirty_chunks_home() -> None:
    """An interrupted step: what is in slots, in whatever state, is brought home."""
    store, parameters = placed()
    fetch(store, Chunk("grad", 0))
    gradients = random_gradients(1, parameters)
    for name, gradient in gradients.items():
        store.gradients.sink(name, Chunk("grad", 0), taking(gradient), owned=True)
    fetch(store, Chunk("param", 0))
    store.slots.begin_compute(Chunk("param", 0))
    store.prefetch(Chunk("param", 2))
    store.release_slots()
    assert {slot.state for slot in store.slots._slots.values()} == {ChunkState.FREE}
    assert all(torch.equal(parameters[name].grad, gradient) for name, gradient in gradients.items())
    assert torch.equal(parameters["conv"], make_parameters()["conv"])


def test_release_ends_a_write_back_under_way() -> None:
    parameters = make_parameters()
    store = ChunkStore(EMPTY, Arena(MemoryHome()), CpuTier(delay=lambda: 0.03), True)
    store.place(layout_of(parameters), parameters, frozenset())
    fetch(store, Chunk("param", 2))
    store.slots.begin_compute(Chunk("param", 2)).fill_(7)
    store.slots.end_compute(Chunk("param", 2), wrote=True)
    store.write_back(Chunk("param", 2))
    store.release_slots()
    assert parameters["last"].tolist() == [[7.0] * 64] * 2


def test_a_gradient_that_could_not_be_written_home_is_none() -> None:
    store, parameters = placed()
    fetch(store, Chunk("grad", 0))
    for name, gradient in random_gradients(1, parameters).items():
        store.gradients.sink(name, Chunk("grad", 0), taking(gradient), owned=True)
    fetch(store, Chunk("grad", 2))
    last = torch.randn(2, 64)
    store.gradients.sink("last", Chunk("grad", 2), taking(last), owned=True)
    write = store.arena.home.write
    store.arena.home.write = raiser(HomeError("the disk is on fire"))  # type: ignore[method-assign]
    store.write_back(Chunk("grad", 0))
    with pytest.raises(HomeError, match="on fire"):
        store.slots.wait(Chunk("grad", 0))
    store.arena.home.write = write  # type: ignore[method-assign]
    with pytest.raises(HomeError, match="on fire"):
        store.release_slots()
    assert store.slots.present == frozenset()
    assert parameters["conv"].grad is None
    assert parameters["matrix"].grad is None
    assert torch.equal(parameters["last"].grad, last)  # the other chunk did get home
    gradients = random_gradients(2, parameters)
    sink_all(store, gradients, Chunk("grad", 0))
    assert torch.equal(parameters["conv"].grad, gradients["conv"])


def test_a_dead_parameter_is_named() -> None:
    store, parameters = placed()
    del parameters["matrix"]
    gc.collect()
    assert set(store.views.parameters()) == {"conv", "frozen", "last"}
    assert store.views.parameter("conv") is parameters["conv"]
    with pytest.raises(UnsupportedError, match=r"matrix no longer exists.*keep the model alive, or compile"):
        store.views.parameter("matrix")
    store.prefetch(Chunk("grad", 0))  # the others' gradients still move
    store.release_slots()
    assert store.slots.present == frozenset()
    store.place(store.layout, {}, frozenset({0}))  # the others of its group still move
    assert torch.equal(parameters["conv"], make_parameters()["conv"])


def test_a_lost_gradient_of_a_dead_parameter_does_not_stop_the_release() -> None:
    """All slots are given back, and the failed copy is what is raised."""
    store, parameters = placed()
    fetch(store, Chunk("grad", 0))
    for name, gradient in random_gradients(1, parameters).items():
        store.gradients.sink(name, Chunk("grad", 0), taking(gradient), owned=True)
    fetch(store, Chunk("param", 2))
    del parameters["conv"]
    gc.collect()
    store.arena.home.write = raiser(HomeError("the disk is on fire"))  # type: ignore[method-assign]
    with pytest.raises(HomeError, match="on fire"):
        store.release_slots()
    assert store.slots.present == frozenset()
    assert parameters["matrix"].grad is None


def test_a_store_dies_with_its_user() -> None:
    """The store holds parameters weakly, and its threads end with it."""
    store, parameters = placed()
    fetch(store, Chunk("param", 0))
    store.release_slots()
    parameter = parameters["conv"]
    del store
    gc.collect()
    assert torch.equal(parameter, make_parameters()["conv"])  # a home view outlives its store
    assert math.isfinite(float(parameter.detach().sum()))
    assert isinstance(CpuTier().links["to_device"], WorkerStream)


@pytest.mark.parametrize("holds", ["nothing", "everything"])
def test_copies_queue_on_the_link_of_their_home(holds: Any) -> None:
    parameters, tier = make_parameters(), CpuTier()
    store = ChunkStore(EMPTY, Arena(MemoryHome()), tier, True)
    store.place(replace(layout_of(parameters), disk_holds=holds), parameters, frozenset())
    fetch(store, Chunk("grad", 2))
    store.gradients.sink("last", Chunk("grad", 2), taking(torch.ones(2, 64)), owned=True)
    put_back(store, Chunk("grad", 2))
    fetch(store, Chunk("param", 0))
    used = {name for name in QUEUES if tier.links[name].busy_s}
    assert used == ({"to_device", "to_home"} if holds == "nothing" else {"from_disk", "to_disk"})
    assert tier.links.busy_s(inward=True) + tier.links.busy_s(inward=False) == sum(tier.links[n].busy_s for n in used)
    store.release_slots()


@pytest.mark.parametrize("waited", [False, True])
def test_a_host_that_reads_home_memory_waits_for_the_write_back(waited: bool) -> None:
    parameters = make_parameters()
    store = ChunkStore(EMPTY, Arena(MemoryHome()), CpuTier(delay=lambda: 0.03), True)
    store.place(layout_of(parameters), parameters, frozenset())
    fetch(store, Chunk("grad", 2))
    store.gradients.sink("last", Chunk("grad", 2), taking(torch.full((2, 64), 3.0)), owned=True)
    store.write_back(Chunk("grad", 2))
    if waited:
        store.slots.wait(Chunk("grad", 2))
        store.slots.evict(Chunk("grad", 2))
    else:
        assert not parameters["last"].grad.any()
    store.slots.await_home(Chunk("grad", 2))
    assert (parameters["last"].grad == 3.0).all()
    store.release_slots()


ALLOWED = (
    ("FREE", "PREFETCHING"),  # a slot is taken
    ("PREFETCHING", "HOLD"),  # waited for
    ("HOLD", "COMPUTE"),
    ("COMPUTE", "HOLD"),
    ("HOLD", "EVICTING"),  # written back
    ("EVICTING", "HOLD"),  # waited for
    ("HOLD", "FREE"),  # the slot is given back
)
ILLEGAL = sorted(set(product(ChunkState.__members__, repeat=2)) - set(ALLOWED))


@pytest.mark.parametrize(("current", "new"), ALLOWED)
def test_an_allowed_transition_gives_the_new_state(current: str, new: str) -> None:
    assert advance(Chunk("param", 3), ChunkState[current], ChunkState[new]) is ChunkState[new]


@pytest.mark.parametrize(("current", "new"), ILLEGAL)
def test_an_illegal_transition_names_the_chunk_and_both_states(current: str, new: str) -> None:
    with pytest.raises(ChunkStateError, match=rf"^chunk grad:7 .*from {current} to {new}$"):
        advance(Chunk("grad", 7), ChunkState[current], ChunkState[new])
