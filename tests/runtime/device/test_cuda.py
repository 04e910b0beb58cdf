"""The CUDA tier's order, edge by edge, on a fake GPU whose streams stand still until a gate opens; its links drained,
and exchanges between ranks launched in one order.

Nothing here depends on time: what must wait is shown to wait while the gate is shut, and to be right once it is open.
`test_queued.py` trains with the same tier.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from fake_gpu import FakeGpu, FakeStream, QueuedTier
from store_cases import Gate, fetch, layout_of, opened_soon, put_back, queued_store, raiser
from torch import Tensor, nn

from chunkc.ir.errors import HomeError, OptionsError, StreamError
from chunkc.ir.layout import Chunk
from chunkc.ir.links import GATHER, SCATTER
from chunkc.runtime.device import cuda
from chunkc.runtime.device.cuda import CudaLink, CudaTier
from chunkc.runtime.device.streams import Launch, WorkerStream
from chunkc.runtime.storage.homes import Home
from chunkc.runtime.storage.pinned import PinnedHome
from chunkc.runtime.storage.staging import StagedDiskHome
from chunkc.runtime.store.store import ChunkStore

pytestmark = pytest.mark.timeout(60)

NUMEL = 16


def assert_true(value: bool) -> None:
    assert value


def shut(stream: FakeStream) -> Gate:
    """Hold a stream up at one point, until the gate is opened."""
    gate = Gate()
    stream.jobs.submit(gate.wait)
    return gate


@pytest.fixture
def gpu() -> FakeGpu:
    return FakeGpu()


@pytest.fixture(params=["pinned", "disk"])
def home(request: pytest.FixtureRequest, gpu: FakeGpu, tmp_path: Path) -> Home:
    pinned = PinnedHome(gpu)
    return pinned if request.param == "pinned" else StagedDiskHome(str(tmp_path), gpu, pinned, piece_nbytes=32)


def placed(gpu: FakeGpu, home: Home) -> tuple[ChunkStore, QueuedTier, dict[str, nn.Parameter]]:
    """Two parameters of NUMEL ones and twos, each a group of its own, on a tier that computes behind the host."""
    parameters = {name: nn.Parameter(torch.full((NUMEL,), i + 1.0)) for i, name in enumerate("ab")}
    store = queued_store(home, gpu)
    store.place(layout_of(parameters, (("a",), ("b",))), parameters, frozenset())
    return store, store.tier, parameters


def read(tier: QueuedTier, tensor: Tensor) -> list[float]:
    """A tensor's values, as computation finds them that is enqueued now; filled in when it gets there."""
    seen: list[float] = []
    tier.enqueue(lambda: seen.extend(tensor.tolist()))
    return seen


def taking(value: float) -> Callable[[], Tensor]:
    return lambda: torch.full((NUMEL,), value)


def test_a_gradient_of_the_user_s_own_goes_home_in_the_stream_s_order(gpu: FakeGpu, home: Home) -> None:
    """The user put another tensor into `.grad`; the kernel that makes its values has not run yet."""
    store, tier, parameters = placed(gpu, home)
    gate = shut(gpu.compute)
    own = torch.zeros(NUMEL)
    tier.enqueue(own.fill_, 3.0)
    parameters["a"].grad = own
    store.prefetch(Chunk("grad", 0))
    gate.opened.set()
    store.slots.wait(Chunk("grad", 0))
    store.gradients.sink("a", Chunk("grad", 0), taking(4.0), owned=True)
    put_back(store, Chunk("grad", 0))
    seen = read(tier, parameters["a"].grad)
    tier.settle()
    assert seen == [7.0] * NUMEL


def written_back(store: ChunkStore) -> None:
    fetch(store, Chunk("grad", 0))
    store.gradients.sink("a", Chunk("grad", 0), taking(4.0), owned=True)
    store.write_back(Chunk("grad", 0))


@pytest.mark.parametrize("waited", ["before", "after"])
def test_a_host_that_reads_home_memory_waits_for_the_write_back(gpu: FakeGpu, home: Home, waited: str) -> None:
    """As an update on CPU threads does; whether the plan has come to the write-back's wait already or not."""
    store, tier, parameters = placed(gpu, home)
    gate = shut(gpu.compute)
    written_back(store)
    if waited == "after" and isinstance(home, PinnedHome):
        store.slots.wait(Chunk("grad", 0))
        store.slots.evict(Chunk("grad", 0))
    assert parameters["a"].grad.tolist() == [0.0] * NUMEL  # too early: this is what the wait is for
    opened_soon(gate)
    store.slots.await_home(Chunk("grad", 0))
    assert parameters["a"].grad.tolist() == [4.0] * NUMEL
    tier.settle()


