"""Worker streams: order, delays, failed jobs, draining."""

from __future__ import annotations

import ctypes
import random
import re
import threading
import time
from pathlib import Path

import pytest
import torch
from runtime_helpers import raiser

from chunkc.ir.errors import HomeError, StreamError
from chunkc.runtime.device.streams import WorkerStream

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


def test_submit_does_not_block_and_done_tells() -> None:
    stream, gate = WorkerStream("s"), threading.Event()
    event = stream.submit(gate.wait)
    assert not event.done()
    gate.set()
    event.wait()
    event.wait()
    assert event.done()


def test_busy_counts_the_job_alone() -> None:
    stream, other = WorkerStream("s", delay=lambda: 0.2), WorkerStream("o")
    gate = other.submit(lambda: time.sleep(0.2))
    event = stream.submit(lambda: time.sleep(0.02), after=[gate])
    event.wait()
    first_s = stream.busy_s
    assert 0.02 <= first_s < 0.2
    stream.submit(lambda: time.sleep(0.02)).wait()
    assert stream.busy_s >= first_s + 0.02


def overwrite_while_copied_out(*, ordered: bool) -> bool:
    """A slot is copied out and filled again, as eviction and prefetch do: whether every copy was whole."""
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
    return copies == list(range(29))


def test_after_orders_between_streams() -> None:
    assert overwrite_while_copied_out(ordered=True)


def test_random_delays_make_a_missing_after_show() -> None:
    assert not overwrite_while_copied_out(ordered=False)


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
