"""Keep the time of a planned step: where computation is, and when the queue of each link is empty.

These are the runtime's rules, for the planner and the simulator alike: copies queue on their link, one after another,
from the moment they are issued; a wait holds the computation until a copy is done; a gradient chunk that no call of the
step has written home yet has nothing to read there.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType


class Clock:
    """Time of the computation and of every queue.

    Attributes:
        now: when computation comes to this point.
        written: groups with gradients at home; the load of any other group's gradients copies nothing.
    """

    __slots__ = ("_free", "now", "written")

    def __init__(self, free: Mapping[str, float] = MappingProxyType({})) -> None:
        """Begin at 0, with queues that are empty only at the times in `free`."""
        self.now = 0.0
        self.written: set[int] = set()
        self._free = dict(free)

    def free_s(self, queue: str) -> float:
        """Return when a queue is empty."""
        return self._free.get(queue, 0.0)

    def copy(self, queue: str, seconds: float, ready_s: float = 0.0) -> tuple[float, float]:
        """Issue a copy, or other work of a queue, that may begin from `ready_s` on; return when it begins and ends."""
        begin_s = max(self.now, self._free.get(queue, 0.0), ready_s)
        self._free[queue] = end_s = begin_s + seconds
        return begin_s, end_s

    def wait(self, done_s: float) -> None:
        """Hold the computation until that time."""
        self.now = max(self.now, done_s)

    def run(self, seconds: float) -> None:
        """Compute for so long."""
        self.now += seconds
