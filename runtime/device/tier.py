"""Define the compute tier: with streams and homes, the only code that knows what kind of device computes.

Three orders meet here. The host runs through a phase's instructions and keeps the books: states, slots, registers.
Computation happens in the order of the compute stream, copies in the order of their links. On a CPU the host is the
compute stream; on a GPU the host runs ahead of it. So decisions of the host are never late; the bytes must be ordered,
and two edges order them all:

- A copy starts after `mark()`: after all the computation that was enqueued before it. So a prefetch may take memory
  that earlier computation still uses, and reads the bytes that eager code has just written to home; a write-back reads
  the bytes that computation put into the slot.
- Computation enqueued after `hold_for(copy)` starts after that copy, in or out. The plan waits for every copy before
  the slot is read or given back. So a slot is always owned by the compute stream: it is given back in that stream's
  order, which is the order in which its memory is reused. Also, computation or eager code that follows a phase finds
  home as the phase's write-backs left it: no phase ends before it has waited for them.

A GPU's compute stream is the calling thread's current one. Where phases are on several streams, each continues where
the last one ended (`join_stream`): they share homes, links and gradients, and the caller does not order these.

A host that reads a value (`.item()`, `.cpu()`) waits for the compute stream, and so for both edges. A host that reads
or writes home memory itself, as an update on CPU threads does, calls `ChunkSlots.await_home` first.
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
    """End of enqueued work: of a copy, or of all computation up to a point. Valid as long as it is referenced."""

    def done(self) -> bool:
        """Whether `wait` would not block."""

    def wait(self) -> None:
        """Block the host until the work is over; raise the error of a failed copy (HomeError, StreamError)."""


class Link(Protocol):
    """Queue of copies, which run in the order of their submission."""

    @property
    def busy_s(self) -> float:
        """Total seconds of copies that have ended."""

    def submit(self, job: Callable[[], None], *, after: Sequence[Any] = ()) -> Mark:
        """Queue a copy, to start once all marks of `after` are over. Never blocks."""

    def drain(self) -> None:
        """Block the host until every copy has ended; raise the first error that no wait has raised."""

    def end_soon(self) -> None:
        """End the copy thread behind its queued copies. Never blocks."""


class Links:
    """Links of a tier by name, each opened with its first copy.

    Args:
        open_link: opens the link of a name.
    """

    def __init__(self, open_link: Callable[[str], Link]) -> None:
        self._open_link = open_link
        self._links: dict[str, Link] = {}

    def __getitem__(self, name: str) -> Link:
        """Return the link of a name (see `chunkc.ir.links`), opened with the first call."""
        if name not in self._links:
            assert name in QUEUES, name
            self._links[name] = self._open_link(name)
        return self._links[name]

    def busy_s(self, *, inward: bool) -> float:
        """Sum up the seconds of copies that have ended: to the device, or else to home."""
        return sum((link.busy_s for name, link in self._links.items() if (name in INWARD) == inward), 0.0)

    def drain(self) -> None:
        """Block the host until every copy has ended; raise the first error that no wait has raised."""
        for link in self._links.values():
            link.drain()

    def end_soon(self) -> None:
        """End the copy threads behind their queued copies. Never blocks."""
        for link in self._links.values():
            link.end_soon()


class Tier(Protocol):
    """Memory that the model computes in, and the order of its computation."""

    @property
    def device(self) -> torch.device: ...

    @property
    def links(self) -> Links: ...

    def allocate_slot(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate a flat, uninitialised buffer; earlier work of the compute stream may still use its memory."""

    def enqueue(self, job: Callable[..., object], *args: Any) -> None:
        """Compute `job(*args)` behind all computation enqueued so far.

        Computes at once where the host computes, or where kernels queue by themselves.
        """

    def join_stream(self) -> None:
        """Make computation enqueued from now on start after all computation before, on every stream."""

    def mark(self) -> Sequence[Any]:
        """Mark the end of all computation enqueued so far, on every stream; no mark if it is over already."""

    def hold_for(self, mark: Any) -> None:
        """Make computation enqueued from now on start after `mark`.

        Raises:
            HomeError, StreamError: the mark's copy failed.
        """

    def materialise(self) -> None:
        """Block until enqueued computation has made its values as objects; their bytes may be written later."""

    def lap_peak_nbytes(self) -> int | None:
        """Read the peak in bytes since the last call, or None where nothing meters the tier."""

    def num_retries(self) -> int:
        """Count how often the tier's allocator found no room, released all cached blocks, and tried again.

        Each time computation waits. 0 where an allocator caches nothing.
        """

    def drain(self) -> None:
        """Block the host until every copy has ended."""

    def end_soon(self) -> None:
        """End the copy threads behind their queued copies. Never blocks."""


AT_ONCE: Callable[..., None] = operator.call
"""`Tier.enqueue` where the host computes, or where kernels queue by themselves."""


class CpuTier:
    """RAM as the memory that the model computes in. Slots come from torch's own CPU allocator, exactly sized.

    Args:
        delay: race tests only: seconds to sleep before every copy.
    """

    device = torch.device("cpu")
    enqueue: ClassVar[Callable[..., None]] = staticmethod(AT_ONCE)  # the host computes, now

    def __init__(self, *, delay: Callable[[], float] | None = None) -> None:
        self.links = Links(lambda name: WorkerStream(name, delay=delay))

    def allocate_slot(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate a flat, uninitialised buffer."""
        return torch.empty(numel, dtype=dtype, device=self.device)

    def join_stream(self) -> None:
        """Do nothing: the host's computation is over when its call returns."""

    def mark(self) -> tuple[JobMark, ...]:
        """Return no marks: the host's computation is over when its call returns."""
        return ()

    def hold_for(self, mark: JobMark) -> None:
        """Block the host, which computes, until `mark` is over."""
        mark.wait()

    def materialise(self) -> None:
        """Do nothing: the host's computation is over when its call returns."""

    def lap_peak_nbytes(self) -> int | None:
        """Read the peak since the last call, or None where nothing meters the tier (`runtime.device.cpu_allocator`)."""
        return cpu_allocator.lap_peak_if_installed()

    def num_retries(self) -> int:
        return 0

    def drain(self) -> None:
        """Block the host until every copy has ended."""
        self.links.drain()

    def end_soon(self) -> None:
        """End the copy threads behind their queued copies."""
        self.links.end_soon()
