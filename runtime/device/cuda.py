"""Compute tier on a CUDA device: one stream per link, ordered by events. See `runtime.device.tier` for the order.

Kernels queue by themselves on the current stream, the compute stream, so `enqueue` just calls. Slots come from torch's
caching allocator on that stream. The store gives a slot back only after the compute stream waits for its last copy, so
the allocator's own rule (memory is reused in stream order) keeps copies safe without `record_stream`.

A copy with a home that blocks (a disk), or after an update by the CPU, needs a host thread, which launches it (a
disk's in pieces) on a stream of its own. The copy's event is unrecorded until the thread has finished, and CUDA takes a
wait for an unrecorded event as no wait; so a wait for such a copy blocks the host until the thread has launched it.
This is the only wait of the host inside a step.

Exchanges with other ranks are launched in the order of submission, gathers and scatters alike: the order of the plan,
which is the same on every rank. So an exchange after an update by the CPU is launched by a thread, and so are those
behind it; any other is launched by the caller.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import torch

from chunkc.ir.errors import OptionsError
from chunkc.ir.links import GATHER, SCATTER
from chunkc.runtime.device.gpu import Gpu, TorchGpu
from chunkc.runtime.device.streams import JobMark, Launch, WorkerStream
from chunkc.runtime.device.tier import AT_ONCE, Links


class CudaMark:
    """End of a copy, or of all computation up to a point.

    Attributes:
        launched: end of the host thread's launch, for a copy that a thread launches.
    """

    def __init__(self, end: Any, begin: Any = None) -> None:
        self.begin, self.end = begin, end
        self.launched: JobMark | None = None

    def done(self) -> bool:
        return (self.launched is None or self.launched.done()) and self.end.query()

    def wait(self) -> None:
        """Block the host; raises HomeError or StreamError if the thread that launches the copy failed."""
        if self.launched is not None:
            self.launched.wait()
        self.end.synchronize()

    def hold(self, stream: Any) -> None:
        """Make work that `stream` is given from now on start after this mark; raises as `wait`."""
        if self.launched is not None:
            self.launched.wait()
        stream.wait_event(self.end)

    def copy_s(self) -> float:
        """Measure the seconds between begin and end of a copy that is done; 0 if it failed."""
        if self.launched is not None and self.launched.failed():
            return 0.0
        return self.begin.elapsed_time(self.end) / 1e3


class CudaLink:
    """Copies over one link, launched by the caller, or by a thread where they block. Neither delays the other."""

    def __init__(self, gpu: Gpu, name: str) -> None:
        self._gpu = gpu
        self._stream = gpu.new_stream()
        self._blocking_stream: Any = None
        self._worker = WorkerStream(name)
        self._running: deque[CudaMark] = deque()
        self._busy_s = 0.0
        self._accounting = threading.Lock()  # a report may be asked for in another thread

    @property
    def busy_s(self) -> float:
        """Total seconds of copies that have ended; a disk's time included."""
        self._account()
        return self._busy_s

    def submit(self, job: Callable[[], None], *, after: Sequence[CudaMark | JobMark] = ()) -> CudaMark:
        """Queue a copy, to start once all of `after` is over. Never blocks.

        Args:
            job: copies on the calling thread's current stream; unless it is a `Launch`, it may also block the thread.
            after: may include marks of host threads, which no stream can wait for: a thread then waits and launches.

        Raises:
            StreamError: the thread that blocking copies need cannot be started.
        """
        self._account()
        mark = CudaMark(self._gpu.new_event(timed=True), self._gpu.new_event(timed=True))
        marks = [earlier for earlier in after if isinstance(earlier, CudaMark)]
        if isinstance(job, Launch) and len(marks) == len(after):
            with self._gpu.using(self._stream):
                for earlier in marks:
                    earlier.hold(self._stream)
                self._run(job, mark)
        else:
            if self._blocking_stream is None:
                self._blocking_stream = self._gpu.new_stream()
            mark.launched = self._worker.submit(partial(self._run_blocking, job, after, mark))
        self._running.append(mark)
        return mark

    def drain(self) -> None:
        """Block the host until every copy has ended; raise the first error that no wait has raised."""
        try:
            self._worker.drain()
        finally:
            self._stream.synchronize()
            if self._blocking_stream is not None:
                self._blocking_stream.synchronize()
        self._account()

    def end_soon(self) -> None:
        """End the thread behind its queued copies. Never blocks."""
        self._worker.end_soon()

    def _run_blocking(self, job: Callable[[], None], after: Sequence[CudaMark | JobMark], mark: CudaMark) -> None:
        """Run a copy on the worker thread, which waits itself: it touches home, or comes after another host thread."""
        for earlier in after:
            earlier.wait()
        with self._gpu.using(self._blocking_stream):
            try:
                self._run(job, mark)
            except BaseException:
                self._blocking_stream.synchronize()  # the part that was launched must not outlive the slot
                raise

    def _run(self, job: Callable[[], None], mark: CudaMark) -> None:
        stream = self._gpu.current_stream()
        mark.begin.record(stream)
        job()
        mark.end.record(stream)

    def _account(self) -> None:
        with self._accounting:
            while self._running and self._running[0].done():
                self._busy_s += self._running.popleft().copy_s()


class Launcher:
    """Launcher of jobs in order: at once if the job would not block and no job waits before it; else by a thread."""

    def __init__(self) -> None:
        self.thread = WorkerStream("exchange")
        self._last: JobMark | None = None

    def launch(self, job: Callable[[], None], *, at_once: bool) -> JobMark | None:
        """Launch a job, or queue it for the thread.

        Args:
            at_once: the job would not block.

        Returns:
            The end of the launch by the thread; None if the job has been launched.
        """
        if at_once and (self._last is None or self._last.done()):
            job()
            return None
        self._last = self.thread.submit(job)
        return self._last


