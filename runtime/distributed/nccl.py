"""Messages between GPUs: by NCCL, from memory to memory, in the order of the current stream.

One communicator has all of them, since NCCL's kernels must start in one order on every rank: that in which they are
launched, which is the plan's (see `runtime.cuda`). To launch is not to wait: the current stream goes on when messages
are there, and the host goes on at once. So a thread looks after what is under way, and aborts it when it takes too
long. What an abort leaves in memory is no message; so ranks have failed before it.

PyTorch's own watchdog would end the process, and count from the launch on; here it only clears up.

Where ranks compute layers together, their collectives are PyTorch's, of another communicator. They are looked after in
the same way, and aborted with the messages: each may wait for a rank that waits for the other.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from chunkc.torch_private.process_groups import abort, look_after, with_own_communicators, without_watchdog

_FOREVER = timedelta(days=365)
_POLL_S = 0.1


class _InFlight:
    """What has been enqueued and is not over, in order."""

    def __init__(self) -> None:
        self._events: deque[tuple[Any, Any]] = deque()  # of its turn, and of its end
        self._waits_since_s: float | None = None

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Around what is enqueued on the current stream."""
        turn, end = torch.cuda.Event(), torch.cuda.Event()
        turn.record()
        yield
        end.record()
        self._events.append((turn, end))

    def is_late(self, timeout_s: float) -> bool:
        """Whether the first of it takes longer than that, from when its turn in the stream has come."""
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
    """The GPUs of some ranks, one each, connected.

    Args:
        ranks: of the default process group; all of them come here together.
        device: this rank's.
        timeout_s: how long messages may take from when their turn in the stream has come.
        on_timeout: called by another thread before what is under way is aborted.
        layers: groups in which ranks compute layers together.

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
        """Enqueue messages on the current stream, all at once; returns as soon as that is done.

        Args:
            sends, receives: an index into `ranks`, and flat uint8 tensors on the device.

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
        """End what is under way, and whatever comes; memory has anything then."""
        with self._aborting:
            if not self._is_aborted:
                self._is_aborted = True
                self._stop.set()
                for group in (self._group, *self._layers):
                    abort(group, "cuda")

    def look(self) -> None:
        """Abort where the other ranks' messages have not come in time."""
        if any(one.is_late(self._timeout_s) for one in (self._under_way, self._in_layers)):
            self._on_timeout()
            self.abort()


def _watch(messages: weakref.ref[GpuMessages], stop: threading.Event) -> None:
    while not stop.wait(_POLL_S):
        found = messages()
        if found is None:
            return
        with suppress(RuntimeError):  # a broken device: whoever uses it is told
            found.look()
        del found
