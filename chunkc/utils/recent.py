"""A least-recently-used cache with a limit on the sizes of its entries."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, ItemsView, ValuesView
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """A bounded mapping of the entries used last: in a training of days, a step's inputs may never repeat exactly.

    Args:
        limit: of all entries together; the latest is kept whatever its size.
        size_of: of an entry, in the limit's unit; by default each is 1.
    """

    def __init__(self, limit: int, size_of: Callable[[V], int] = lambda value: 1) -> None:
        self.limit = limit
        self.size = 0
        self._size_of = size_of
        self._entries: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def items(self) -> ItemsView[K, V]:
        """Keys and entries, the one last used last."""
        return self._entries.items()

    def values(self) -> ValuesView[V]:
        """Entries, the one last used last."""
        return self._entries.values()

    def clear(self) -> None:
        """Forget all entries."""
        self._entries.clear()
        self.size = 0

    def find(self, key: K) -> V | None:
        """Look up an entry and mark it as used last; None if there is none."""
        if key not in self._entries:
            return None
        self._entries.move_to_end(key)
        return self._entries[key]

    def keep(self, key: K, value: V) -> V:
        """Add `value`, and drop the least recently used entries beyond the limit."""
        if key in self._entries:
            self.size -= self._size_of(self._entries.pop(key))
        self._entries[key] = value
        self.size += self._size_of(value)
        while self.size > self.limit and len(self._entries) > 1:
            self.size -= self._size_of(self._entries.popitem(last=False)[1])
        return value
