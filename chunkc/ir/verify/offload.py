"""Verify storages that a forward saves and that are offloaded until the backward reads them.

saved     such a storage is copied home, as a whole, after the last call that reads it; after that copy no value holds
it any more; every offloaded storage is copied; no call reads a placeholder before its storage is back; it comes back
once, as a whole
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Protocol

from torch import fx

from chunkc.ir.items import SavedStorage


class Walk(Protocol):
    """Interface of the walk over the graph: its values, and counts of their bytes."""

    storage_of: dict[fx.Node, str]
    storage_nbytes: dict[str, int]
    holders: Counter[str]

    def fail(self, rule: str, node: fx.Node | None, text: str) -> None: ...

    def hold(self, storage: str, values: int) -> None: ...

    def bind(self, node: fx.Node, storage: str, nbytes: int) -> None: ...

    def read_once(self, node: fx.Node) -> None: ...


class SavedStorages:
    """State of each saved storage during the walk.

    Args:
        offloaded: the storages that are to be at home between the phases.
        links: the link of a copy `in`, and of one `out`.
    """

    def __init__(self, walk: Walk, offloaded: Collection[str], links: Mapping[str, str]) -> None:
        self._walk, self._offloaded, self._links = walk, frozenset(offloaded), links
        self._placeholders: dict[fx.Node, str] = {}  # -> the storage
        self._nbytes: dict[str, int] = {}
        self._leaving: dict[str, str] = {}  # storage -> the link of its copy under way
        self._copied: dict[str, str] = {}  # storage -> its name in the walk
        self._at_home: set[str] = set()  # copied, and waited for
        self._coming: dict[str, str] = {}  # storage -> the link of its copy back
        self._left: set[str] = set()
        self._back: set[str] = set()

    def placeholder(self, node: fx.Node, storage: str, nbytes: int) -> bool:
        """Whether a graph input is the placeholder of an offloaded value; it has no bytes then."""
        if storage not in self._offloaded:
            return False
        self._placeholders[node], self._nbytes[storage] = storage, nbytes
        self._walk.bind(node, f"home:{node.name}", 0)
        return True

    def call(self, node: fx.Node) -> None:
        """Check that a call reads neither placeholders nor storages under a copy."""
        for value in node.all_input_nodes:
            if value in self._placeholders:
                storage = self._placeholders[value]
                self._walk.fail("saved", node, f"{value} is read, but its storage {storage} is at home")
            elif self._walk.storage_of.get(value) in self._copied.values():
                self._walk.fail("saved", node, f"{value} is read after the copy of its storage began")

    def on_write_back(self, node: fx.Node, item: SavedStorage, link: str, nbytes: int, *values: fx.Node) -> None:
        walk, storage = self._walk, str(item)
        if storage not in self._offloaded or storage in self._copied:
            walk.fail("saved", node, f"{storage} is not to be offloaded, or is offloaded already")
        if link != self._links["out"]:
            walk.fail("link", node, f"a copy of {storage} home does not go by {link!r}")
        storages = {walk.storage_of[value] for value in values}
        for value in values:
            walk.read_once(value)
        if len(storages) != 1:
            return walk.fail("saved", node, f"the values of {storage} lie in {sorted(storages)}")
        self._copied[storage] = storages.pop()
        if (storage_nbytes := walk.storage_nbytes[self._copied[storage]]) != nbytes:
            walk.fail("saved", node, f"{storage} has {storage_nbytes} bytes, but {nbytes} are copied")
        self._leaving[storage] = link

    def on_wait(self, node: fx.Node, item: SavedStorage, link: str, *prefetched: fx.Node) -> None:
        storage, copies = str(item), self._coming if prefetched else self._leaving
        if copies.pop(storage, None) != link:
            self._walk.fail("saved", node, f"{storage} is waited for, but no copy of it was under way on {link!r}")
        if prefetched:
            self._arrive(node, storage, *prefetched)
        else:
            self._at_home.add(storage)

    def on_evict(self, node: fx.Node, item: SavedStorage, *values: fx.Node) -> None:
        walk, storage = self._walk, str(item)
        for value in values:
            walk.read_once(value)
        if storage not in self._offloaded:  # dropped, for the backward to recompute
            for output in node.users:
                walk.bind(output, f"dropped:{output.name}", 0)
            return
        if storage not in self._at_home or storage in self._left:
            walk.fail("saved", node, f"{storage} is released, but not after a copy of it")
        if walk.holders[self._copied.get(storage, "")]:
            walk.fail("saved", node, f"{storage} is released, but other values still hold it")
        self._left.add(storage)
        for output in node.users:
            self._placeholders[output] = storage

    def on_prefetch(self, node: fx.Node, item: SavedStorage, link: str, nbytes: int, *placeholders: fx.Node) -> None:
        walk, storage = self._walk, str(item)
        if storage in self._coming or storage in self._back:
            walk.fail("saved", node, f"{storage} is back already")
        if link != self._links["in"]:
            walk.fail("link", node, f"a copy of {storage} from home does not go by {link!r}")
        for value in placeholders:
            if self._placeholders.get(value) != storage:
                walk.fail("saved", node, f"{value} is not the placeholder of a value in {storage}")
            walk.read_once(value)
        if self._nbytes.get(storage) != nbytes:
            walk.fail("saved", node, f"{storage} has {self._nbytes.get(storage)} bytes at home, but {nbytes} of room")
        walk.storage_nbytes[storage] = nbytes
        walk.hold(storage, 1)
        self._coming[storage] = link

    def _arrive(self, node: fx.Node, storage: str, prefetched: fx.Node) -> None:
        walk, prefetched_storage = self._walk, str(prefetched.args[0])
        if prefetched_storage != storage:
            walk.fail("saved", node, f"{storage} arrives, but in the room of {prefetched_storage}")
        self._back.add(storage)
        for output in node.users:
            walk.bind(output, storage, self._nbytes.get(storage, 0))
        walk.hold(prefetched_storage, -1)

    def on_recompute(self, node: fx.Node, item: SavedStorage, computed: fx.Node, *placeholders: fx.Node) -> None:
        walk = self._walk
        for output in node.users:
            walk.bind(output, walk.storage_of[computed], walk.storage_nbytes[walk.storage_of[computed]])
        for value in (computed, *placeholders):
            walk.read_once(value)

    def end(self, returned: Iterator[fx.Node]) -> None:
        """Check the state after the last node; `returned`: the values that the phase returns."""
        for storage in sorted({**self._leaving, **self._coming}):
            self._walk.fail("end", None, f"{storage} is left under a copy")
        passed_in = set(self._nbytes)
        for storage in sorted(self._offloaded - passed_in):
            if storage not in self._left:
                self._walk.fail("saved", None, f"{storage} is to be offloaded, but is not")
        represented = {self._placeholders[node] for node in returned if node in self._placeholders}
        for storage in sorted(self._left - represented):
            self._walk.fail("saved", None, f"{storage} is offloaded, but no placeholder of it is returned")
