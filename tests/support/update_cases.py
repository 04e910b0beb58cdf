"""A store with updates at home that stand still until a gate opens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fake_gpu import FakeGpu
from queued_tier import QueuedTier
from torch import Tensor, nn

from chunkc.ir.layout import PARAM, Chunk, ChunkGroup, ChunkLayout, ParamSpec, TensorSlice
from chunkc.runtime.device.tier import CpuTier
from chunkc.runtime.device.updates import HomeUpdate
from chunkc.runtime.storage.arena import Arena
from chunkc.runtime.storage.homes import MemoryHome
from chunkc.runtime.storage.pinned import PinnedHome
from chunkc.runtime.store.store import ChunkStore

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
        names = ("a", "b")
        self.parameters = {name: nn.Parameter(torch.ones(NUMEL)) for name in names}
        groups = tuple(
            ChunkGroup(
                i, torch.float32, True, NUMEL,
                (TensorSlice(ParamSpec(name, (NUMEL,), (1,), torch.float32, True), 0),),
            )
            for i, name in enumerate(names)
        )  # fmt: skip
        self.layout = ChunkLayout(4 * NUMEL, groups, ())
        if kind == "cpu":
            self.store = ChunkStore(ChunkLayout(0, (), ()), Arena(MemoryHome()), CpuTier())
        else:
            gpu = FakeGpu()
            tier = QueuedTier(gpu)
            self.store = ChunkStore(ChunkLayout(0, (), ()), Arena(PinnedHome(gpu)), tier)
            tier.store = self.store
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


def blocks_until_opened(gate: Gate, call: Callable[[], Any]) -> None:
    """`call` returns after the gate was opened, not before."""
    timer = opened_soon(gate)
    call()
    assert gate.done(), "it did not wait"
    timer.join()
