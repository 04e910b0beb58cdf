"""A GPU without a GPU: CUDA's rules of order, played by worker threads with random delays.

Streams run behind the host and past each other; only events order them. A wait for an event that was never recorded
is no wait. Host memory can be pinned up to a limit, each range once.

`QueuedTier` is a `CudaTier` on it with kernels in Python: the host runs ahead of computation, slots are reused at once.
Whatever an instruction computes is a job of the compute stream's worker thread. A slot that the store has given back
is handed out again immediately, while earlier computation may still use it: so torch's caching allocator does. Each
edge that orders bytes can be left out, to show that something breaks then.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import random
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from chunkc.ir.links import INWARD
from chunkc.runtime.device.cuda import CudaLink, CudaMark, CudaTier
from chunkc.runtime.device.gpu import relabelled
from chunkc.runtime.device.streams import JobMark, WorkerStream
from chunkc.runtime.device.tier import Links
from chunkc.runtime.store.store import ChunkStore

DLPACK_CPU = 1


class FakeStream:
    """A stream as `torch.cuda.Stream`. What runs on it is a job of a worker thread."""

    def __init__(self, name: str, delay: Callable[[], float]) -> None:
        self.jobs = WorkerStream(name, delay=delay)

    def wait_event(self, event: FakeEvent) -> None:
        if event.recorded is not None:
            self.jobs.submit(_nothing, after=[event.recorded])

    def synchronize(self) -> None:
        self.jobs.drain()


class FakeEvent:
    """An event as `torch.cuda.Event`."""

    def __init__(self) -> None:
        self.recorded: JobMark | None = None
        self.at_s = 0.0

    def record(self, stream: FakeStream) -> None:
        self.recorded = stream.jobs.submit(self._stamp)

    def query(self) -> bool:
        return self.recorded is None or self.recorded.done()

    def synchronize(self) -> None:
        if self.recorded is not None:
            self.recorded.wait()

    def elapsed_time(self, later: FakeEvent) -> float:
        assert self.recorded is not None, "elapsed_time of an event that was never recorded"
        assert later.recorded is not None, "elapsed_time up to an event that was never recorded"
        return (later.at_s - self.at_s) * 1e3

    def _stamp(self) -> None:
        self.at_s = time.perf_counter()


class NoWait(FakeEvent):
    """An event that the host does not wait for."""

    def synchronize(self) -> None:
        pass


class FakeGpu:
    """Stands for `chunkc.runtime.device.gpu.TorchGpu`; its device memory is RAM.

    Args:
        longest_s: a third of all jobs start up to so much later than they could. `reseed` draws anew, and also which
            streams are slow and which are not.
        lockable_nbytes: how much can be pinned.
        views_pageable: whether it reads host memory in place that is not pinned.
        node: of the host's memory, which is nearest.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        *,
        longest_s: float = 0.0,
        lockable_nbytes: int = 1 << 40,
        views_pageable: bool = False,
        node: int | None = None,
    ) -> None:
        self.longest_s = longest_s
        self.node = node
        self.views_pageable = views_pageable
        self.lockable_nbytes = lockable_nbytes
        self.pinned: dict[int, int] = {}
        self.unpinned: dict[int, int] = {}  # what could not be
        self.num_pins = 0
        self.streams: list[FakeStream] = []
        self._random: dict[str, tuple[random.Random, float]] = {}
        self._current = threading.local()
        self.reseed(0)
        self.compute = self._stream("compute")

    def reseed(self, seed: int) -> None:
        """Draw other delays."""
        self.seed = seed
        self._random.clear()

    def new_stream(self) -> FakeStream:
        return self._stream(f"copies.{len(self.streams)}")

    def current_stream(self) -> FakeStream:
        return getattr(self._current, "stream", self.compute)

    @contextlib.contextmanager
    def using(self, stream: FakeStream) -> Iterator[None]:
        before = self.current_stream()
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before

    def new_event(self, *, timed: bool = False) -> FakeEvent:
        return FakeEvent()

    def synchronize(self) -> None:
        for stream in self.streams:
            stream.synchronize()

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        assert destination.shape == source.shape
        if self._is_unpinned(source):
            source = source.clone()  # through the driver's buffers, whatever the stream still waits for
        self.current_stream().jobs.submit(partial(_copy, destination, source))

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype)

    def pin(self, address: int, nbytes: int) -> str | None:
        assert address % mmap.PAGESIZE == nbytes % mmap.PAGESIZE == 0
        assert address not in self.pinned, "pinned twice"
        self.num_pins += 1
        if sum(self.pinned.values()) + nbytes > self.lockable_nbytes:
            self.unpinned[address] = nbytes
            return "out of memory"
        self.pinned[address] = nbytes
        return None

    def unpin(self, address: int) -> str | None:
        self.synchronize()
        return None if self.pinned.pop(address, None) is not None else "invalid argument"

    def note_current_stream(self) -> None:
        """Do nothing: all streams are known."""

    def view(self, address: int, nbytes: int, owner: object) -> torch.Tensor:
        assert any(begin <= address and address + nbytes <= begin + n for begin, n in self.pinned.items())
        memory = (ctypes.c_uint8 * nbytes).from_address(address)
        memory.owner = owner
        return torch.frombuffer(memory, dtype=torch.uint8)

    def cannot_view_pageable(self) -> str | None:
        return None if self.views_pageable else "it is too old"

    def view_pageable(self, host: torch.UntypedStorage) -> torch.Tensor:
        return relabelled(host, DLPACK_CPU, 0)

    def numa_node(self) -> int | None:
        return self.node

    def lap_peak_nbytes(self) -> int:
        return 0

    def num_retries(self) -> int:
        return 0

    def _is_unpinned(self, tensor: torch.Tensor) -> bool:
        return any(begin <= tensor.data_ptr() < begin + nbytes for begin, nbytes in self.unpinned.items())

    def _stream(self, name: str) -> FakeStream:
        self.streams.append(FakeStream(name, partial(self._delay_s, name)))
        return self.streams[-1]

    def _delay_s(self, name: str) -> float:
        """Return the seconds to sleep before the next job of a stream; the same for the same seed."""
        if not self.longest_s:
            return 0.0
        if name not in self._random:
            generator = random.Random(zlib.crc32(f"{self.seed} {name}".encode()))
            self._random[name] = generator, self.longest_s * generator.choice((0.0, 0.1, 0.5, 1.0))
        generator, longest_s = self._random[name]
        return generator.uniform(0.0, longest_s) if generator.random() < 0.3 else 0.0


