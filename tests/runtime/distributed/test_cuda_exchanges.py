"""Exchanges between ranks on the CUDA tier are launched in one order, whatever they wait for; on a fake GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from fake_gpu import FakeGpu

from chunkc.ir.errors import StreamError
from chunkc.ir.links import GATHER, SCATTER
from chunkc.runtime.device.cuda import CudaTier
from chunkc.runtime.device.streams import Launch, WorkerStream

pytestmark = pytest.mark.timeout(60)


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
    update = updates.submit(lambda: assert_set(is_over))
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


def assert_set(event: threading.Event) -> None:
    assert event.wait(20)


def test_a_launch_that_fails_is_an_error_of_who_waits_for_it() -> None:
    tier, updates, is_over = CudaTier(FakeGpu(), meter=False), WorkerStream("update"), threading.Event()

    def fail() -> None:
        raise RuntimeError("nobody is there")

    with pytest.raises(RuntimeError, match="nobody is there"):
        tier.links[GATHER].submit(Launch(fail), after=tier.mark())
    update = updates.submit(lambda: assert_set(is_over))
    mark = tier.links[SCATTER].submit(Launch(fail), after=(update,))
    is_over.set()
    with pytest.raises(StreamError, match="nobody is there"):
        tier.hold_for(mark)
    tier.drain()
    updates.close()
