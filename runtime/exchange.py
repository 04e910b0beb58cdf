"""A chunk of parameters that are cut over ranks, on its way between homes and a slot that holds all ranks' parts.

In a slot every parameter lies whole and contiguous, and a rank's part of it is a range of rows. So parts are sent from
home memory and received where they belong, and nothing is copied on the way. For gradients each rank sends every other
one what it computed for the other's part, receives the same for its own, and adds up in the order of the ranks: the
same bits on every run, and the least bytes that there can be, (ranks - 1) / ranks of the chunk each way. Where other
ranks have copies of this one's parts, their sums are added up after that, in the order of the rows.

A home on a disk is read and written through its map; its pages leave the process's memory afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from chunkc.ir.chunks import ChunkGroup, TensorSlice
from chunkc.ir.shards import Shards
from chunkc.runtime.maps import drop_pages
from chunkc.runtime.transport import GATHERS, SCATTERS, Message, Transport


def gather(group: ChunkGroup, home: torch.Tensor, slot: torch.Tensor, transport: Transport) -> None:
    """Fill a slot with the parameters of a group: this rank's parts from its home, the others' from theirs.

    Args:
        home, slot: flat tensors of the group's elements, as `ChunkGroup` describes them.

    Raises:
        DistributedError: another rank is gone or does not come.
    """
    sends: list[Message] = []
    receives: list[Message] = []
    for where in group.slices:
        own = home[where.offset : where.end]
        for rank, part in _others_in_row(where):
            sends.append((rank, own))
            receives.append((rank, part_in_slot(slot, where, part)))
        part_in_slot(slot, where).copy_(own)
    transport.exchange(GATHERS, sends, receives)
    drop_pages(home)


def scatter_sums(
    group: ChunkGroup,
    slot: torch.Tensor,
    room: torch.Tensor,
    home: torch.Tensor,
    adds: Mapping[str, bool],
    transport: Transport,
) -> None:
    """Write this rank's part of gradients home, each the mean of what all ranks have in their slots.

    Args:
        slot: a gradient's. The part of it that is this rank's is overwritten.
        room: `group.exchange_numel` elements for what other ranks send.
        adds: parameters whose gradients are in the slot, and whether home has one already, to which it is added.

    Raises:
        DistributedError: another rank is gone or does not come; home is as it was.
    """
    summed = [where for where in group.slices if where.spec.name in adds]
    free = _Room(room)
    totals = _sums_in_rows(summed, slot, free, transport)
    _sums_of_copies(summed, totals, free, transport)
    for where in summed:
        mean = totals[where.spec.name].div_(transport.num_ranks)
        place = home[where.offset : where.end]
        place.add_(mean) if adds[where.spec.name] else place.copy_(mean)
    drop_pages(home)


class _Room:
    """Memory that is given away piece by piece."""

    def __init__(self, room: torch.Tensor) -> None:
        self._room, self._free = room, 0

    def take(self, numel: int) -> torch.Tensor:
        begin, self._free = self._free, self._free + numel
        return self._room[begin : self._free]


def _sums_in_rows(
    slices: Sequence[TensorSlice], slot: torch.Tensor, free: _Room, transport: Transport
) -> dict[str, torch.Tensor]:
    """By parameter, the sum of what the ranks of this one's row have computed for its part."""
    sends: list[Message] = []
    receives: list[Message] = []
    terms: dict[str, list[torch.Tensor]] = {}
    for where in slices:
        shards = shards_of_slice(where)
        of_part = {shards.rank: part_in_slot(slot, where)}
        for rank, part in _others_in_row(where):
            sends.append((rank, part_in_slot(slot, where, part)))
            of_part[part] = free.take(where.spec.numel)
            receives.append((rank, of_part[part]))
        terms[where.spec.name] = [of_part[part] for part in range(shards.num_ranks)]
    transport.exchange(SCATTERS, sends, receives)
    return {name: _sum(of_row) for name, of_row in terms.items()}


def _sums_of_copies(
    slices: Sequence[TensorSlice], totals: Mapping[str, torch.Tensor], free: _Room, transport: Transport
) -> None:
    """Add up the sums of all rows that have a copy of this rank's parts, in the order of the rows, in place.

    Each of these ranks adds up a piece of them, and tells the others what it comes to: the same bits on all.
    """
    pieces = {w.spec.name: _pieces(totals[w.spec.name], shards_of_slice(w).num_copies) for w in slices}
    sends: list[Message] = []
    receives: list[Message] = []
    terms: dict[str, list[torch.Tensor]] = {}
    for where in slices:
        shards, of_tensor = shards_of_slice(where), pieces[where.spec.name]
        own = of_tensor[shards.copy]
        of_copy = {shards.copy: own}
        for copy, rank in _other_copies(shards):
            sends.append((rank, of_tensor[copy]))
            of_copy[copy] = free.take(own.numel())
            receives.append((rank, of_copy[copy]))
        terms[where.spec.name] = [of_copy[copy] for copy in range(shards.num_copies)]
    if not sends:
        return
    transport.exchange(SCATTERS, sends, receives)
    sends, receives = [], []
    for where in slices:
        shards, of_tensor = shards_of_slice(where), pieces[where.spec.name]
        own = of_tensor[shards.copy]
        total = _sum(terms[where.spec.name])
        if total is not own:
            own.copy_(total)
        for copy, rank in _other_copies(shards):
            sends.append((rank, own))
            receives.append((rank, of_tensor[copy]))
    transport.exchange(SCATTERS, sends, receives)


def _pieces(tensor: torch.Tensor, num_pieces: int) -> list[torch.Tensor]:
    """A flat tensor cut into so many pieces, of which the last ones are smaller or empty."""
    each, numel = -(-tensor.numel() // num_pieces), tensor.numel()
    return [tensor[min(n * each, numel) : min((n + 1) * each, numel)] for n in range(num_pieces)]


def _others_in_row(where: TensorSlice) -> Iterator[tuple[int, int]]:
    """The other ranks of this one's row with their parts, beginning with the next one: not all send to one at first."""
    shards = shards_of_slice(where)
    for step in range(1, shards.num_ranks):
        part = (shards.rank + step) % shards.num_ranks
        yield shards.row[part], part


def _other_copies(shards: Shards) -> Iterator[tuple[int, int]]:
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


def part_in_slot(slot: torch.Tensor, where: TensorSlice, part: int | None = None) -> torch.Tensor:
    """A part of a parameter, or of its gradient, in a slot; None: this rank's."""
    shards = shards_of_slice(where)
    begin, end = shards.span(shards.rank if part is None else part)
    return slot[where.slot_offset + begin : where.slot_offset + end]
