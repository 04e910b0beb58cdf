"""Send messages between GPUs by NCCL, from memory to memory, in the order of the current stream.

All messages use one communicator, since NCCL's kernels must start in one order on every rank: the order of their
launches, which is the plan's (see `runtime.device.cuda`). A launch does not wait: the current stream goes on when the
messages have arrived, and the host goes on at once. So a thread watches messages under way, and aborts them after a
timeout. Received memory is undefined after an abort; so the transport is marked as failed before it.

PyTorch's own watchdog would end the process, and count from the launch on; here it only cleans up.

With tensor parallelism, the layers' collectives are PyTorch's, on another communicator. They are watched in the same
way, and aborted with the messages: each may wait for a rank that waits for the other.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from chunkc.torch_private.process_groups import abort, look_after, with_own_communicators, without_watchdog

_FOREVER = timedelta(days=365)
_POLL_S = 0.1


class _InFlight:
    """Enqueued work that is not over, in order."""

    def __init__(self) -> None:
        self._events: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()  # begin and end of each
        self._waits_since_s: float | None = None

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note the work that is enqueued inside on the current stream."""
        begin, end = torch.cuda.Event(), torch.cuda.Event()
        begin.record()
        yield
        end.record()
        self._events.append((begin, end))

    def is_late(self, timeout_s: float) -> bool:
        """Whether the first work takes longer than `timeout_s`, counted from when the stream has reached it."""
        while self._events and self._events[0][1].query():
            self._events.popleft()
            self._waits_since_s = None
        if not self._events or not self._events[0][0].query():
            return False
        now_s = time.monotonic()
        if self._waits_since_s is None:
            self._waits_since_s = now_s
        return now_s - self._waits_since_s > timeout_s


class GpuMessages:
    """Connection of the GPUs of several ranks, one each. All ranks make it collectively.

    Args:
        ranks: of the default process group.
        device: this rank's.
        timeout_s: how long messages may take, counted from when the stream has reached them.
        on_timeout: called by another thread before messages under way are aborted.
        layers: groups of tensor parallelism.

    Raises:
        RuntimeError: a rank is gone, or NCCL cannot connect them.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        device: torch.device,
        timeout_s: float,
        on_timeout: Callable[[], None],
        layers: Sequence[dist.ProcessGroup] = (),
    ) -> None:
        self.device = device
        self._ranks, self._timeout_s, self._on_timeout = tuple(ranks), timeout_s, on_timeout
        self._under_way, self._in_layers = _InFlight(), _InFlight()
        self._layers = tuple(layers)
        for group in self._layers:
            look_after(group, self._in_layers.noted)
        self._stop = threading.Event()
        self._is_aborted, self._aborting = False, threading.Lock()
        with without_watchdog(), with_own_communicators():
            self._group = dist.new_group(list(ranks), timeout=_FOREVER, backend="nccl", use_local_synchronization=True)
        watch = threading.Thread(target=_watch, args=(weakref.ref(self), self._stop), name="chunkc-nccl", daemon=True)
        weakref.finalize(self, self._stop.set)
        with torch.cuda.device(device), self._under_way.noted():
            dist.all_reduce(torch.zeros(1, device=device), group=self._group)
        watch.start()
        torch.cuda.synchronize(device)

    def exchange(self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Enqueue messages on the current stream, all at once. Does not wait for them.

        Args:
            sends, receives: an index into `ranks` and a flat uint8 tensor on the device for each message.

        Raises:
            RuntimeError: they cannot be enqueued.
        """
        operations = [dist.P2POp(dist.irecv, tensor, self._ranks[rank], self._group) for rank, tensor in receives]
        operations += [dist.P2POp(dist.isend, tensor, self._ranks[rank], self._group) for rank, tensor in sends]
        if not operations:
            return
        with self._under_way.noted():
            for work in dist.batch_isend_irecv(operations):
                work.wait()  # the current stream does

    def abort(self) -> None:
        """Abort messages under way and all later ones; received memory is undefined then."""
        with self._aborting:
            if not self._is_aborted:
                self._is_aborted = True
                self._stop.set()
                for group in (self._group, *self._layers):
                    abort(group, "cuda")

    def look(self) -> None:
        """Abort if the other ranks' messages have not come in time."""
        if any(work.is_late(self._timeout_s) for work in (self._under_way, self._in_layers)):
            self._on_timeout()
            self.abort()


def _watch(reference: weakref.ref[GpuMessages], stop: threading.Event) -> None:
    while not stop.wait(_POLL_S):
        messages = reference()
        if messages is None:
            return
        with suppress(RuntimeError):  # a broken device: its next use raises
            messages.look()
        del messages  # else the thread would keep it alive while it sleeps