def test_a_host_that_reads_home_memory_waits_for_eager_code_too(gpu: FakeGpu, home: Home) -> None:
    store, tier, parameters = placed(gpu, home)
    gate = shut(gpu.compute)
    tier.enqueue(parameters["b"].data.fill_, 9.0)
    assert parameters["b"].tolist() == [2.0] * NUMEL
    opened_soon(gate)
    store.slots.await_home(Chunk("param", 1))
    assert parameters["b"].tolist() == [9.0] * NUMEL


def test_releasing_slots_brings_gradients_home_in_order(gpu: FakeGpu, home: Home) -> None:
    """An interrupted step: the gradient's kernel has not run when the slots are given back."""
    store, tier, parameters = placed(gpu, home)
    store.prefetch(Chunk("grad", 0))
    store.prefetch(Chunk("param", 1))
    store.slots.wait(Chunk("grad", 0))
    gate = shut(gpu.compute)
    store.gradients.sink("a", Chunk("grad", 0), taking(6.0), owned=True)
    opened_soon(gate)
    store.release_slots()
    seen = read(tier, parameters["a"].grad)
    tier.settle()
    assert store.slots.present == frozenset()
    assert seen == [6.0] * NUMEL


# ---------------------------------------------------------------- links and marks


def test_the_host_is_not_held_up_by_copies_of_pinned_memory(gpu: FakeGpu) -> None:
    """A whole round of a chunk is submitted while computation stands still."""
    store, tier, parameters = placed(gpu, PinnedHome(gpu))
    gate = shut(gpu.compute)
    fetch(store, Chunk("param", 0))
    written_back(store)
    store.slots.wait(Chunk("grad", 0))
    for chunk in (Chunk("param", 0), Chunk("grad", 0)):
        store.slots.evict(chunk)
    store.slots.drop_spare()
    assert parameters["a"].grad.tolist() == [0.0] * NUMEL
    gate.opened.set()
    tier.settle()
    assert parameters["a"].grad.tolist() == [4.0] * NUMEL


def test_a_copy_that_blocks_does_not_hold_up_one_that_does_not(gpu: FakeGpu) -> None:
    link, gate = CudaLink(gpu, "link"), threading.Event()
    slow = link.submit(gate.wait)  # type: ignore[arg-type]
    quick = link.submit(Launch(lambda: None))
    quick.wait()
    assert not slow.done()
    gate.set()
    slow.wait()
    assert slow.done()


def test_a_link_counts_the_seconds_its_copies_took(gpu: FakeGpu) -> None:
    link = CudaLink(gpu, "link")
    assert link.busy_s == 0.0
    gate = shut(link._stream)
    mark = link.submit(Launch(gpu.copy, torch.zeros(4), torch.ones(4)))
    assert link.busy_s == 0.0
    gate.opened.set()
    mark.wait()
    first_s = link.busy_s
    assert first_s > 0.0
    link.submit(lambda: threading.Event().wait(0.1))
    link.drain()
    assert link.busy_s >= first_s + 0.05
    assert not link._running


def test_two_threads_that_ask_for_the_seconds_count_each_copy_once(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One asks while the other one is about to count what has ended; behind it, a copy has not."""
    link = CudaLink(gpu, "link")
    first = link.submit(Launch(gpu.copy, torch.zeros(4), torch.ones(4)))
    gate = shut(link._stream)
    first.wait()
    under_way = link.submit(Launch(gpu.copy, torch.zeros(4), torch.ones(4)))
    link._running = deque([first, under_way])  # as if it had not ended by then
    done, other = first.done, threading.Thread(target=lambda: link.busy_s)

    def done_slowly() -> bool:
        monkeypatch.setattr(first, "done", done)
        other.start()
        other.join(0.2)
        return done()

    monkeypatch.setattr(first, "done", done_slowly)
    assert link.busy_s > 0.0
    other.join()
    assert list(link._running) == [under_way]
    gate.opened.set()
    link.drain()


def test_drain_raises_what_a_blocking_copy_raised(gpu: FakeGpu) -> None:
    tier = CudaTier(gpu)
    tier.links["to_home"].submit(lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    with pytest.raises(StreamError, match="ZeroDivisionError"):
        tier.drain()
    tier.drain()
    assert tier.links["to_home"].busy_s == 0.0


def test_a_launch_that_fails_fails_at_once(gpu: FakeGpu) -> None:
    with pytest.raises(ZeroDivisionError):
        CudaTier(gpu).links["to_home"].submit(Launch(lambda: 1 // 0))  # type: ignore[arg-type]


# ---------------------------------------------------------------- metering


def test_bytes_are_read_off_the_allocator_per_lap(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, unmetered = CudaTier(gpu), CudaTier(gpu, meter=False)
    monkeypatch.setattr(gpu, "lap_peak_nbytes", lambda: 250)
    assert tier.lap_peak_nbytes() == 250
    assert unmetered.lap_peak_nbytes() is None


class FakeCudaModule:
    """What `memory_limit` asks of `torch.cuda`."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    class _Properties:
        total_memory = 1000

    def get_device_properties(self, device: object) -> object:
        return self._Properties()

    def empty_cache(self) -> None:
        self.calls.append(("empty",))

    def set_per_process_memory_fraction(self, fraction: float, device: object) -> None:
        self.calls.append((fraction, device))


@pytest.fixture
def cuda_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCudaModule]:
    fake = FakeCudaModule()
    monkeypatch.setattr(cuda.torch, "cuda", fake)
    yield fake
    monkeypatch.undo()


