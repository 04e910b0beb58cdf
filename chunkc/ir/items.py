"""Define items: the data that may be away from the compute tier for a while, and the copies that move it.

Chunks are items, and so are storages that a forward saves for its backward.
"""

from __future__ import annotations

from dataclasses import dataclass

from chunkc.ir.hardware import Hardware
from chunkc.ir.layout import Chunk


@dataclass(frozen=True)
class SavedStorage:
    """Identity of a storage that a forward call allocated and the backward reads; printed by its name, as a chunk."""

    name: str

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        """Return the name in quotes, as a `Chunk` does."""
        return repr(self.name)

    def __lt__(self, other: object) -> bool:
        return self.name < str(other)


@dataclass(frozen=True)
class ActivationPlan:
    """Saved storages of a forward that are not on the compute tier until its backward needs them.

    Attributes:
        offloaded: storages that are copied home, and back.
        recomputed: storages that are dropped; the backward repeats the calls that compute them.
    """

    offloaded: frozenset[str] = frozenset()
    recomputed: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.offloaded or self.recomputed)


KEEP_ALL = ActivationPlan()
"""Every saved storage stays on the compute tier."""

MovedId = Chunk | SavedStorage
"""Identity of any item: hashable, ordered by its name and printed as it; never parsed."""


@dataclass(frozen=True)
class Copy:
    """A single transfer of an item, to the compute tier or home, that queues on a link (see `chunkc.ir.links`).

    It is a copy, or an exchange of all ranks.

    Attributes:
        link_nbytes: bytes over the link, if not the item's room: of an exchange, the shards of all ranks; of a cast,
            the bytes read. 0: the item only takes its room, or comes from the compute tier itself.
    """

    link: str
    link_nbytes: int | None = None

    def moved_nbytes(self, nbytes: int) -> int:
        """Return the bytes over the link for an item with `nbytes` of room."""
        return nbytes if self.link_nbytes is None else self.link_nbytes

    def seconds(self, nbytes: int, hardware: Hardware) -> float:
        """Return the seconds of the copy while the other links rest."""
        return hardware.copy_s(self.link, self.moved_nbytes(nbytes))


@dataclass(frozen=True)
class Item:
    """An item as the scheduler sees it.

    Its uses, and the calls that write it, are in the positions (`chunkc.ir.plan`).

    Attributes:
        nbytes: of its room on the compute tier.
        way_back: copy to the compute tier.
        way_home: copy home, once a call has written the item.
    """

    nbytes: int
    way_back: Copy
    way_home: Copy
