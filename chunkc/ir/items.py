"""Items: whatever may be absent from the compute tier for a while, and how it comes back.

Chunks are items, and so are storages that a forward saves for its backward.
"""

from __future__ import annotations

from dataclasses import dataclass

from chunkc.ir.hardware import Hardware
from chunkc.ir.layout import Chunk

ItemId = Chunk
"""The identity of what a call needs in a slot: hashable, in order of its name, and printed by it; nobody reads it back
from a name."""


@dataclass(frozen=True)
class SavedStorage:
    """The identity of a storage that a forward's call made and the backward reads; printed by its name, as a chunk."""

    name: str

    def __str__(self) -> str:
        return self.name

    def __lt__(self, other: object) -> bool:
        return self.name < str(other)


@dataclass(frozen=True)
class ActivationPlan:
    """What of a forward's storages is not on the compute tier until its backward needs it.

    Attributes:
        offloaded: saved storages that are copied home, and back.
        recomputed: storages that are dropped. The calls that make them run again in the backward, where it needs them.
    """

    offloaded: frozenset[str] = frozenset()
    recomputed: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.offloaded or self.recomputed)


KEEP_ALL = ActivationPlan()

MovedId = Chunk | SavedStorage
"""The identity of an item."""


@dataclass(frozen=True)
class Copy:
    """A way of an item, to the compute tier or home: one copy, or an exchange of all ranks, that queues on a link (see
    `chunkc.ir.links`).

    Attributes:
        link_nbytes: what goes over the link, where that is not the item's room: of an exchange, all ranks' parts; of a
            cast, what is read. 0: the item only takes its room, or comes from the compute tier itself.
    """

    link: str
    link_nbytes: int | None = None

    def moved_nbytes(self, nbytes: int) -> int:
        """What goes over the link for an item with so much room."""
        return nbytes if self.link_nbytes is None else self.link_nbytes

    def seconds(self, nbytes: int, hardware: Hardware) -> float:
        """What it takes while all else rests."""
        return hardware.copy_s(self.link, self.moved_nbytes(nbytes))


@dataclass(frozen=True)
class Item:
    """What the scheduler knows of an item. Its uses, and who writes it, are the positions' (`chunkc.ir.plan`).

    Attributes:
        nbytes: of its room on the compute tier.
        way_back: how it comes to the compute tier.
        way_home: how it gets home once something has written it.
    """

    nbytes: int
    way_back: Copy
    way_home: Copy