class CudaExchangeLink(CudaLink):
    """Exchanges with other ranks over one link, launched by a launcher that all such links share."""

    def __init__(self, gpu: Gpu, name: str, launcher: Launcher) -> None:
        super().__init__(gpu, name)
        self._launcher = launcher

    def submit(self, job: Callable[[], None], *, after: Sequence[CudaMark | JobMark] = ()) -> CudaMark:
        """Queue an exchange as `CudaLink.submit`, in the launcher's order.

        Raises:
            DistributedError: ranks can no longer exchange anything.
            StreamError: the thread that such exchanges need cannot be started.
        """
        self._account()
        mark = CudaMark(self._gpu.new_event(timed=True), self._gpu.new_event(timed=True))
        at_once = all(isinstance(earlier, CudaMark) and earlier.launched is None for earlier in after)
        mark.launched = self._launcher.launch(partial(self._launch, job, after, mark), at_once=at_once)
        self._running.append(mark)
        return mark

    def drain(self) -> None:
        """Drain as `CudaLink.drain`, and the launcher."""
        try:
            self._launcher.thread.drain()
        finally:
            super().drain()

    def end_soon(self) -> None:
        """End the launcher's thread behind its queued launches. Never blocks."""
        self._launcher.thread.end_soon()

    def _launch(self, job: Callable[[], None], after: Sequence[CudaMark | JobMark], mark: CudaMark) -> None:
        with self._gpu.using(self._stream):
            for earlier in after:
                earlier.hold(self._stream) if isinstance(earlier, CudaMark) else earlier.wait()
            try:
                self._run(job, mark)
            except BaseException:
                self._stream.synchronize()  # the part that was launched must not outlive the slot
                raise


class CudaTier:
    """CUDA device as the memory that the model computes in.

    Args:
        gpu: torch's current device by default.
        meter: read the allocator's statistics at every moment of a step: some 20 microseconds each, hidden as long as
            the host runs ahead. Without it nothing is measured.
    """

    enqueue: ClassVar[Callable[..., None]] = staticmethod(AT_ONCE)  # kernels queue by themselves

    def __init__(self, gpu: Gpu | None = None, *, meter: bool = True) -> None:
        self._gpu = TorchGpu() if gpu is None else gpu
        self._meter = meter
        self._launcher = Launcher()
        self.links = Links(self._open_link)
        self._retries_before = self._gpu.num_retries()
        self._last: tuple[Any, Any] | None = None  # the stream that computed last, and the event of its last mark

    @property
    def device(self) -> torch.device:
        return self._gpu.device

    def _open_link(self, name: str) -> CudaLink:
        if name in (GATHER, SCATTER):
            return CudaExchangeLink(self._gpu, name, self._launcher)
        return CudaLink(self._gpu, name)

    def allocate_slot(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate a flat, uninitialised buffer on the current stream."""
        return self._gpu.allocate(numel, dtype)

    def join_stream(self) -> None:
        """Make the current stream wait for the last mark of another stream; the host does not wait."""
        stream, last = self._gpu.current_stream(), self._last
        if last is not None and last[0] != stream:
            stream.wait_event(last[1])

    def mark(self) -> tuple[CudaMark, ...]:
        """Mark the end of all work enqueued so far: on the current stream, and before that on other streams."""
        self.join_stream()
        stream, end = self._gpu.current_stream(), self._gpu.new_event()
        end.record(stream)
        self._last = stream, end
        return (CudaMark(end),)

    def hold_for(self, mark: CudaMark) -> None:
        """Make the current stream wait; the host waits only for a copy that has not been launched yet."""
        mark.hold(self._gpu.current_stream())

    def materialise(self) -> None:
        """Do nothing: tensors exist from the launch of their kernels on."""

    def lap_peak_nbytes(self) -> int | None:
        """Read the peak of torch's allocator since the last call.

        The allocator's books follow the host, which runs ahead, so peaks between two calls of the host are the right
        ones. Peaks that the user reads are not reset (`torch_private.cuda_allocator`).
        """
        return self._gpu.lap_peak_nbytes() if self._meter else None

    def num_retries(self) -> int:
        """Count retries as `Tier.num_retries`, since the tier was made."""
        now = self._gpu.num_retries()
        self._retries_before = min(self._retries_before, now)  # a user may have reset the allocator's count
        return now - self._retries_before

    def drain(self) -> None:
        """Block the host until every copy has ended."""
        self.links.drain()

    def end_soon(self) -> None:
        """End the copy threads behind their queued copies."""
        self.links.end_soon()


@contextlib.contextmanager
def memory_limit(nbytes: int, device: torch.device | int = 0) -> Iterator[None]:
    """Limit torch's allocator to `nbytes` on the device inside the block; lift the limit afterwards.

    For tests and benchmarks: beyond it, allocations raise `torch.OutOfMemoryError`. The limit counts reserved bytes,
    cached blocks included, so the cache is emptied first.

    Raises:
        OptionsError: the device does not have that much.
    """
    total_nbytes = torch.cuda.get_device_properties(device).total_memory
    if not 0 < nbytes <= total_nbytes:
        raise OptionsError(f"a memory limit is between 1 and the device's {total_nbytes} bytes, not {nbytes}")
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(nbytes / total_nbytes, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
