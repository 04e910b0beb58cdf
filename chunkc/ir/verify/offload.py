"""The verifier's rule for storages that a forward saves and that are at home until the backward reads them.

saved     such a storage is copied home, as a whole, after the last call that reads it; it is given up after that
          copy, by all who hold it, and all that are to leave do; what stands for a value is read by no call, before
          its storage is back, all of it, once
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Protocol

from torch import fx


class Walk(Protocol):
    """What the walk over the graph knows of values, and counts of their bytes."""

    storage_of: dict[fx.Node, str]
    storage_nbytes: dict[str, int]
    holders: Counter[str]

    def fail(self, rule: str, node: fx.Node | None, text: str) -> None: ...

    def hold(self, storage: str, values: int) -> None: ...

    def bind(self, node: fx.Node, storage: str, nbytes: int) -> None: ...

    def read_once(self, node: fx.Node) -> None: ...


class SavedStorages:
    """Where each of them is.

    Args:
        at_home: the storages that are to be at home between the phases.
        links: the link of a copy `in`, and of one `out`.
    """

    def __init__(self, walk: Walk, at_home: Collection[str], links: Mapping[str, str]) -> None:
        self._walk, self._at_home, self._links = walk, frozenset(at_home), links
        self._stand_ins: dict[fx.Node, str] = {}
        self._nbytes: dict[str, int] = {}
        self._leaving: dict[str, str] = {}  # storage -> the link of its copy under way
        self._copied: dict[str, str] = {}  # storage -> what the walk calls it
        self._coming: dict[str, str] = {}
        self._left: set[str] = set()
        self._back: set[str] = set()

    def placeholder(self, node: fx.Node, storage: str, nbytes: int) -> bool:
        """Whether what is passed in stands for a value at home; it has no bytes then."""
        if storage not in self._at_home:
            return False
        self._stand_ins[node], self._nbytes[storage] = storage, nbytes
        self._walk.bind(node, f"home:{node.name}", 0)
        return True

    def call(self, node: fx.Node) -> None:
        for value in node.all_input_nodes:
            if value in self._stand_ins:
                self._walk.fail("saved", node, f"{value} is read, and its storage {self._stand_ins[value]} is at home")
            elif self._walk.storage_of.get(value) in self._copied.values():
                self._walk.fail("saved", node, f"{value} is read after the copy of its storage began")

    def on_offload(self, node: fx.Node, storage: str, link: str, nbytes: int, *values: fx.Node) -> None:
        walk = self._walk
        if storage not in self._at_home or storage in self._leaving or storage in self._left:
            walk.fail("saved", node, f"{storage} is not to leave, or has left already")
        if link != self._links["out"]:
            walk.fail("link", node, f"a copy of {storage} home does not go by {link!r}")
        lies_in = {walk.storage_of[value] for value in values}
        for value in values:
            walk.read_once(value)
        if len(lies_in) != 1:
            return walk.fail("saved", node, f"the values of {storage} lie in {sorted(lies_in)}")
        self._copied[storage] = lies_in.pop()
        if (external_nbytes := walk.storage_nbytes[self._copied[storage]]) != nbytes:
            walk.fail("saved", node, f"{storage} has {external_nbytes} bytes, and {nbytes} are copied")
        self._leaving[storage] = link

    def on_leave(self, node: fx.Node, storage: str, link: str, *values: fx.Node) -> None:
        if self._leaving.pop(storage, None) != link:
            self._walk.fail("saved", node, f"{storage} is given up, and no copy of it was under way on {link!r}")
        for value in values:
            self._walk.read_once(value)
        if self._walk.holders[self._copied.get(storage, "")]:
            self._walk.fail("saved", node, f"{storage} is given up, and others hold it still")
        self._left.add(storage)
        for output in node.users:
            self._stand_ins[output] = storage

    def on_reload(self, node: fx.Node, storage: str, link: str, nbytes: int, *stand_ins: fx.Node) -> None:
        walk = self._walk
        if storage in self._coming or storage in self._back:
            walk.fail("saved", node, f"{storage} is back already")
        if link != self._links["in"]:
            walk.fail("link", node, f"a copy of {storage} from home does not go by {link!r}")
        for value in stand_ins:
            if self._stand_ins.get(value) != storage:
                walk.fail("saved", node, f"{value} does not stand for a value in {storage}")
            walk.read_once(value)
        if self._nbytes.get(storage) != nbytes:
            walk.fail("saved", node, f"{storage} has {self._nbytes.get(storage)} bytes at home, and {nbytes} of room")
        walk.storage_nbytes[storage] = nbytes
        walk.hold(storage, 1)
        self._coming[storage] = link

    def on_arrive(self, node: fx.Node, storage: str, link: str, reloaded: fx.Node) -> None:
        walk = self._walk
        if self._coming.pop(storage, None) != link or reloaded.args[0] != storage:
            walk.fail("saved", node, f"{storage} arrives, and no copy of it was under way on {link!r}")
        self._back.add(storage)
        for output in node.users:
            walk.bind(output, storage, self._nbytes.get(storage, 0))
        walk.hold(str(reloaded.args[0]), -1)

    def on_forget(self, node: fx.Node, storage: str, *values: fx.Node) -> None:
        for value in values:
            self._walk.read_once(value)
        for output in node.users:
            self._walk.bind(output, f"dropped:{output.name}", 0)

    def on_again(self, node: fx.Node, storage: str, made: fx.Node, *stand_ins: fx.Node) -> None:
        walk = self._walk
        for output in node.users:
            walk.bind(output, walk.storage_of[made], walk.storage_nbytes[walk.storage_of[made]])
        for value in (made, *stand_ins):
            walk.read_once(value)

    def end(self, returned: Iterator[fx.Node]) -> None:
        """After the last node; `returned`: what the phase returns."""
        for storage in sorted({**self._leaving, **self._coming}):
            self._walk.fail("end", None, f"{storage} is left under a copy")
        passed_in = set(self._nbytes)
        for storage in sorted(self._at_home - passed_in):
            if storage not in self._left:
                self._walk.fail("saved", None, f"{storage} is to leave, and does not")
        stood_for = {self._stand_ins[node] for node in returned if node in self._stand_ins}
        for storage in sorted(self._left - stood_for):
            self._walk.fail("saved", None, f"{storage} has left, and nothing that is returned stands for it")