def test_the_memory_limit_is_lifted_again(cuda_module: FakeCudaModule) -> None:
    def limited() -> None:
        with cuda.memory_limit(250, 1):
            assert cuda_module.calls == [("empty",), (0.25, 1)]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        limited()
    assert cuda_module.calls[-1] == (1.0, 1)


@pytest.mark.parametrize("nbytes", [0, 1001])
def test_a_limit_that_makes_no_sense_is_refused(cuda_module: FakeCudaModule, nbytes: int) -> None:
    with pytest.raises(OptionsError, match="memory limit"), cuda.memory_limit(nbytes):
        raise AssertionError
    assert cuda_module.calls == []


class Copy:
    """A copy on the current stream of a fake GPU that stands still for a moment; then, perhaps, the job goes wrong."""

    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        self.gpu, self.then, self.gate = FakeGpu(), then, Gate()
        self.slot, self.home = torch.zeros(4), torch.ones(4)
        self.link = CudaLink(self.gpu, "link")

    def __call__(self) -> None:
        self.gpu.current_stream().jobs.submit(self.gate.wait)
        self.gpu.copy(self.slot, self.home)
        opened_soon(self.gate)
        self.then()

    @property
    def is_over(self) -> bool:
        return self.slot.tolist() == [1.0] * 4


@pytest.mark.parametrize("launched", [True, False], ids=["by the host", "by a thread"])
def test_draining_a_link_waits_for_the_copies_on_it(launched: bool) -> None:
    """A thread is through with its job while the device still copies."""
    copy = Copy()
    copy.link.submit(Launch(copy) if launched else copy)
    assert not launched or not copy.is_over
    copy.link.drain()
    assert copy.is_over


def test_a_copy_that_fails_half_way_leaves_nothing_that_still_writes_its_slot() -> None:
    """Whoever is told of the error gives the slot back at once."""
    copy = Copy(then=raiser(HomeError("the disk is on fire")))
    mark = copy.link.submit(copy)
    with pytest.raises(HomeError, match="on fire"):
        mark.wait()
    assert copy.is_over


def noting(seen: list[tuple[str, bool]], name: str) -> Callable[[], None]:
    """An exchange: its name, and whether the caller launches it."""
    return Launch(lambda: seen.append((name, threading.current_thread() is threading.main_thread())))


def test_an_exchange_is_launched_at_once_where_nothing_waits() -> None:
    tier, seen = CudaTier(FakeGpu(), meter=False), []
    marks = [tier.links[name].submit(noting(seen, name), after=tier.mark()) for name in (GATHER, SCATTER, GATHER)]
    assert seen == [(GATHER, True), (SCATTER, True), (GATHER, True)]
    assert all(mark.launched is None for mark in marks)


def test_exchanges_behind_one_that_waits_for_an_update_keep_their_order() -> None:
    """On any link: another rank's update may be over, and there they are launched at once."""
    tier, updates, is_over = CudaTier(FakeGpu(), meter=False), WorkerStream("update"), threading.Event()
    seen: list[tuple[str, bool]] = []
    update = updates.submit(lambda: assert_true(is_over.wait(20)))
    tier.links[GATHER].submit(noting(seen, "first"), after=(*tier.mark(), update))
    tier.links[SCATTER].submit(noting(seen, "second"), after=tier.mark())
    last = tier.links[GATHER].submit(noting(seen, "third"), after=tier.mark())
    assert seen == []
    is_over.set()
    last.wait()
    assert seen == [("first", False), ("second", False), ("third", False)]
    tier.links[SCATTER].submit(noting(seen, "fourth"), after=tier.mark())
    assert seen[-1] == ("fourth", True)
    tier.drain()
    updates.close()


def test_a_launch_that_fails_is_an_error_of_who_waits_for_it() -> None:
    tier, updates, is_over = CudaTier(FakeGpu(), meter=False), WorkerStream("update"), threading.Event()

    def fail() -> None:
        raise RuntimeError("nobody is there")

    with pytest.raises(RuntimeError, match="nobody is there"):
        tier.links[GATHER].submit(Launch(fail), after=tier.mark())
    update = updates.submit(lambda: assert_true(is_over.wait(20)))
    mark = tier.links[SCATTER].submit(Launch(fail), after=(update,))
    is_over.set()
    with pytest.raises(StreamError, match="nobody is there"):
        tier.hold_for(mark)
    tier.drain()
    updates.close()
