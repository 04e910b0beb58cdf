"""Stores for tests of the runtime: one with four parameters in three chunks; one for graphs that are built by hand; one
with updates at home that stand still until a gate opens. And other helpers of these tests.
"""

from __future__ import annotations

import contextlib
import operator
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_gpu import FakeGpu, QueuedTier
from torch import Tensor, fx, nn

from chunkc.ir import chunk_ops
from chunkc.ir.errors import HomeError
from chunkc.ir.layout import PARAM, Chunk, ChunkGroup, ChunkLayout, ParamSpec, TensorSlice
from chunkc.ir.plan import EVICT, WRITE_BACK
from chunkc.runtime.device.streams import JobMark
from chunkc.runtime.device.tier import CpuTier
from chunkc.runtime.device.updates import HomeUpdate
from chunkc.runtime.storage.arena import Arena
from chunkc.runtime.storage.homes import Home, MemoryHome, open_home
from chunkc.runtime.storage.pinned import PinnedHome
from chunkc.runtime.store.store import ChunkStore

EMPTY = ChunkLayout(0, (), ())
CHANNELS_LAST = torch.channels_last
Parameters = dict[str, nn.Parameter]


@pytest.fixture(params=["cpu", "disk"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Home]:
    """Yield either kind of home."""
    home = open_home("cpu") if request.param == "cpu" else open_home(f"disk:{tmp_path}")
    yield home
    home.close()


def make_parameters(dtype: torch.dtype = torch.float32) -> Parameters:
    """Make two parameters of group 0, one with permuted strides; a frozen one of group 1; group 2's."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return {
        "conv": nn.Parameter(random(4, 3, 5, 5).contiguous(memory_format=CHANNELS_LAST)),
        "matrix": nn.Parameter(random(6, 7).t()),
        "frozen": nn.Parameter(random(33), requires_grad=False),
        "last": nn.Parameter(random(2, 64)),
    }


GROUPS = (("conv", "matrix"), ("frozen",), ("last",))


def layout_of(parameters: Parameters, groups: tuple[tuple[str, ...], ...] = GROUPS) -> ChunkLayout:
    """Make a layout with a group for each tuple of names; tensors start at multiples of 64 elements."""
    made = []
    for index, names in enumerate(groups):
        slices, offset = [], 0
        for name in names:
            p = parameters[name]
            spec = ParamSpec(name, tuple(p.shape), p.stride(), p.dtype, p.requires_grad)
            slices.append(TensorSlice(spec, offset))
            offset += -(-spec.numel // 64) * 64
        first = parameters[names[0]]
        made.append(ChunkGroup(index, first.dtype, first.requires_grad, offset, tuple(slices)))
    return ChunkLayout(4096, tuple(made), ())


def placed(
    home: Home | None = None,
    *,
    resident: frozenset[int] = frozenset(),
    debug: bool = True,
    **options: torch.dtype,
) -> tuple[ChunkStore, Parameters]:
    """Make a store with `make_parameters` placed in it."""
    parameters = make_parameters(**options)
    store = ChunkStore(EMPTY, Arena(home or MemoryHome()), CpuTier(), debug)
    store.place(layout_of(parameters), parameters, resident)
    return store, parameters


def fetch(store: ChunkStore, chunk: str) -> None:
    store.prefetch(chunk)
    store.slots.wait(chunk)


def put_back(store: ChunkStore, chunk: str) -> None:
    store.write_back(chunk)
    store.slots.wait(chunk)
    store.slots.evict(chunk)


def taking(gradient: Tensor) -> Callable[[], Tensor]:
    return lambda: gradient


def sink_all(store: ChunkStore, gradients: dict[str, Tensor], chunk: str) -> None:
    """Run a backward's instructions: fetch the gradient chunk, sink gradients, write it back."""
    fetch(store, chunk)
    for name, gradient in gradients.items():
        store.gradients.sink(name, chunk, taking(gradient), owned=True)
    put_back(store, chunk)


def random_gradients(seed: int, parameters: Parameters, *names: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(parameters[name].shape, generator=generator).to(parameters[name].dtype)
        for name in names or ("conv", "matrix")
    }


class FullHome(MemoryHome):
    """A home with room for a given number of bytes."""

    def __init__(self, free_nbytes: int) -> None:
        super().__init__()
        self.free_nbytes = free_nbytes

    def _map(self, nbytes: int) -> object:
        if nbytes > self.free_nbytes:
            raise HomeError(f"no room for {nbytes} bytes")
        self.free_nbytes -= nbytes
        return super()._map(nbytes)


MIB = 1 << 20
WIDTH = 4


def make_store(*names: str) -> tuple[ChunkStore, dict[str, nn.Parameter]]:
    """Make a store of square parameters with the given names, one a group, filled with 1, 2, ..."""
    parameters = {name: nn.Parameter(torch.full((WIDTH, WIDTH), i + 1.0)) for i, name in enumerate(names)}
    store = ChunkStore(EMPTY, Arena(MemoryHome()), CpuTier(), debug=True)
    store.place(layout_of(parameters, tuple((name,) for name in names)), parameters, frozenset())
    return store, parameters


class Builder:
    """A rewritten graph, node by node."""

    def __init__(self) -> None:
        self.graph = fx.Graph()

    def event(self, kind: str, *chunks: str) -> None:
        for chunk in chunks:
            link = {EVICT: [], WRITE_BACK: ["to_home"]}.get(kind, ["to_device"])
            self.graph.call_function(chunk_ops.EVENT_TARGETS[kind], (chunk, *link))

    def fetch(self, *chunks: str) -> None:
        self.event("prefetch", *chunks)
        self.event("wait", *chunks)

    def put_back(self, chunk: str) -> None:
        for kind in ("write_back", "wait", "evict"):
            self.event(kind, chunk)

    def parameter(self, chunk: str, name: str) -> fx.Node:
        return self.graph.call_function(chunk_ops.parameter, (chunk, name))

    def call(self, segment: str, *arguments: fx.Node, num_outputs: int = 1) -> list[fx.Node]:
        node = self.graph.call_module(segment, arguments)
        node.meta["call"] = f"call_{segment}"
        return [self.graph.call_function(operator.getitem, (node, i)) for i in range(num_outputs)]

    def sink(self, name: str, chunk: str | None, gradient: fx.Node, owned: bool = True) -> None:
        self.graph.call_function(chunk_ops.sink, (name, chunk, gradient, owned))


def boxed(function: Callable[..., Any]) -> Callable[[list[Any]], Sequence[Any]]:
    """Make a segment, which empties its list and returns a tuple."""

    def call(arguments: list[Any]) -> Sequence[Any]:
        values = tuple(arguments)
        arguments.clear()
        result = function(*values)
        return result if isinstance(result, tuple) else (result,)

    return call


def queued_store(home: Home, gpu: FakeGpu) -> ChunkStore:
    """Make an empty store on a tier that computes behind the host."""
    tier = QueuedTier(gpu)
    tier.store = store = ChunkStore(EMPTY, Arena(home), tier)
    return store


NUMEL = 64
SHORT_S, LONG_S = 0.1, 10.0


class Gate:
    """A job, or a mark, that ends when it is told to."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def wait(self) -> None:
        assert self.opened.wait(LONG_S), "the gate was not opened"

    def done(self) -> bool:
        return self.opened.is_set()


class Subject:
    """A store with one parameter of 1.0 per group, on a tier; updates write 2.0 when a gate opens."""

    def __init__(self, kind: str) -> None:
        self.kind, self.gate = kind, Gate()
        self.parameters = {name: nn.Parameter(torch.ones(NUMEL)) for name in "ab"}
        self.layout = layout_of(self.parameters, (("a",), ("b",)))
        if kind == "cpu":
            self.store = ChunkStore(EMPTY, Arena(MemoryHome()), CpuTier())
        else:
            gpu = FakeGpu()
            self.store = queued_store(PinnedHome(gpu), gpu)
        self.store.place(self.layout, self.parameters, frozenset())

    def home(self, kind: str = PARAM, group: int = 0) -> Tensor:
        view = self.store.arena.host_view(Chunk(kind, group), torch.float32, NUMEL)
        assert view is not None
        return view

    def begin(self, kind: str = PARAM, group: int = 0) -> None:
        """Begin an update that writes 2.0 once the gate opens."""

        def job() -> None:
            self.gate.wait()
            self.home(kind, group).fill_(2.0)

        self.store.updates.begin(group, HomeUpdate(job, f"{group}"))

    def settle(self) -> None:
        tier = self.store.tier
        tier.settle() if isinstance(tier, QueuedTier) else tier.drain()

    def slot(self, chunk: str) -> Tensor:
        """Return the chunk's slot, when all copies are over."""
        self.settle()
        return self.store.slots.begin_compute(chunk)


@pytest.fixture(params=["cpu", "cuda"])
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    """Yield a store with updates at home that stand still until a gate opens, on either kind of tier."""
    yield (made := Subject(request.param))
    made.gate.opened.set()
    made.settle()


def opened_soon(gate: Gate) -> threading.Timer:
    timer = threading.Timer(SHORT_S, gate.opened.set)
    timer.start()
    return timer


def random_bytes(nbytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def raiser(error: BaseException) -> Callable[..., None]:
    """A job that fails."""

    def job(*args: object, **more: object) -> None:
        raise error

    return job


@contextlib.contextmanager
def ctrl_c_in_a_wait(*, when: Callable[[], bool] = lambda: True) -> Iterator[list[str]]:
    """Interrupt the main thread as a terminal does, as soon as it waits for a worker thread's job.

    Args:
        when: a further condition.

    Yields:
        The names of the functions that it was interrupted in, the innermost first; empty until then.
    """
    main, over, where = threading.main_thread().ident, threading.Event(), list[str]()
    assert main is not None

    def watch() -> None:
        while not over.is_set():
            frame, names, codes = sys._current_frames().get(main), [], set()
            while frame is not None:
                names.append(frame.f_code.co_name)
                codes.add(frame.f_code)
                frame = frame.f_back
            if JobMark._block.__code__ in codes and when():
                where.extend(names)
                signal.pthread_kill(main, signal.SIGINT)
                return
            time.sleep(0.002)

    former = signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background may ignore it
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield where
    finally:
        over.set()
        watcher.join()
        signal.signal(signal.SIGINT, former)
