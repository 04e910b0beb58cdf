"""The compute tier: the one place, with streams and homes, that knows what kind of device computes.

Three orders meet here. The host runs through a phase's instructions and keeps the books: states, slots, registers.
Computation happens in the order of the compute stream, copies in the order of their links. On a CPU the host is the
compute stream; on a GPU the host runs ahead of it. What the host decides is thus never late; what must be ordered is
the bytes, and two edges order them all:

- A copy starts after `mark()`: after all the computation that was enqueued before it. So a prefetch may take memory
  that earlier computation still uses, and reads from home what eager code has just written there; a write-back finds
  what computation put into the slot.
- Computation enqueued after `hold_for(copy)` starts after that copy, in or out. The plan waits for every copy before
  the slot is read or given back. So a slot is always owned by the compute stream: it is given back in that stream's
  order, which is the order in which its memory is used again. Also, whatever computation or eager code follows a
  phase finds home as the phase's write-backs left it: no phase ends before it has waited for them.

A GPU's compute stream is the calling thread's current one. Where phases are on several streams, each goes on where the
last one ended (`join_stream`): they share homes, links and gradients, of whose order the caller knows nothing.

A host that reads a value (`.item()`, `.cpu()`) waits for the compute stream, and with it for all of this. A host that
reads or writes home memory itself, as an update on CPU threads does, asks `ChunkStore.await_home` first.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import torch

from chunkc.ir.links import INWARD, QUEUES
from chunkc.runtime.device import cpu_allocator
from chunkc.runtime.device.streams import JobMark, WorkerStream


class Mark(Protocol):
    """The end of something enqueued: a copy, or all computation up to a point. Valid as long as it is held."""

    def done(self) -> bool:
        """Whether `wait` would not block."""

    def wait(self) -> None:
        """Block the host until it is over; raise what a failed copy raised (HomeError, StreamError)."""


class Links:
    """A tier's links by name, each made with its first copy.

    Args:
        make: opens the link of that name.
    """

    def __init__(self, make: Callable[[str], Any]) -> None:
        self._make = make
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        """The link of that name (see `chunkc.ir.links`): copies in the order in which they are submitted to it."""
        if name not in self._made:
            assert name in QUEUES, name
            self._made[name] = self._make(name)
        return self._made[name]

    def busy_s(self, *, inward: bool) -> float:
        """Seconds that copies to the device, or else home, have taken in all, as far as they have ended."""
        return sum((link.busy_s for name, link in self._made.items() if (name in INWARD) == inward), 0.0)

    def drain(self) -> None:
        """Block the host until every copy has ended; raise the first error nobody has been told of."""
        for link in self._made.values():
            link.drain()

    def end_soon(self) -> None:
        """End the threads that copy, behind what they have to copy. Never blocks."""
        for link in self._made.values():
            link.end_soon()


class Tier(Protocol):
    """The memory the model computes in, and the order in which it does."""

    @property
    def device(self) -> torch.device: ...

    @property
    def links(self) -> Links: ...

    def allocate_slot(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat, uninitialised buffer of the compute stream's; its memory may still be in use by what it ran."""

    def enqueue(self, job: Callable[..., object], *args: Any) -> None:
        """Compute `job(*args)` behind everything enqueued so far.

        At once, where the host computes or where kernels queue by themselves.
        """

    def join_stream(self) -> None:
        """Computation enqueued from now on starts after all that was before, on whatever stream it was."""

    def mark(self) -> Sequence[Any]:
        """A `Mark` at which all computation enqueued so far is over, on whatever stream; none if it is over already."""

    def hold_for(self, mark: Any) -> None:
        """Computation enqueued from now on starts after `mark`.

        Raises:
            HomeError, StreamError: the copy it stands for failed.
        """

    def materialise(self) -> None:
        """Block until enqueued computation has made its values as objects; their bytes may still be on the way."""

    def lap_peak_nbytes(self) -> int | None:
        """The peak in bytes since the last call of this, or None where nothing meters the tier."""

    def num_retries(self) -> int:
        """How often the tier's allocator found no room, gave back all that it had cached, and tried again. Each time
        computation waits. 0 where an allocator caches nothing."""

    def drain(self) -> None:
        """Block the host until every copy has ended."""

    def end_soon(self) -> None:
        """End the threads that copy, behind what they have to copy. Never blocks."""


AT_ONCE: Callable[..., None] = operator.call
"""How a tier computes whose computation is the host's, or queues by itself."""


class CpuTier:
    """RAM as the memory the model computes in. Slots come from torch's own CPU allocator, exactly sized.

    Args:
        delay: race tests only: seconds to sleep before every copy.
    """

    device = torch.device("cpu")
    enqueue: ClassVar[Callable[..., None]] = staticmethod(AT_ONCE)  # the host computes, now

    def __init__(self, *, delay: Callable[[], float] | None = None) -> None:
        self.links = Links(lambda name: WorkerStream(name, delay=delay))

    def allocate_slot(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat, uninitialised buffer."""
        return torch.empty(numel, dtype=dtype, device=self.device)

    def join_stream(self) -> None:
        """Nothing to do: what the host has computed is there."""

    def mark(self) -> tuple[JobMark, ...]:
        """Nothing to wait for: what the host has computed is there."""
        return ()

    def hold_for(self, mark: JobMark) -> None:
        """The host computes, so the host waits."""
        mark.wait()

    def materialise(self) -> None:
        """Nothing to do: what the host has computed is there."""

    def lap_peak_nbytes(self) -> int | None:
        """The peak since the last call of this, or None where nothing meters the tier (see `runtime.cpu_allocator`)."""
        return cpu_allocator.lap_peak_if_installed()

    def num_retries(self) -> int:
        return 0

    def drain(self) -> None:
        """Wait for every copy."""
        self.links.drain()

    def end_soon(self) -> None:
        """End the threads that copy, behind what they have to copy."""
        self.links.end_soon()