def _copy(destination: Any, source: Any) -> None:
    destination.copy_(source)


def _nothing() -> None:
    """Do nothing: a job that only waits."""


EDGES = (
    "prefetch after mark",
    "write_back after mark",
    "hold for prefetch",
    "hold for write_back",
    "launch before hold",
)
"""What may be left out. The last is an edge only where a thread launches copies: behind a home that blocks."""


class _Mark(CudaMark):
    """A copy's end, with the direction it went."""

    way = ""


class _Link(CudaLink):
    """A link that may leave out the order of its copies after other work."""

    def __init__(self, tier: QueuedTier, name: str, way: str) -> None:
        super().__init__(tier.gpu, name)
        self.tier, self.way = tier, way

    def submit(self, job: Callable[[], None], *, after: Sequence[CudaMark] = ()) -> CudaMark:
        mark = super().submit(job, after=() if f"{self.way} after mark" in self.tier.left_out else after)
        known = _Mark(mark.end, mark.begin)
        known.launched = None if "launch before hold" in self.tier.left_out else mark.launched
        known.way = self.way
        return known


class QueuedTier(CudaTier):
    """The tier; see the module.

    Attributes:
        left_out: edges that are missing.
        store: owner of the slots; to be set before the first prefetch.
    """

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__(gpu, meter=False)
        self.gpu = gpu
        self.left_out: frozenset[str] = frozenset()
        self.store: ChunkStore | None = None
        self.num_reused = 0
        self._blocks: list[torch.Tensor] = []
        self.links = Links(lambda name: _Link(self, name, "prefetch" if name in INWARD else "write_back"))

    def enqueue(self, job: Callable[..., None], *args: Any) -> None:  # type: ignore[override]
        if threading.current_thread().name == "chunkc-compute":
            job(*args)
        else:
            self.gpu.compute.jobs.submit(lambda: _without_gradients(job, *args))

    def hold_for(self, mark: CudaMark) -> None:
        if f"hold for {getattr(mark, 'way', '')}" not in self.left_out:
            super().hold_for(mark)

    def materialise(self) -> None:
        """Values are Python objects that the compute thread makes: wait for it, and for nothing else."""
        self.gpu.compute.synchronize()

    def allocate_slot(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        assert self.store is not None
        held = [
            slot.buffer for slot in self.store.slots._slots.values() if slot.buffer is not None
        ] + self.store.slots._spare._buffers
        in_use = {buffer.data_ptr() for buffer in held}
        for block in self._blocks:
            if block.nbytes == numel * dtype.itemsize and block.data_ptr() not in in_use:
                self.num_reused += 1
                return block.view(dtype)
        block = torch.empty(numel * dtype.itemsize, dtype=torch.uint8)
        self._blocks.append(block)
        return block.view(dtype)

    def settle(self) -> None:
        """Block until nothing is under way, whatever was left out."""
        for _ in range(2):
            self.drain()
            for stream in self.gpu.streams:
                stream.synchronize()


def _without_gradients(job: Callable[..., None], *args: Any) -> None:
    with torch.no_grad():  # the executor's is the host thread's
        job(*args)
