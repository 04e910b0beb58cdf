"""Slots: chunks' room on the compute tier, what is happening to it, and what has been copied in all.

The host keeps the books here; the order of the bytes is the tier's (see `runtime.tier`): copies start after `mark()`,
a wait is `hold_for`, and all that computes is enqueued.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from chunkc.ir.errors import ChunkcError, ChunkStateError, DistributedError, HomeError, StreamError
from chunkc.ir.layout import CASTS, GRAD, PARAM, Chunk, ChunkGroup, ChunkLayout
from chunkc.ir.states import num_entries
from chunkc.runtime.device.streams import Launch
from chunkc.runtime.device.tier import Mark, Tier
from chunkc.runtime.device.updates import HomeUpdates
from chunkc.runtime.distributed.exchange import gather, scatter_sums
from chunkc.runtime.distributed.transport import Transport
from chunkc.runtime.storage.arena import Arena
from chunkc.runtime.store.chunk_states import ChunkState, advance
from chunkc.runtime.store.replicated import Replicated
from chunkc.runtime.store.shadow_copies import ShadowCopies


@dataclass
class Slot:
    """A chunk's room on the compute tier and what is happening to it.

    `adds`: of gradients that all ranks have computed, those that are in the slot, and whether home has one to add to.
    `exchange`: room for what ranks send to each other, where it is not received in its place.
    """

    state: ChunkState = ChunkState.FREE
    buffer: torch.Tensor | None = None
    copy: Mark | None = None
    dirty: bool = False
    adds: dict[str, bool] = field(default_factory=dict)
    exchange: torch.Tensor | None = None


class SpareSlots:
    """What evicted chunks left and no other has taken since."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []

    def give(self, buffer: torch.Tensor) -> None:
        self._buffers.append(buffer)

    def take(self, tier: Tier, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The room of a chunk that has just gone, if it is of the same size; else new room."""
        nbytes = [buffer.nbytes for buffer in self._buffers]
        if numel * dtype.itemsize in nbytes:
            return self._buffers.pop(nbytes.index(numel * dtype.itemsize)).view(dtype)
        self.drop()
        return tier.allocate_slot(numel, dtype)

    def drop(self) -> None:
        """Give all of it back to the tier."""
        self._buffers.clear()


@dataclass
class Traffic:
    """Bytes copied and seconds waited since the store was made."""

    to_device_nbytes: int = 0
    to_home_nbytes: int = 0
    wait_s: float = 0.0


def fill_with_nan(buffer: torch.Tensor) -> None:
    """Make a read of what is not there show."""
    buffer.view(torch.uint8).fill_(0xFF)  # NaN in every floating dtype


@dataclass
class ChunkSlots(ABC):
    """Slots of one model's chunks: taken, filled from home, computed with, written home, given back.

    Args:
        layout: groups of parameters; may be extended, never changed.
        debug: fill every slot with NaN when it is taken and when it is given back.
        transport: by which ranks meet whose parameters are cut over them; None where none are.
    """

    layout: ChunkLayout
    arena: Arena
    tier: Tier
    debug: bool = False
    transport: Transport | None = None
    traffic: Traffic = field(default_factory=Traffic)
    replicated: Replicated = field(default_factory=Replicated)
    updates: HomeUpdates = field(default_factory=HomeUpdates)
    shadow_copies: ShadowCopies = field(init=False)
    _slots: dict[Chunk, Slot] = field(default_factory=dict)
    _spare: SpareSlots = field(default_factory=SpareSlots)

    def __post_init__(self) -> None:
        self.shadow_copies = ShadowCopies(self.arena)

    def slot(self, chunk: Chunk) -> Slot:
        found = self._slots.get(chunk)
        if found is None:
            found = self._slots[chunk] = Slot()
        return found

    @property
    def present(self) -> frozenset[Chunk]:
        """Chunks that have a slot now."""
        return frozenset(chunk for chunk, slot in self._slots.items() if slot.state is not ChunkState.FREE)

    @property
    def slot_nbytes(self) -> int:
        """Bytes of the slots that chunks have now."""
        return sum(self.layout.chunk_nbytes_of(chunk) for chunk in self.present)

    def prefetch(self, chunk: Chunk, link: str | None = None) -> None:
        """Take a slot and start to fill it from home. A gradient chunk without gradients has nothing to read.

        Args:
            link: on which the copy queues; None: the one that leads from the chunk's home.
        """
        kind, group_index = chunk.kind, chunk.group
        group, slot = self.layout.groups[group_index], self.slot(chunk)
        state = advance(chunk, slot.state, ChunkState.PREFETCHING)
        needs_data = self._has_data_at_home(chunk)
        self.updates.note_use(group_index)
        with torch.inference_mode(False):  # links, and later phases, write to it outside of any such mode
            slot.buffer, slot.exchange = self._room(chunk, group)
        buffer = slot.buffer
        if kind == PARAM and group.replicated_numel(chunk):
            needs_data = group_index not in self.replicated.current
            self.replicated.current.add(group_index)
        slot.state, slot.copy, slot.dirty = state, None, False
        slot.adds = self.replicated.waiting.pop(chunk, {})
        if self.debug and (needs_data or kind != PARAM) and not slot.adds:
            self.tier.enqueue(fill_with_nan, buffer)
        is_gathered = group.is_gathered(chunk)
        if needs_data and not (is_gathered and kind == GRAD):  # home has a part of it, to which a part is added there
            job = self._gather(chunk, slot) if is_gathered else self._reader(chunk, buffer)
            queue = self.tier.links[link or self.layout.links_of_chunk(chunk)[0]]
            slot.copy = queue.submit(job, after=(*self.tier.mark(), *self.updates.before(group_index)))
            self.traffic.to_device_nbytes += self._read_nbytes(chunk, buffer)

    def _reader(self, chunk: Chunk, buffer: torch.Tensor) -> Callable[[], None]:
        """A job that fills a slot from the chunk's home."""
        return self.arena.reader(*self._whole(chunk), buffer)

    def _writer(self, chunk: Chunk, buffer: torch.Tensor) -> Callable[[], None]:
        """A job that writes a slot into the chunk's home, or to where its update waits to be adopted."""
        writer = self.shadow_copies.writer if self.shadow_copies.takes(chunk) else self.arena.writer
        return writer(*self._whole(chunk), buffer)

    def _read_nbytes(self, chunk: Chunk, buffer: torch.Tensor) -> int:
        """What comes over the link for it."""
        return buffer.nbytes

    def _room(self, chunk: Chunk, group: ChunkGroup) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What computation is to see of a chunk, and room for what ranks send."""
        stands = group.replicated_numel(chunk) > 0
        numel = num_entries(chunk.kind, group.slot_numel(chunk))
        moving = self._spare.take(self.tier, numel, group.kind_dtype(chunk.kind)) if numel or not stands else None
        if stands:
            replicated = self.replicated.room(chunk, group, self.tier)
            return replicated, replicated[group.gathered_numel :] if moving is None else moving
        assert moving is not None
        return moving, moving[group.gathered_numel :] if group.is_gathered(chunk) else None

    def is_kept(self, chunk: Chunk) -> bool:
        """Whether a gradient stays where it stands, and is exchanged in a later backward."""
        stands = chunk.kind == GRAD and self.layout.groups[chunk.group].replicated_numel(chunk) > 0
        return stands and self.transport is not None and self.transport.accumulating

    def outdated(self, groups: Iterable[int]) -> list[int]:
        """Those of the groups whose parameters stand here, but not as they are at home; in slots they are in use.

        Raises:
            StreamError, HomeError: an update or a copy of their home had failed.
        """
        found, present = [], self.present
        for index in sorted(groups):
            group, chunk = self.layout.groups[index], Chunk(PARAM, index)
            if not group.replicated_numel(chunk) or chunk in present:
                continue
            assert self.transport is not None
            if self.updates.before(index):  # under way: a gather waits for it, and nobody else need
                found.append(index)
                continue
            self.await_home(chunk)
            if self.replicated.is_outdated(group, self._home_on_tier(chunk)):
                found.append(index)
        return found

    def _gather(self, chunk: Chunk, slot: Slot) -> Callable[[], None]:
        """A job that fills a slot with all ranks' parts of a chunk."""
        assert self.transport is not None
        assert slot.buffer is not None
        group, home = self.layout.groups[chunk.group], self._exchanged_home(chunk)
        return self._exchanging(gather, group, home, slot.buffer, slot.exchange, self.transport)

    def _scatter(self, chunk: Chunk, slot: Slot) -> Callable[[], None]:
        """A job that writes this rank's part of the mean of all ranks' gradients home."""
        assert self.transport is not None
        assert slot.buffer is not None
        assert slot.exchange is not None
        group, adds, home = self.layout.groups[chunk.group], slot.adds, self._exchanged_home(chunk)
        seen, slot.adds = self._home_on_tier(chunk), {}
        return self._exchanging(scatter_sums, group, slot.buffer, slot.exchange, home, seen, adds, self.transport)

    def _exchanging(self, do: Callable[..., None], *args: Any) -> Callable[[], None]:
        """A job that has only to be launched, on a device whose streams do the rest: its homes are pinned."""
        return partial(do, *args) if self.tier.device.type == "cpu" else Launch(do, *args)

    def _exchanged_home(self, chunk: Chunk) -> torch.Tensor:
        """A chunk's elements at home, for copies in stream order: pinned ones, or as the device sees them."""
        if self.tier.device.type == "cpu" or self.arena.only_launches(chunk):
            return self._flat_home(chunk)
        return self._home_on_tier(chunk)

    def _flat_home(self, chunk: Chunk) -> torch.Tensor:
        """A chunk's elements at home, for the host."""
        group = self.layout.groups[chunk.group]
        return self.arena.host_view(chunk, group.kind_dtype(chunk.kind), group.numel)

    def _home_on_tier(self, chunk: Chunk) -> torch.Tensor:
        """The same elements, for what the compute tier computes with them."""
        if self.tier.device.type == "cpu":
            return self._flat_home(chunk)
        group = self.layout.groups[chunk.group]
        return self.arena.view(chunk, group.kind_dtype(chunk.kind), (group.numel,), (1,), 0)

    def wait(self, chunk: Chunk) -> None:
        """What is computed from now on finds the copy under way, in or out, done; the chunk can be read."""
        slot = self.slot(chunk)
        if slot.copy is not None:
            start_s = time.perf_counter()
            self.tier.hold_for(slot.copy)
            slot.copy = None
            self.traffic.wait_s += time.perf_counter() - start_s
        if slot.state in (ChunkState.PREFETCHING, ChunkState.EVICTING):
            slot.state = advance(chunk, slot.state, ChunkState.HOLD)

    def await_home(self, chunk: Chunk) -> None:
        """Block the host until the chunk's home is as all that was enqueued so far leaves it.

        For a host that reads or writes home memory itself, as an update on CPU threads does.

        Raises:
            StreamError, HomeError: the chunk's copy, or its update, failed.
        """
        self.updates.wait(chunk.group)
        slot = self._slots.get(chunk)
        if slot is not None and slot.copy is not None and slot.state is ChunkState.EVICTING:
            slot.copy.wait()
            return
        for mark in self.tier.mark():
            mark.wait()

    def home_marks(self, group: int) -> list[Mark]:
        """When all that was enqueued so far, and every copy of the group's chunks under way, is over."""
        kinds = (*self.layout.groups[group].update_kinds, *CASTS)
        slots = [self._slots.get(Chunk(kind, group)) for kind in kinds]
        return [*self.tier.mark(), *(slot.copy for slot in slots if slot is not None and slot.copy is not None)]

    def write_back(self, chunk: Chunk, link: str | None = None) -> None:
        """Start to copy a dirty slot home; nothing moves if it is clean.

        Args:
            link: on which the copy queues; None: the one that leads to the chunk's home.
        """
        slot = self.slot(chunk)
        slot.state = advance(chunk, slot.state, ChunkState.EVICTING)
        buffer = slot.buffer
        assert buffer is not None
        if slot.dirty and self.is_kept(chunk):
            slot.dirty = False  # it waits where it stands
        if slot.dirty:
            if chunk.kind == GRAD:
                self._gradients_complete(chunk, buffer)
            is_gathered = self.layout.groups[chunk.group].is_gathered(chunk)
            job = self._scatter(chunk, slot) if is_gathered else self._writer(chunk, buffer)
            queue = self.tier.links[link or self.layout.links_of_chunk(chunk)[1]]
            slot.copy = queue.submit(job, after=(*self.tier.mark(), *self.updates.before(chunk.group)))
            self.traffic.to_home_nbytes += buffer.nbytes
            slot.dirty = False

    def evict(self, chunk: Chunk) -> None:
        """Give the slot back. Its data must be at home by now."""
        slot = self.slot(chunk)
        if slot.dirty:
            raise ChunkStateError(f"chunk {chunk} would be evicted before it was written back")
        slot.state = advance(chunk, slot.state, ChunkState.FREE)
        group = self.layout.groups[chunk.group]
        leaving = slot.exchange if group.replicated_numel(chunk) else slot.buffer
        if leaving is not None and group.slot_numel(chunk):
            if self.debug:
                self.tier.enqueue(fill_with_nan, leaving)
            self._spare.give(leaving)
        if slot.adds:
            self.replicated.waiting[chunk] = slot.adds
        slot.buffer = slot.copy = slot.exchange = None
        if chunk.part is not None:
            del self._slots[chunk]

    def drop_spare_slots(self) -> None:
        """Give the tier back what evicted chunks left and no prefetch has taken since."""
        self._spare.drop()

    def _whole(self, chunk: Chunk) -> tuple[Chunk, int]:
        """The whole chunk that this is, or is a part of, and where in it its bytes begin."""
        begin, _ = chunk.part or (0, 0)
        itemsize = self.layout.groups[chunk.group].kind_dtype(chunk.kind).itemsize
        return chunk.whole, num_entries(chunk.kind, begin) * itemsize

    def begin_compute(self, chunk: Chunk) -> torch.Tensor:
        """The slot's flat buffer, for the computation that starts now."""
        slot = self.slot(chunk)
        slot.state = advance(chunk, slot.state, ChunkState.COMPUTE)
        assert slot.buffer is not None
        return slot.buffer

    def end_compute(self, chunk: Chunk, *, wrote: bool = False) -> None:
        slot = self.slot(chunk)
        slot.state = advance(chunk, slot.state, ChunkState.HOLD)
        slot.dirty |= wrote

    def release_slots(self) -> None:
        """Give every slot back after copies have ended; dirty ones (an interrupted step) are written home first.

        Raises:
            StreamError, HomeError: a copy failed; all slots are given back all the same. Gradients that could not
                be written home are gone: their `.grad` is None.
        """
        problem: ChunkcError | None = None
        for chunk in sorted(self.present):
            slot = self.slot(chunk)
            try:
                self.wait(chunk)
                if slot.state is ChunkState.COMPUTE:
                    slot.state = advance(chunk, slot.state, ChunkState.HOLD)
                if slot.dirty:
                    self._refuse_exchange(chunk)
                    self.write_back(chunk)
                    self.wait(chunk)
                self.evict(chunk)
            except (StreamError, HomeError) as error:
                problem = problem or error
                self._drop_failed(chunk)
        self.drop_spare_slots()
        if problem is not None:
            raise problem

    def _refuse_exchange(self, chunk: Chunk) -> None:
        """Where a plan is given up, no other rank comes to exchange what it has left."""
        if self.layout.groups[chunk.group].is_gathered(chunk):
            raise DistributedError(f"chunk {chunk} was left before the ranks had exchanged it: its gradients are lost")

    def _drop_failed(self, chunk: Chunk) -> None:
        """Forget a slot whose copy failed."""
        slot = self._slots.pop(chunk)
        if slot.dirty or slot.state is ChunkState.EVICTING:
            self._forget_lost_data(chunk)

    @abstractmethod
    def _has_data_at_home(self, chunk: Chunk) -> bool:
        """Whether there is anything to read for a chunk about to be fetched, once home is as its user wants it."""

    @abstractmethod
    def _gradients_complete(self, chunk: Chunk, buffer: torch.Tensor) -> None:
        """Gradients are complete in their slot, and about to be written home."""

    @abstractmethod
    def _forget_lost_data(self, chunk: Chunk) -> None:
        """A chunk's slot is lost, and with it what home does not have."""
