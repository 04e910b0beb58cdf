"""Streams on a CPU: a worker thread with a queue for each, with the interface of CUDA streams and events.

    saved = write_stream.submit(lambda: home.write(old_region, 0, slot))                # returns at once
    loaded = read_stream.submit(lambda: home.read(new_region, 0, slot), after=[saved])
    loaded.wait()                                         # blocks the caller, raises what the job raised

Jobs of one stream run in the order they were submitted; between streams only `after` orders. No wait outlives
the worker thread: a waiter checks it every `POLL_S` seconds, and Ctrl-C gets through.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Protocol

import torch

from chunkc.ir.errors import HomeError, StreamError

POLL_S = 0.1  # how often a waiter checks that the thread is alive; a finished job wakes it at once


class Awaited(Protocol):
    """Event that a job can come after: any object that a thread can wait for."""

    def wait(self) -> None:
        """Block the calling thread until the event has happened; raise its error."""


class Launch(partial[None]):
    """Copy that only needs launching: the call returns at once, and the current CUDA stream does the rest.

    Every other job blocks the thread it runs on until the copy is done.
    """


class JobMark:
    """End of one job of a stream. Made by `WorkerStream.submit` only."""

    def __init__(
        self, stream_name: str, thread: threading.Thread, job: Callable[[], None], after: Sequence[Awaited]
    ) -> None:
        self._stream_name = stream_name
        self._thread = thread
        self._pid = os.getpid()
        self._job: Callable[[], None] | None = job
        self._after = tuple(after)
        self._finished = threading.Event()
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None
        self._reported = False
        self._elapsed_s = 0.0

    def done(self) -> bool:
        """Whether `wait` would not block: the job has succeeded or failed, or its thread is dead."""
        return self._finished.is_set() or not self._thread.is_alive()

    def failed(self) -> bool:
        """Whether the job has failed, or its thread died. Does not report the error: `wait` and `drain` still raise."""
        return self._error is not None or (not self._finished.is_set() and not self._thread.is_alive())

    def wait(self) -> None:
        """Block the calling thread until the job has ended. May be called often, by any thread.

        Raises:
            HomeError: the job's own exception.
            StreamError: the job raised anything else (the `__cause__`), its worker thread died, this process
                is a fork of the one that submitted it, or the caller is the stream's own thread.
        """
        if not self._finished.is_set():
            self._block()
        if self._error is None:
            return
        self._reported = True
        if isinstance(self._error, (HomeError, StreamError)):
            raise self._error.with_traceback(self._traceback)  # else it would grow with every wait
        problem = f"{type(self._error).__name__}: {self._error}"
        raise StreamError(f"a job of stream '{self._stream_name}' failed: {problem}") from self._error

    def _block(self) -> None:
        if os.getpid() != self._pid:
            raise StreamError(f"a job of stream '{self._stream_name}' is the parent's: it began before os.fork")
        if threading.current_thread() is self._thread:
            raise StreamError(f"a job of stream '{self._stream_name}' waits for a job queued behind itself")
        while not self._finished.wait(POLL_S):
            # In this order: a thread may end after it has finished the job, which is no failure.
            if not self._thread.is_alive() and not self._finished.is_set():
                self._reported = True
                raise _lost(self._stream_name)

    def _run(self, ledger: _Ledger, delay: Callable[[], float] | None) -> None:
        """Wait for `after`, run the job, note its outcome, wake the waiters. Called on the worker thread."""
        error: BaseException | None = None
        try:
            for prerequisite in self._after:
                prerequisite.wait()
            if delay is not None:
                time.sleep(delay())
            assert self._job is not None, "a job runs once"
            start_s = time.perf_counter()
            try:
                self._job()
            finally:
                self._elapsed_s = time.perf_counter() - start_s
        except BaseException as caught:  # SystemExit and KeyboardInterrupt too; `wait` raises them
            error = caught
            # Without this frame, which would be a reference cycle.
            self._traceback = caught.__traceback__ and caught.__traceback__.tb_next
            caught.__traceback__ = self._traceback
        self._finish(error, ledger)

    def _finish(self, error: BaseException | None, ledger: _Ledger) -> None:
        # Objects that the job holds must be freed before a waiter learns that it ended: memory is counted to the byte.
        self._job, self._after = None, ()
        self._error = error
        ledger.busy_s += self._elapsed_s
        if error is not None:
            ledger.failed.append(self)
        self._finished.set()


def _lost(stream_name: str) -> StreamError:
    return StreamError(f"the worker thread of stream '{stream_name}' died before a job had ended")


class _Ledger:
    """State that a stream and its worker share, besides the queue. Written by the worker."""

    def __init__(self) -> None:
        self.busy_s = 0.0
        self.failed: deque[JobMark] = deque()


class _Worker:
    """Thread with its jobs. Has no reference to the stream, so that the stream can be collected.

    `jobs` holds jobs that have not ended, the running job first: those left when the thread is dead are lost.
    `wakes` only wakes: True to look at `jobs`, False to end; its `put` is safe inside a garbage collection.
    """

    def __init__(self, name: str, ledger: _Ledger, delay: Callable[[], float] | None) -> None:
        self.jobs: deque[JobMark] = deque()
        self.wakes: SimpleQueue[bool] = SimpleQueue()
        arguments = (self.jobs, self.wakes, ledger, delay)
        self.thread = threading.Thread(target=_work, args=arguments, name=f"chunkc-{name}", daemon=True)

    def put(self, event: JobMark) -> None:
        self.jobs.append(event)
        self.wakes.put(True)

    def end(self) -> None:
        """End the thread behind its jobs and join it, unless it is the calling thread; Ctrl-C gets through."""
        self.wakes.put(False)
        while self.thread.is_alive() and self.thread is not threading.current_thread():
            self.thread.join(POLL_S)


def _work(jobs: deque[JobMark], wakes: SimpleQueue[bool], ledger: _Ledger, delay: Callable[[], float] | None) -> None:
    torch.get_num_threads()  # gives this thread torch's number for OpenMP; else compiled loops take all processors
    while wakes.get():
        while jobs:
            jobs[0]._run(ledger, delay)
            jobs.popleft()


class WorkerStream:
    """Queue of jobs on a daemon thread of its own, in place of a CUDA stream.

    The thread starts with the first job, and restarts with the next job after it died. It ends behind its queued
    jobs on `close`, or when the stream is garbage-collected. A stream belongs to the process that made it.

    Args:
        name: for messages and the thread's name.
        delay: race tests only: seconds to sleep before each job, so that a missing wait shows.
    """

    def __init__(self, name: str, *, delay: Callable[[], float] | None = None) -> None:
        self.name = name
        self._delay = delay
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._ledger = _Ledger()
        self._worker: _Worker | None = None
        self._end_worker: weakref.finalize | None = None
        self._closed = False

    @property
    def busy_s(self) -> float:
        """Total seconds that this stream's jobs have run."""
        return self._ledger.busy_s

    def submit(self, job: Callable[[], None], *, after: Sequence[Awaited] = ()) -> JobMark:
        """Queue a job, to run behind all earlier jobs and once all of `after` is done. Never blocks.

        If a job raises, jobs submitted `after` it do not run and raise the same error; other jobs of the stream run.

        Raises:
            StreamError: the stream is closed, was made before os.fork, or its thread cannot be started.
        """
        self._refuse_fork()
        with self._lock:
            if self._closed:
                raise StreamError(f"stream '{self.name}' is closed")
            while self._ledger.failed and self._ledger.failed[0]._reported:
                self._ledger.failed.popleft()
            worker = self._living_worker()
            event = JobMark(self.name, worker.thread, job, after)
            worker.put(event)
        return event

    def drain(self) -> None:
        """Wait for every job submitted so far, then raise the first error that no `JobMark.wait` has raised.

        Raises:
            HomeError, StreamError: as `JobMark.wait`.
        """
        self._refuse_fork()
        with self._lock:
            worker, marker = self._worker, None
            if worker is not None and worker.thread is threading.current_thread():
                raise StreamError(f"a job of stream '{self.name}' drains its own stream")
            if worker is not None and worker.thread.is_alive() and not self._closed:
                marker = JobMark(self.name, worker.thread, _nothing, ())
                worker.put(marker)
        if marker is not None:
            while not marker.done():
                marker._finished.wait(POLL_S)
        elif worker is not None:
            worker.end()  # it is dead, or the stream is closed
        self._raise_first()

    def end_soon(self) -> None:
        """End the thread behind its queued jobs; a later job starts another. Never blocks: safe in a finalizer."""
        if self._end_worker is not None:
            self._end_worker()
            self._end_worker = None

    def close(self) -> None:
        """End the thread behind its queued jobs, and raise as `drain` does. May be called more than once."""
        if os.getpid() != self._pid:
            return  # a fork has no thread to end
        with self._lock:
            worker = self._worker
            self._closed = True
        if worker is not None:
            worker.end()
        self._raise_first()

    def _refuse_fork(self) -> None:
        if os.getpid() != self._pid:
            raise StreamError(f"stream '{self.name}' was made before os.fork: its thread is the parent's")

    def _living_worker(self) -> _Worker:
        if self._worker is not None and self._worker.thread.is_alive():
            return self._worker
        self._discard_dead_worker()
        worker = _Worker(self.name, self._ledger, self._delay)
        self._end_worker = weakref.finalize(self, worker.wakes.put, False)
        self._end_worker.atexit = False
        self._worker = worker
        try:
            worker.thread.start()
        except RuntimeError as error:
            raise StreamError(f"cannot start the worker thread of stream '{self.name}': {error}") from error
        return worker

    def _discard_dead_worker(self) -> None:
        """Fail the jobs of a dead worker thread, and drop it; a living one is kept. The caller holds the lock."""
        if self._worker is None or self._worker.thread.is_alive():
            return
        for event in self._worker.jobs:
            if not event._finished.is_set():
                event._finish(_lost(self.name), self._ledger)
        if self._end_worker is not None:
            self._end_worker.detach()
        self._worker = self._end_worker = None

    def _raise_first(self) -> None:
        with self._lock:
            self._discard_dead_worker()
            failed = [event for event in self._ledger.failed if not event._reported]
            self._ledger.failed.clear()
        if failed:
            failed[0].wait()


def _nothing() -> None:
    """Do nothing: the job of a drain's marker."""
