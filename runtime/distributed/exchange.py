"""Exchange sharded chunks between homes and slots: gather parameters, reduce-scatter gradients.

In a slot every parameter lies whole and contiguous, and a rank's shard of it is a range of rows. So a shard is copied
from home to its place in the slot, sent from there, and received where it belongs. Small shards of a chunk go to each
rank in one message, packed in the slot's scratch memory (`ChunkGroup.parcels`). For gradients each rank sends every
other rank what it has computed for that rank's shard, receives the same for its own, and adds up in the order of the
ranks: the same bits on every run, and the fewest bytes possible, (ranks - 1) / ranks of the chunk each way. Where other
ranks have copies of this rank's shards, their sums are added up after that, in the order of the rows.

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
    """Fill a slot with the parameters of a group: this rank's shards from its home, the others from the other ranks.

    Args:
        home, slot: flat tensors of the group's elements, as `ChunkGroup` describes them.
        room: scratch memory of `group.packing_numel` elements; None if that is 0.

    Raises:
        DistributedError: another rank is gone or does not come.
    """
    sends: list[Message] = []
    receives: list[Message] = []
    packed: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
    scratch = _Scratch(room)
    for parcel in group.parcels:
        own = [shard_in_slot(slot, tensor_slice) for tensor_slice in parcel]
        for tensor_slice, place in zip(parcel, own, strict=True):
            place.copy_(home[tensor_slice.offset : tensor_slice.end], non_blocking=True)
        sent = own[0] if len(parcel) == 1 else scratch.pack(own)
        for rank, shard in _row_peers(shards_of_slice(parcel[0])):
            received, *others = places = [shard_in_slot(slot, tensor_slice, shard) for tensor_slice in parcel]
            if others:
                received = scratch.take(sum(place.numel() for place in places))
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
    home_on_tier: torch.Tensor,
    adds: Mapping[str, bool],
    transport: Transport,
) -> None:
    """Write this rank's shards of gradients home, each the mean of all ranks' gradients in their slots.

    Args:
        slot: a gradient's. This rank's shards in it are overwritten.
        room: scratch memory of `group.packing_numel` and `group.exchange_numel` elements.
        home, home_on_tier: flat tensors over the same elements: for the host, and for the compute tier.
        adds: parameters with a gradient in the slot, and whether home has one already, to which it is added.

    Raises:
        DistributedError: another rank is gone or does not come; home is as it was.
    """
    present = (tuple(entry for entry in parcel if entry.spec.name in adds) for parcel in group.parcels)
    parcels = [parcel for parcel in present if parcel]
    scratch = _Scratch(room)
    totals = _sums_in_rows(parcels, slot, scratch, transport)
    _sum_copies([shards_of_slice(parcel[0]) for parcel in parcels], totals, scratch, transport)
    for parcel, total in zip(parcels, totals, strict=True):
        means = total.div_(_divisor(total, transport.num_ranks)).split(
            [tensor_slice.spec.numel for tensor_slice in parcel]
        )
        for tensor_slice, mean in zip(parcel, means, strict=True):
            if adds[tensor_slice.spec.name]:
                mean.add_(home_on_tier[tensor_slice.offset : tensor_slice.end])
            home[tensor_slice.offset : tensor_slice.end].copy_(mean, non_blocking=True)
    drop_pages(home)


class _Scratch:
    """Scratch memory that is given out piece by piece, and never taken back."""

    def __init__(self, room: torch.Tensor | None) -> None:
        self._room, self._used = room, 0

    def take(self, numel: int) -> torch.Tensor:
        assert self._room is not None
        begin, self._used = self._used, self._used + numel
        return self._room[begin : self._used]

    def pack(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Copy flat tensors into scratch memory, one behind the other."""
        return torch.cat(list(tensors), out=self.take(sum(tensor.numel() for tensor in tensors)))


def _unpack(packed: torch.Tensor, places: Sequence[torch.Tensor]) -> None:
    """Copy packed tensors to their places."""
    for place, piece in zip(places, packed.split([place.numel() for place in places]), strict=True):
        place.copy_(piece)


