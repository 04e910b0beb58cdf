"""Worker streams: order, delays, failed jobs, draining; threads that die, ctrl-C, closing, forks."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import random
import re
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from store_cases import raiser

from chunkc.ir.errors import HomeError, StreamError
from chunkc.runtime.device.streams import JobMark, WorkerStream

pytestmark = pytest.mark.timeout(30)  # a hang is a failure


def test_jobs_run_in_order_on_one_other_thread() -> None:
    stream, seen = WorkerStream("s"), []
    events = [stream.submit(lambda i=i: seen.append((i, threading.get_ident()))) for i in range(100)]
    events[-1].wait()
    assert [i for i, _ in seen] == list(range(100))
    assert len({ident for _, ident in seen}) == 1
    assert seen[0][1] != threading.get_ident()
    assert all(event.done() for event in events)


def test_compiled_loops_take_as_many_threads_as_torch_has() -> None:
    """OpenMP gives each thread of the process a number of its own, and a new one that of all processors."""
    library = torch_openmp()
    num_threads = torch.get_num_threads()
    stream, seen = WorkerStream("loops"), []
    torch.set_num_threads(num_threads + 3)
    try:
        stream.submit(lambda: seen.append(library.omp_get_max_threads())).wait()
    finally:
        torch.set_num_threads(num_threads)
    assert seen == [num_threads + 3]


def torch_openmp() -> ctypes.CDLL:
    """The OpenMP that torch has loaded."""
    maps = Path("/proc/self/maps")
    loaded = {line.split()[-1] for line in maps.read_text().splitlines()} if maps.exists() else set()
    found = [path for path in loaded if re.search(r"lib[gi]omp[^/]*\.so", path)]
    if not found:
        pytest.skip("torch's OpenMP has no library of its own here")
    return ctypes.CDLL(found[0])


def test_no_thread_before_the_first_job() -> None:
    def threads() -> int:
        return [thread.name for thread in threading.enumerate()].count("chunkc-lazy")

    stream = WorkerStream("lazy")
    stream.drain()
    assert threads() == 0
    stream.submit(lambda: None).wait()
    stream.submit(lambda: None).wait()
    assert threads() == 1
    stream.close()
    assert threads() == 0


def test_busy_counts_the_job_alone() -> None:
    stream, other = WorkerStream("s", delay=lambda: 0.2), WorkerStream("o")
    gate = other.submit(lambda: time.sleep(0.2))
    event = stream.submit(lambda: time.sleep(0.02), after=[gate])
    event.wait()
    first_s = stream.busy_s
    assert 0.02 <= first_s < 0.2
    stream.submit(lambda: time.sleep(0.02)).wait()
    assert stream.busy_s >= first_s + 0.02


@pytest.mark.parametrize("ordered", [True, False])
def test_after_orders_between_streams(ordered: bool) -> None:
    """A slot is copied out and filled again, as eviction and prefetch do. Random delays make a missing order show."""
    delays = random.Random(0)
    out = WorkerStream("out", delay=lambda: delays.random() * 0.004)
    into = WorkerStream("into")
    slot, copies, evicted = [0], [], []
    for i in range(1, 30):
        evicted.append(out.submit(lambda: copies.append(slot[0])))
        after = evicted[-1:] if ordered else []
        filled = into.submit(lambda i=i: slot.__setitem__(0, i), after=after)
        filled.wait()
    out.drain()
    assert (copies == list(range(29))) == ordered


@pytest.mark.parametrize(
    "error",
    [ValueError("x"), SystemExit(3), KeyboardInterrupt(), StopIteration()],
    ids=lambda e: type(e).__name__,
)
def test_a_failed_job_spoils_its_own_event_only(error: BaseException) -> None:
    stream, seen = WorkerStream("copies"), []
    failed = stream.submit(raiser(error))
    later = stream.submit(lambda: seen.append(1))
    later.wait()
    assert seen == [1]
    for _ in range(2):
        with pytest.raises(StreamError, match=f"'copies' failed: {type(error).__name__}") as caught:
            failed.wait()
        assert caught.value.__cause__ is error
    assert failed.done()
    assert later._thread.is_alive()


def test_a_home_error_is_raised_as_itself() -> None:
    error = HomeError("disk full")
    event = WorkerStream("s").submit(raiser(error))
    lengths = []
    for _ in range(3):
        with pytest.raises(HomeError) as caught:
            event.wait()
        assert caught.value is error
        lengths.append(len(caught.traceback))
    assert caught.traceback[-1].name == "job"
    assert len(set(lengths)) == 1


def test_a_job_after_a_failed_one_does_not_run() -> None:
    error, seen = HomeError("write-back failed"), []
    saved = WorkerStream("out").submit(raiser(error))
    into = WorkerStream("in")
    loaded = into.submit(lambda: seen.append("overwrote the only copy"), after=[saved])
    with pytest.raises(HomeError) as caught:
        loaded.wait()
    assert caught.value is error
    assert seen == []
    assert into.busy_s == 0
    into.submit(lambda: seen.append("next")).wait()
    assert seen == ["next"]


def test_drain_waits_for_all_and_raises_the_first_unseen_error() -> None:
    stream, gate, seen = WorkerStream("s"), threading.Event(), []
    stream.submit(gate.wait)
    first_seen = stream.submit(raiser(ValueError("seen")))
    stream.submit(raiser(ValueError("first")))
    stream.submit(raiser(ValueError("second")))
    stream.submit(lambda: seen.append(1))
    gate.set()
    with pytest.raises(StreamError, match="seen"):
        first_seen.wait()
    with pytest.raises(StreamError, match="first"):
        stream.drain()
    assert seen == [1]
    stream.drain()  # each error once


def test_drain_after_waited_errors_is_silent_and_nothing_piles_up() -> None:
    stream = WorkerStream("s")
    for _ in range(20):
        event = stream.submit(raiser(ValueError()))
        with pytest.raises(StreamError):
            event.wait()
    assert len(stream._ledger.failed) <= 2
    stream.drain()


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
@pytest.mark.parametrize("restarted", [False, True])
def test_jobs_lost_with_their_thread_are_reported(restarted: bool) -> None:
    stream = WorkerStream("doomed")
    first = stream.submit(lambda: None)
    first.wait()
    kill_thread(first)
    stream.submit(lambda: None)
    if restarted:
        wait_until(lambda: not first._thread.is_alive())
        stream.submit(lambda: None).wait()
    with pytest.raises(StreamError, match="'doomed' died"):
        (stream.close if restarted else stream.drain)()
    stream.drain()


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
