"""Worker streams: threads that die, ctrl-C, closing, forks."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
from runtime_helpers import raiser

from chunkc.ir.errors import HomeError, StreamError
from chunkc.runtime.device.streams import JobMark, WorkerStream

pytestmark = pytest.mark.timeout(30)  # a hang is a failure


dies_on_purpose = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@contextlib.contextmanager
def ctrl_c_after(seconds: float) -> Iterator[None]:
    """SIGINT for the main thread, as a terminal sends it; also where tests run in the background, which ignores it."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(seconds, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        signal.signal(signal.SIGINT, former)


def kill_thread(event: JobMark) -> None:
    """Make the idle thread behind `event` die as soon as it wakes, outside of any job."""
    ident = ctypes.c_ulong(event._thread.ident)
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(SystemExit)) == 1


@contextlib.contextmanager
def no_thread_switch() -> Iterator[None]:
    """No other thread runs Python until this one blocks, or for 10 s."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(10)
    try:
        yield
    finally:
        sys.setswitchinterval(interval_s)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s, "waited too long"
        time.sleep(0.005)


@dies_on_purpose
def test_a_dead_thread_is_an_error_not_a_hang() -> None:
    stream, seen = WorkerStream("doomed"), []
    first = stream.submit(lambda: None)
    first.wait()
    kill_thread(first)
    with no_thread_switch():
        lost = [stream.submit(lambda: seen.append("ran")) for _ in range(3)]
    dependent = WorkerStream("other").submit(lambda: seen.append("ran"), after=lost[:1])
    for event in (*lost, dependent):
        with pytest.raises(StreamError, match="'doomed' died"):
            event.wait()
        assert event.done()
    assert seen == []
    first.wait()  # ended well before
    again = stream.submit(lambda: seen.append("new thread"))
    again.wait()
    assert seen == ["new thread"]
    assert again._thread is not first._thread
    stream.drain()  # what was lost has been reported


@dies_on_purpose
def test_drain_reports_jobs_lost_with_their_thread() -> None:
    stream = WorkerStream("doomed")
    first = stream.submit(lambda: None)
    first.wait()
    kill_thread(first)
    stream.submit(lambda: None)
    with pytest.raises(StreamError, match="'doomed' died"):
        stream.drain()
    stream.drain()


@dies_on_purpose
def test_jobs_lost_are_reported_even_after_a_restart() -> None:
    stream = WorkerStream("doomed")
    first = stream.submit(lambda: None)
    first.wait()
    kill_thread(first)
    stream.submit(lambda: None)
    wait_until(lambda: not first._thread.is_alive())
    stream.submit(lambda: None).wait()
    with pytest.raises(StreamError, match="'doomed' died"):
        stream.close()


@pytest.mark.parametrize("how", ["wait", "drain", "close"])
def test_ctrl_c_gets_through(how: str) -> None:
    stream, gate, seen = WorkerStream("slow"), threading.Event(), []
    event = stream.submit(gate.wait)
    stream.submit(lambda: seen.append(1))
    waits = {"wait": event.wait, "drain": stream.drain, "close": stream.close}
    start_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt), ctrl_c_after(0.05):
        waits[how]()
    assert time.monotonic() - start_s < 5
    gate.set()
    event.wait()
    stream.drain()  # the stream goes on, or, if it was to be closed, ends
    assert seen == [1]
    assert event._thread.is_alive() == (how != "close")


def test_a_dropped_stream_ends_its_thread_after_its_jobs() -> None:
    gate, seen = threading.Event(), []
    stream = WorkerStream("dropped")
    stream.submit(gate.wait)
    event = stream.submit(lambda: seen.append(1))
    reference = weakref.ref(stream)
    gc.disable()
    try:
        del stream
        assert reference() is None  # the thread does not hold it
    finally:
        gc.enable()
    gate.set()
    event.wait()
    assert seen == [1]
    wait_until(lambda: not event._thread.is_alive())
    event.wait()


class Payload:
    """Stands for a slot's memory."""


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_job_held_is_gone_when_it_is_done(fails: bool) -> None:
    """Memory is counted to the byte: a slot freed after `wait` must really be free."""
    stream, before, gate, gone = WorkerStream("s"), WorkerStream("before"), threading.Event(), []

    class Look(threading.Event):
        """Looks at the very moment that waiters are told."""

        def set(self) -> None:
            gone.append(held() is None)
            super().set()

    def fail_or_not() -> None:
        gate.wait()
        if fails:
            raise ValueError

    gc.disable()
    try:
        payload, prerequisite = Payload(), before.submit(fail_or_not)
        held, held_prerequisite = weakref.ref(payload), weakref.ref(prerequisite)
        event = stream.submit(lambda payload=payload: None, after=[prerequisite])
        event._finished = Look()
        del payload, prerequisite
        gate.set()
        with contextlib.suppress(StreamError):
            event.wait()
        if not fails:  # or a chain of events through the whole training run
            wait_until(lambda: held() is None and held_prerequisite() is None)
    finally:
        gc.enable()
    assert gone == [True]


