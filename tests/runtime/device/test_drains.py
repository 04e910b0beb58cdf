"""Nobody is told that copies are over, or have failed, while some of them still run.

A copy stands still until a gate opens, which happens while somebody waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from fake_gpu import FakeGpu
from runtime_helpers import raiser

from chunkc.ir.errors import HomeError
from chunkc.runtime.device.cuda import CudaLink
from chunkc.runtime.device.streams import Launch, WorkerStream

pytestmark = pytest.mark.timeout(30)

SHORT_S, LONG_S = 0.1, 10.0


class Copy:
    """A copy on the current stream of a fake GPU that stands still for a moment; then, perhaps, the job goes wrong."""

    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        self.gpu, self.then, self.opened = FakeGpu(), then, threading.Event()
        self.slot, self.home = torch.zeros(4), torch.ones(4)
        self.link = CudaLink(self.gpu, "link")

    def __call__(self) -> None:
        self.gpu.current_stream().jobs.submit(self._stand_still)
        self.gpu.copy(self.slot, self.home)
        threading.Timer(SHORT_S, self.opened.set).start()
        self.then()

    def _stand_still(self) -> None:
        assert self.opened.wait(LONG_S), "nobody opened the gate"

    @property
    def is_over(self) -> bool:
        return self.slot.tolist() == [1.0] * 4


def test_draining_a_link_waits_for_the_copies_that_the_host_launched() -> None:
    copy = Copy()
    copy.link.submit(Launch(copy))
    assert not copy.is_over
    copy.link.drain()
    assert copy.is_over


def test_draining_a_link_waits_for_the_copies_that_a_thread_launched() -> None:
    """The thread is through with its job while the device still copies."""
    copy = Copy()
    copy.link.submit(copy)
    copy.link.drain()
    assert copy.is_over


def test_a_copy_that_fails_half_way_leaves_nothing_that_still_writes_its_slot() -> None:
    """Whoever is told of the error gives the slot back at once."""
    copy = Copy(then=raiser(HomeError("the disk is on fire")))
    mark = copy.link.submit(copy)
    with pytest.raises(HomeError, match="on fire"):
        mark.wait()
    assert copy.is_over


def test_draining_a_stream_waits_for_its_jobs() -> None:
    stream, gate = WorkerStream("slow"), threading.Event()
    stream.submit(lambda: None if gate.wait(LONG_S) else raiser(AssertionError("nobody opened the gate"))())
    threading.Timer(SHORT_S, gate.set).start()
    stream.drain()
    assert gate.is_set()
