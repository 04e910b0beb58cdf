"""Tiers with late copies: at the wait, or after random delays."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import pytest

from chunkc.runtime.device.tier import CpuTier, Links, Mark

Factory = Callable[[], CpuTier]


class LateEvent:
    """A copy that runs when it is waited for, after updates by the CPU that come before it."""

    def __init__(self, job: Callable[[], None], after: Iterable[Mark]) -> None:
        self.job: Callable[[], None] | None = job
        self.after = tuple(after)

    def done(self) -> bool:
        return self.job is None

    def wait(self) -> None:
        if self.job is not None:
            job, self.job = self.job, None
            for mark in self.after:
                mark.wait()
            job()


class LateStream:
    """Shaped like a `WorkerStream`; what was never waited for runs at `drain`."""

    busy_s = 0.0

    def __init__(self) -> None:
        self.queue: deque[LateEvent] = deque()

    def submit(self, job: Callable[[], None], *, after: Iterable[Mark] = ()) -> LateEvent:
        self.queue.append(LateEvent(job, after))
        return self.queue[-1]

    def drain(self) -> None:
        while self.queue:
            self.queue.popleft().wait()

    def end_soon(self) -> None:
        """Do nothing: there is no thread to end."""


class LateTier(CpuTier):
    """Make every copy as late as it may be."""

    def __init__(self) -> None:
        super().__init__()
        self.links = Links(lambda name: LateStream())


@contextmanager
def tier_of_new_sessions(factory: Factory) -> Iterator[None]:
    """Let sessions made inside compute on a tier made by `factory`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("chunkc.runtime.storage.open_compute.CpuTier", factory)
        yield