def test_a_job_cannot_wait_for_its_own_stream() -> None:
    stream, gate = WorkerStream("s"), threading.Event()
    events: list[JobMark] = []

    def wait_for_next() -> None:
        gate.wait()
        events[1].wait()

    events += [stream.submit(wait_for_next), stream.submit(lambda: None)]
    gate.set()
    with pytest.raises(StreamError, match="queued behind itself"):
        events[0].wait()
    events[1].wait()
    with pytest.raises(StreamError, match="drains its own stream"):
        stream.submit(stream.drain).wait()


def test_close_ends_queued_jobs_and_refuses_new_ones() -> None:
    stream, seen = WorkerStream("s", delay=lambda: 0.01), []
    events = [stream.submit(lambda i=i: seen.append(i)) for i in range(5)]
    stream.close()
    assert seen == list(range(5))
    assert not events[0]._thread.is_alive()
    stream.close()
    stream.drain()
    with pytest.raises(StreamError, match="'s' is closed"):
        stream.submit(lambda: None)


def test_a_job_may_close_its_own_stream() -> None:
    stream, seen = WorkerStream("s"), []
    event = stream.submit(stream.close)
    event.wait()
    with pytest.raises(StreamError, match="closed"):
        stream.submit(lambda: seen.append(1))
    wait_until(lambda: not event._thread.is_alive())


def test_close_raises_what_nobody_has_seen() -> None:
    stream = WorkerStream("s")
    stream.submit(raiser(HomeError("write-back failed")))
    with pytest.raises(HomeError, match="write-back failed"):
        stream.close()
    stream.close()


def test_many_threads_submit_to_one_stream() -> None:
    stream, seen = WorkerStream("s"), []

    def submit_many(who: int) -> None:
        for i in range(200):
            stream.submit(lambda i=i: seen.append((who, i)))

    threads = [threading.Thread(target=submit_many, args=(who,)) for who in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stream.drain()
    assert len(seen) == 1600
    for who in range(8):
        assert [i for w, i in seen if w == who] == list(range(200))


def test_a_fork_gets_errors_and_does_not_hang() -> None:
    stream, gate = WorkerStream("parent"), threading.Event()
    ended = stream.submit(lambda: None)
    ended.wait()
    running = stream.submit(gate.wait)
    child = os.fork()
    if child == 0:  # no pytest in here: the exit status tells
        status = 1
        try:
            ended.wait()
            refused = 0
            for call in (running.wait, stream.drain, lambda: stream.submit(lambda: None)):
                try:
                    call()
                except StreamError as error:
                    refused += "fork" in str(error)
            stream.close()
            own = WorkerStream("child")
            own.submit(lambda: None).wait()
            own.close()
            del stream
            status = 0 if refused == 3 and running.done() else 2
        finally:
            os._exit(status)
    deadline_s = time.monotonic() + 10
    pid, status = os.waitpid(child, os.WNOHANG)
    while pid == 0 and time.monotonic() < deadline_s:
        time.sleep(0.01)
        pid, status = os.waitpid(child, os.WNOHANG)
    if pid == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    gate.set()
    stream.close()
    assert pid == child, "the child hangs"
    assert os.waitstatus_to_exitcode(status) == 0


def test_an_event_knows_that_its_job_failed_and_does_not_tell() -> None:
    stream = WorkerStream("s")
    good, bad = stream.submit(lambda: None), stream.submit(lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    good.wait()
    while not bad.done():
        time.sleep(0.001)
    assert (good.failed(), bad.failed()) == (False, True)
    with pytest.raises(StreamError):
        stream.drain()  # nobody was told before
