"""A dictionary of what was made for given circumstances, which forgets what was not asked for longest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(OrderedDict[K, V]):
    """At most `limit` entries: training may run for days, and what is around a step may never be quite the same."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def find(self, key: K) -> V | None:
        """The entry, which is then the one used last; None if there is none."""
        if key not in self:
            return None
        self.move_to_end(key)
        return self[key]

    def keep(self, key: K, value: V) -> V:
        """Enter `value`, and forget the entry that was not used for longest where there are too many."""
        self[key] = value
        self.move_to_end(key)
        while len(self) > self.limit:
            self.popitem(last=False)
        return value
