"""A chunk of parameters that are cut over ranks, on its way between homes and a slot that holds all ranks' parts.

In a slot every parameter lies whole and contiguous, and a rank's part of it is a range of rows. So a part is copied
from home to its place in the slot, sent from there, and received where it belongs. Small ones of a chunk go to each
rank in one message, through room of the slot's where they are put together (`ChunkGroup.parcels`). For gradients each
rank sends every other one what it computed for the other's part, receives the same for its own, and adds up in the
order of the ranks: the same bits on every run, and the least bytes that there can be, (ranks - 1) / ranks of the chunk
each way. Where other ranks have copies of this one's parts, their sums are added up after that, in the order of the
rows.

A home on a disk is read and written through its map; its pages leave the process's memory afterwards. On a GPU all of
this is enqueued on the current stream, and home memory is pinned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from chunkc.ir.layout import ChunkGroup, TensorSlice
from chunkc.ir.shards import Shards
from chunkc.runtime.distributed.transport import GATHERS, SCATTERS, Message, Transport
from chunkc.runtime.storage.maps import drop_pages


def gather(
    group: ChunkGroup, home: torch.Tensor, slot: torch.Tensor, room: torch.Tensor | None, transport: Transport
) -> None:
    """Fill a slot with the parameters of a group: this rank's parts from its home, the others' from theirs.

    Args:
        home, slot: flat tensors of the group's elements, as `ChunkGroup` describes them.
        room: `group.packing_numel` elements; None: these are none.

    Raises:
        DistributedError: another rank is gone or does not come.
    """
    sends: list[Message] = []
    receives: list[Message] = []
    packed: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
    free = _Room(room)
    for parcel in group.parcels:
        own = [shard_in_slot(slot, where) for where in parcel]
        for where, place in zip(parcel, own, strict=True):
            place.copy_(home[where.offset : where.end], non_blocking=True)
        sent = own[0] if len(parcel) == 1 else free.pack(own)
        for rank, part in _row_peers(shards_of_slice(parcel[0])):
            received, *others = places = [shard_in_slot(slot, where, part) for where in parcel]
            if others:
                received = free.take(sum(place.numel() for place in places))
                packed.append((received, places))
            sends.append((rank, sent))
            receives.append((rank, received))
    transport.exchange(GATHERS, sends, receives)
    for received, places in packed:
        _unpack(received, places)
    drop_pages(home)


def scatter_sums(
    group: ChunkGroup,
    slot: torch.Tensor,
    room: torch.Tensor,
    home: torch.Tensor,
    seen: torch.Tensor,
    adds: Mapping[str, bool],
    transport: Transport,
) -> None:
    """Write this rank's part of gradients home, each the mean of what all ranks have in their slots.

    Args:
        slot: a gradient's. The part of it that is this rank's is overwritten.
        room: `group.packing_numel` and `group.exchange_numel` elements for what ranks send.
        home, seen: flat tensors over the same elements: of the host's, and as the compute tier sees them.
        adds: parameters whose gradients are in the slot, and whether home has one already, to which it is added.

    Raises:
        DistributedError: another rank is gone or does not come; home is as it was.
    """
    summed = (tuple(where for where in parcel if where.spec.name in adds) for parcel in group.parcels)
    together = [parcel for parcel in summed if parcel]
    free = _Room(room)
    totals = _sums_in_rows(together, slot, free, transport)
    _sums_of_copies([shards_of_slice(parcel[0]) for parcel in together], totals, free, transport)
    for parcel, total in zip(together, totals, strict=True):
        means = total.div_(transport.num_ranks).split([where.spec.numel for where in parcel])
        for where, mean in zip(parcel, means, strict=True):
            if adds[where.spec.name]:
                mean.add_(seen[where.offset : where.end])
            home[where.offset : where.end].copy_(mean, non_blocking=True)
    drop_pages(home)


class _Room:
    """Memory that is given away piece by piece."""

    def __init__(self, room: torch.Tensor | None) -> None:
        self._room, self._free = room, 0

    def take(self, numel: int) -> torch.Tensor:
        assert self._room is not None
        begin, self._free = self._free, self._free + numel
        return self._room[begin : self._free]

    def pack(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Flat tensors one behind the other."""
        return torch.cat(list(tensors), out=self.take(sum(tensor.numel() for tensor in tensors)))