def _sums_in_rows(
    parcels: Sequence[tuple[TensorSlice, ...]], slot: torch.Tensor, scratch: _Scratch, transport: Transport
) -> list[torch.Tensor]:
    """Sum up, for each parcel, the gradients that the ranks of this rank's row have computed for its shards."""
    sends: list[Message] = []
    receives: list[Message] = []
    terms: list[list[torch.Tensor]] = []
    for parcel in parcels:
        shards = shards_of_slice(parcel[0])

        def computed(shard: int, parcel: tuple[TensorSlice, ...] = parcel) -> torch.Tensor:
            places = [shard_in_slot(slot, tensor_slice, shard) for tensor_slice in parcel]
            return places[0] if len(places) == 1 else scratch.pack(places)

        own = computed(shards.rank)
        by_rank = {shards.rank: own}  # ranks of the row
        for rank, shard in _row_peers(shards):
            sends.append((rank, computed(shard)))
            by_rank[shard] = scratch.take(own.numel())
            receives.append((rank, by_rank[shard]))
        terms.append([by_rank[rank] for rank in range(shards.num_ranks)])
    transport.exchange(SCATTERS, sends, receives)
    return [_sum(row_terms) for row_terms in terms]


def _sum_copies(
    shards_of_totals: Sequence[Shards], totals: Sequence[torch.Tensor], scratch: _Scratch, transport: Transport
) -> None:
    """Add up, in place, the sums of all rows that have copies of this rank's shards, in the order of the rows.

    Each of these ranks adds up a piece, and sends the result to the others: the same bits on all.
    """
    pieces = [_pieces(total, shards.num_copies) for total, shards in zip(totals, shards_of_totals, strict=True)]
    sends: list[Message] = []
    receives: list[Message] = []
    terms: list[list[torch.Tensor]] = []
    for shards, total_pieces in zip(shards_of_totals, pieces, strict=True):
        own = total_pieces[shards.copy]
        by_copy = {shards.copy: own}
        for copy, rank in _copy_peers(shards):
            sends.append((rank, total_pieces[copy]))
            by_copy[copy] = scratch.take(own.numel())
            receives.append((rank, by_copy[copy]))
        terms.append([by_copy[copy] for copy in range(shards.num_copies)])
    if not sends:
        return
    transport.exchange(SCATTERS, sends, receives)
    sends, receives = [], []
    for shards, total_pieces, copy_terms in zip(shards_of_totals, pieces, terms, strict=True):
        own, total = total_pieces[shards.copy], _sum(copy_terms)
        if total is not own:
            own.copy_(total)
        for copy, rank in _copy_peers(shards):
            sends.append((rank, own))
            receives.append((rank, total_pieces[copy]))
    transport.exchange(SCATTERS, sends, receives)


def _divisor(tensor: torch.Tensor, number: int) -> torch.Tensor | int:
    """Return a number by which a tensor can be divided without memory of the compute tier.

    PyTorch makes a tensor of a Python number, on a CPU in metered memory, and then once more in the other's dtype. No
    plan counts these 12 bytes, which this thread would take while another one is at the peak.
    """
    if tensor.is_cuda:  # the number's tensor is the host's
        return number
    return torch.frombuffer(bytearray(tensor.element_size()), dtype=tensor.dtype).view(()).fill_(number)


def _pieces(tensor: torch.Tensor, num_pieces: int) -> list[torch.Tensor]:
    """Cut a flat tensor into `num_pieces` pieces, of which the last ones are smaller or empty."""
    each, numel = -(-tensor.numel() // num_pieces), tensor.numel()
    return [tensor[min(n * each, numel) : min((n + 1) * each, numel)] for n in range(num_pieces)]


def _row_peers(shards: Shards) -> Iterator[tuple[int, int]]:
    """Iterate over the other ranks of this rank's row with their shards.

    Begins with the next rank: ranks do not all send to the same one at first.
    """
    for step in range(1, shards.num_ranks):
        shard = (shards.rank + step) % shards.num_ranks
        yield shards.row[shard], shard


def _copy_peers(shards: Shards) -> Iterator[tuple[int, int]]:
    """Iterate over the numbers of the other rows, with their ranks that have this rank's shard."""
    for step in range(1, shards.num_copies):
        copy = (shards.copy + step) % shards.num_copies
        yield copy, shards.copies[copy]


def _sum(terms: list[torch.Tensor]) -> torch.Tensor:
    """Sum up in the terms' order, in the memory of the first."""
    total, *others = terms
    for term in others:
        total.add_(term)
    return total


def shards_of_slice(tensor_slice: TensorSlice) -> Shards:
    """Return how a parameter is sharded over ranks, which it must be."""
    assert isinstance(tensor_slice.spec.shards, Shards)
    return tensor_slice.spec.shards


def shard_in_slot(slot: torch.Tensor, tensor_slice: TensorSlice, shard: int | None = None) -> torch.Tensor:
    """Return a shard of a parameter, or of its gradient, in a slot.

    Args:
        shard: its number; None: this rank's.
    """
    shards = shards_of_slice(tensor_slice)
    begin, end = shards.span(shards.rank if shard is None else shard)
    return slot[tensor_slice.slot_offset + begin : tensor_slice.slot_offset + end]
