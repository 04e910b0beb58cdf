"""A least-recently-used cache with a limit on the total size of its entries."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, ItemsView, ValuesView
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """A least-recently-used cache; bounded, since the exact inputs of a step may never repeat in days of training.

    Args:
        limit: on the total size of all entries; the latest entry is kept whatever its size.
        size_of: size of an entry, in the unit of `limit`; 1 by default.
    """

    def __init__(self, limit: int, size_of: Callable[[V], int] = lambda value: 1) -> None:
        self.limit = limit
        self.size = 0
        self._size_of = size_of
        self._entries: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def items(self) -> ItemsView[K, V]:
        """Return keys and entries, the most recently used last."""
        return self._entries.items()

    def values(self) -> ValuesView[V]:
        """Return entries, the most recently used last."""
        return self._entries.values()

    def clear(self) -> None:
        """Remove all entries."""
        self._entries.clear()
        self.size = 0

    def find(self, key: K) -> V | None:
        """Look up an entry and mark it as the most recently used; return None if there is none."""
        if key not in self._entries:
            return None
        self._entries.move_to_end(key)
        return self._entries[key]

    def keep(self, key: K, value: V) -> V:
        """Add or replace an entry, drop the least recently used ones beyond the limit, and return `value`."""
        if key in self._entries:
            self.size -= self._size_of(self._entries.pop(key))
        self._entries[key] = value
        self.size += self._size_of(value)
        while self.size > self.limit and len(self._entries) > 1:
            self.size -= self._size_of(self._entries.popitem(last=False)[1])
        return value
