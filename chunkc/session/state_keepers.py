"""Register which optimizer's states are in chunks: two optimizers may have stepped the same parameters."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable

from chunkc.runtime.store.store import ChunkStore


class StateKeepers:
    """The optimizers with states in chunks, by parameter. Held weakly."""

    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        self._keepers: dict[str, weakref.ref[object]] = {}

    def has(self, optimizer: object, names: Iterable[str]) -> bool:
        """Whether chunks have room for this optimizer's states of these parameters, and not for another's."""
        return all(name in self._keepers and self._keepers[name]() is optimizer for name in names)

    def has_none(self, names: Iterable[str]) -> bool:
        """Whether chunks have no states of these parameters."""
        return not any(name in self._keepers for name in names)

    def keep(self, optimizer: object, group: int, names: Collection[str]) -> None:
        """Give the home states of these parameters of a group to this optimizer.

        States of another optimizer leave the chunks, and live on in its views, as states of two optimizers in PyTorch
        do.
        """
        if self.has(optimizer, names):
            return
        if any(name in self._keepers and self._keepers[name]() is not optimizer for name in names):
            self._store.release_states(group)
        self._keepers.update(dict.fromkeys(names, weakref.ref(optimizer)))

    def leave(self, group: int) -> None:
        """Take the states of a group out of its chunks: from now on only their optimizer has them."""
        self._store.release_states(group)
        for of_group in self._store.layout.groups[group].slices:
            self._keepers.pop(of_group.spec.name, None)
