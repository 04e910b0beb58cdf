"""A chunk of parameters that are cut over ranks, on its way between homes and a slot that holds all ranks' parts.

In a slot every parameter lies whole and contiguous, and a rank's part of it is a range of rows. So parts are sent from
home memory and received where they belong, and nothing is copied on the way. For gradients each rank sends every other
one what it computed for the other's part, receives the same for its own, and adds up in the order of the ranks: the
same bits on every run, and the least bytes that there can be, (ranks - 1) / ranks of the chunk each way.

A home on a disk is read and written through its map; its pages leave the process's memory afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping

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
        sends += [(rank, own) for rank in transport.others]
        receives += [(rank, part_in_slot(slot, where, rank)) for rank in transport.others]
        part_in_slot(slot, where, transport.rank).copy_(own)
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
    sends: list[Message] = []
    receives: list[Message] = []
    terms: dict[str, list[torch.Tensor]] = {}
    free = 0
    for where in group.slices:
        if where.spec.name not in adds:
            continue
        numel = where.spec.numel
        of_rank = {transport.rank: part_in_slot(slot, where, transport.rank)}
        for rank in transport.others:
            sends.append((rank, part_in_slot(slot, where, rank)))
            of_rank[rank] = room[free : free + numel]
            receives.append((rank, of_rank[rank]))
            free += numel
        terms[where.spec.name] = [of_rank[rank] for rank in range(transport.num_ranks)]
    transport.exchange(SCATTERS, sends, receives)
    for where in group.slices:
        if where.spec.name in adds:
            mean = _sum(terms[where.spec.name]).div_(transport.num_ranks)
            place = home[where.offset : where.end]
            place.add_(mean) if adds[where.spec.name] else place.copy_(mean)
    drop_pages(home)


def _sum(terms: list[torch.Tensor]) -> torch.Tensor:
    """The sum in the terms' order, in the memory of the first."""
    total, *others = terms
    for term in others:
        total.add_(term)
    return total


def part_in_slot(slot: torch.Tensor, where: TensorSlice, rank: int) -> torch.Tensor:
    """A rank's part of a parameter, or of its gradient, in a slot."""
    shards = where.spec.shards
    assert isinstance(shards, Shards)
    begin, end = shards.span(rank)
    return slot[where.slot_offset + begin : where.slot_offset + end]