def _unpack(packed: torch.Tensor, places: Sequence[torch.Tensor]) -> None:
    """What was put together, where it belongs."""
    for place, found in zip(places, packed.split([place.numel() for place in places]), strict=True):
        place.copy_(found)


def _sums_in_rows(
    together: Sequence[tuple[TensorSlice, ...]], slot: torch.Tensor, free: _Room, transport: Transport
) -> list[torch.Tensor]:
    """Of what is sent together, the sum of what the ranks of this one's row have computed for its part."""
    sends: list[Message] = []
    receives: list[Message] = []
    terms: list[list[torch.Tensor]] = []
    for parcel in together:
        shards = shards_of_slice(parcel[0])

        def computed(part: int, parcel: tuple[TensorSlice, ...] = parcel) -> torch.Tensor:
            places = [shard_in_slot(slot, where, part) for where in parcel]
            return places[0] if len(places) == 1 else free.pack(places)

        own = computed(shards.rank)
        of_shard = {shards.rank: own}
        for rank, part in _row_peers(shards):
            sends.append((rank, computed(part)))
            of_shard[part] = free.take(own.numel())
            receives.append((rank, of_shard[part]))
        terms.append([of_shard[part] for part in range(shards.num_ranks)])
    transport.exchange(SCATTERS, sends, receives)
    return [_sum(of_row) for of_row in terms]


def _sums_of_copies(
    of_all: Sequence[Shards], totals: Sequence[torch.Tensor], free: _Room, transport: Transport
) -> None:
    """Add up the sums of all rows that have a copy of this rank's parts, in the order of the rows, in place.

    Each of these ranks adds up a piece of them, and tells the others what it comes to: the same bits on all.
    """
    pieces = [_pieces(total, shards.num_copies) for total, shards in zip(totals, of_all, strict=True)]
    sends: list[Message] = []
    receives: list[Message] = []
    terms: list[list[torch.Tensor]] = []
    for shards, of_tensor in zip(of_all, pieces, strict=True):
        own = of_tensor[shards.copy]
        of_copy = {shards.copy: own}
        for copy, rank in _copy_peers(shards):
            sends.append((rank, of_tensor[copy]))
            of_copy[copy] = free.take(own.numel())
            receives.append((rank, of_copy[copy]))
        terms.append([of_copy[copy] for copy in range(shards.num_copies)])
    if not sends:
        return
    transport.exchange(SCATTERS, sends, receives)
    sends, receives = [], []
    for shards, of_tensor, of_row in zip(of_all, pieces, terms, strict=True):
        own, total = of_tensor[shards.copy], _sum(of_row)
        if total is not own:
            own.copy_(total)
        for copy, rank in _copy_peers(shards):
            sends.append((rank, own))
            receives.append((rank, of_tensor[copy]))
    transport.exchange(SCATTERS, sends, receives)


def _pieces(tensor: torch.Tensor, num_pieces: int) -> list[torch.Tensor]:
    """A flat tensor cut into so many pieces, of which the last ones are smaller or empty."""
    each, numel = -(-tensor.numel() // num_pieces), tensor.numel()
    return [tensor[min(n * each, numel) : min((n + 1) * each, numel)] for n in range(num_pieces)]


def _row_peers(shards: Shards) -> Iterator[tuple[int, int]]:
    """The other ranks of this one's row with their parts, beginning with the next one: not all send to one at first."""
    for step in range(1, shards.num_ranks):
        part = (shards.rank + step) % shards.num_ranks
        yield shards.row[part], part


def _copy_peers(shards: Shards) -> Iterator[tuple[int, int]]:
    """The other rows' numbers, with the ranks in them that have this one's part."""
    for step in range(1, shards.num_copies):
        copy = (shards.copy + step) % shards.num_copies
        yield copy, shards.copies[copy]


def _sum(terms: list[torch.Tensor]) -> torch.Tensor:
    """The sum in the terms' order, in the memory of the first."""
    total, *others = terms
    for term in others:
        total.add_(term)
    return total


def shards_of_slice(where: TensorSlice) -> Shards:
    """Of a parameter that is cut over ranks, how it is."""
    assert isinstance(where.spec.shards, Shards)
    return where.spec.shards


def shard_in_slot(slot: torch.Tensor, where: TensorSlice, part: int | None = None) -> torch.Tensor:
    """A part of a parameter, or of its gradient, in a slot; None: this rank's."""
    shards = shards_of_slice(where)
    begin, end = shards.span(shards.rank if part is None else part)
    return slot[where.slot_offset + begin : where.slot_offset + end]
