"""Manage slots: chunks' buffers on the compute tier, their states, and the copies from and to home.

The host keeps the books here; the order of the bytes is the tier's (see `runtime.device.tier`): copies start after
`mark()`, a wait is `hold_for`, and all computation is enqueued.
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
    """Buffer of a chunk on the compute tier, and its state.

    Attributes:
        copy: the copy under way, in or out.
        dirty: home lacks what was written to the buffer.
        adds: gradients of a sharded chunk that are in the slot, each with whether home has one to add to.
        exchange: scratch memory for exchanges between ranks that are not received in place.
    """

    state: ChunkState = ChunkState.FREE
    buffer: torch.Tensor | None = None
    copy: Mark | None = None
    dirty: bool = False
    adds: dict[str, bool] = field(default_factory=dict)
    exchange: torch.Tensor | None = None


class SpareSlots:
    """Buffers of evicted chunks that no other chunk has taken since."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []

    def give(self, buffer: torch.Tensor) -> None:
        self._buffers.append(buffer)

    def take(self, tier: Tier, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Take a spare buffer of the same size; if there is none, free all and allocate a new one."""
        nbytes = [buffer.nbytes for buffer in self._buffers]
        if numel * dtype.itemsize in nbytes:
            return self._buffers.pop(nbytes.index(numel * dtype.itemsize)).view(dtype)
        self.drop()
        return tier.allocate_slot(numel, dtype)

    def drop(self) -> None:
        """Free all spare buffers."""
        self._buffers.clear()


@dataclass
class Traffic:
    """Bytes copied and seconds waited since the store was made."""

    to_device_nbytes: int = 0
    to_home_nbytes: int = 0
    wait_s: float = 0.0


def fill_with_nan(buffer: torch.Tensor) -> None:
    """Fill a buffer with NaN, so that a read before its data has come shows in results."""
    buffer.view(torch.uint8).fill_(0xFF)  # NaN in every floating dtype


@dataclass
class ChunkSlots(ABC):
    """Slots of one model's chunks: taken, filled from home, computed with, written home, given back.

    Args:
        layout: groups of parameters; may be extended, never changed.
        debug: fill every slot with NaN when it is taken and when it is given back.
        transport: of the ranks that parameters are sharded over; None without sharding.
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
        slot = self._slots.get(chunk)
        if slot is None:
            slot = self._slots[chunk] = Slot()
        return slot

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
            link: for the copy; None: the one from the chunk's home.
        """
        kind, group_index = chunk.kind, chunk.group
        group, slot = self.layout.groups[group_index], self.slot(chunk)
        state = advance(chunk, slot.state, ChunkState.PREFETCHING)
        needs_data = self._has_data_at_home(chunk)
        self.updates.note_use(group_index)
        with torch.inference_mode(False):  # links and later phases write to it outside of inference mode
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
        if needs_data and not (
            is_gathered and kind == GRAD
        ):  # home has a shard, and the new shard is added to it there
            job = self._gather(chunk, slot) if is_gathered else self._reader(chunk, buffer)
            queue = self.tier.links[link or self.layout.links_of_chunk(chunk)[0]]
            slot.copy = queue.submit(job, after=(*self.tier.mark(), *self.updates.before(group_index)))
            self.traffic.to_device_nbytes += self._read_nbytes(chunk, buffer)

    def _reader(self, chunk: Chunk, buffer: torch.Tensor) -> Callable[[], None]:
        """Make a job that fills a slot from the chunk's home."""
        return self.arena.reader(*self._whole(chunk), buffer)

    def _writer(self, chunk: Chunk, buffer: torch.Tensor) -> Callable[[], None]:
        """Make a job that writes a slot into the chunk's home, or into its shadow copy."""
        writer = self.shadow_copies.writer if self.shadow_copies.takes(chunk) else self.arena.writer
        return writer(*self._whole(chunk), buffer)

    def _read_nbytes(self, chunk: Chunk, buffer: torch.Tensor) -> int:
        """Count the bytes that cross the link to fill a slot."""
        return buffer.nbytes

    def _room(self, chunk: Chunk, group: ChunkGroup) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the buffer that computation uses for a chunk, and scratch memory for exchanges between ranks.

        A replicated chunk has a buffer that persists; its slot, if any, is scratch memory only. The slot of any other
        sharded chunk has its scratch memory behind the gathered elements.
        """
        is_replicated = group.replicated_numel(chunk) > 0
        numel = num_entries(chunk.kind, group.slot_numel(chunk))
        slot = self._spare.take(self.tier, numel, group.kind_dtype(chunk.kind)) if numel or not is_replicated else None
        if is_replicated:
            replica = self.replicated.room(chunk, group, self.tier)
            return replica, replica[group.gathered_numel :] if slot is None else slot
        assert slot is not None
        return slot, slot[group.gathered_numel :] if group.is_gathered(chunk) else None

    def is_kept(self, chunk: Chunk) -> bool:
        """Whether a gradient stays in its replicated buffer, and is exchanged in a later backward."""
        is_replicated = chunk.kind == GRAD and self.layout.groups[chunk.group].replicated_numel(chunk) > 0
        return is_replicated and self.transport is not None and self.transport.accumulating

    def outdated(self, groups: Iterable[int]) -> list[int]:
        """Find groups with replicated parameters that differ from home; those in slots are in use and left out.

        Raises:
            StreamError, HomeError: an update or a copy of their home had failed.
        """
        outdated, present = [], self.present
        for index in sorted(groups):
            group, chunk = self.layout.groups[index], Chunk(PARAM, index)
            if not group.replicated_numel(chunk) or chunk in present:
                continue
            assert self.transport is not None
            if self.updates.before(index):  # under way: the gather waits for it, so the host need not
                outdated.append(index)
                continue
            self.await_home(chunk)
            if self.replicated.is_outdated(group, self._home_on_tier(chunk)):
                outdated.append(index)
        return outdated

    def _gather(self, chunk: Chunk, slot: Slot) -> Callable[[], None]:
        """Make a job that fills a slot with all ranks' shards of a chunk."""
        assert self.transport is not None
        assert slot.buffer is not None
        group, home = self.layout.groups[chunk.group], self._exchanged_home(chunk)
        return self._exchanging(gather, group, home, slot.buffer, slot.exchange, self.transport)

    def _scatter(self, chunk: Chunk, slot: Slot) -> Callable[[], None]:
        """Make a job that writes this rank's shard of the mean of all ranks' gradients home."""
        assert self.transport is not None
        assert slot.buffer is not None
        assert slot.exchange is not None
        group, adds, home = self.layout.groups[chunk.group], slot.adds, self._exchanged_home(chunk)
        on_tier, slot.adds = self._home_on_tier(chunk), {}
        return self._exchanging(scatter_sums, group, slot.buffer, slot.exchange, home, on_tier, adds, self.transport)

    def _exchanging(self, do: Callable[..., None], *args: Any) -> Callable[[], None]:
        """Make a job of an exchange: on a GPU it only needs launching, as homes are pinned; on a CPU it blocks."""
        return partial(do, *args) if self.tier.device.type == "cpu" else Launch(do, *args)

    def _exchanged_home(self, chunk: Chunk) -> torch.Tensor:
        """View a chunk's home for copies in stream order: pinned host memory, or the device's view of it."""
        if self.tier.device.type == "cpu" or self.arena.only_launches(chunk):
            return self._flat_home(chunk)
        return self._home_on_tier(chunk)

    def _flat_home(self, chunk: Chunk) -> torch.Tensor:
        """View a chunk's home as a flat CPU tensor."""
        group = self.layout.groups[chunk.group]
        return self.arena.host_view(chunk, group.kind_dtype(chunk.kind), group.numel)

    def _home_on_tier(self, chunk: Chunk) -> torch.Tensor:
        """View a chunk's home as a flat tensor for computation on the tier."""
        if self.tier.device.type == "cpu":
            return self._flat_home(chunk)
        group = self.layout.groups[chunk.group]
        return self.arena.view(chunk, group.kind_dtype(chunk.kind), (group.numel,), (1,), 0)

    def wait(self, chunk: Chunk) -> None:
        """Make later computation start after the copy under way, in or out; the chunk can be read then."""
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
        """Mark the end of all computation enqueued so far, and of every copy under way of the group's chunks."""
        kinds = (*self.layout.groups[group].update_kinds, *CASTS)
        slots = [self._slots.get(Chunk(kind, group)) for kind in kinds]
        return [*self.tier.mark(), *(slot.copy for slot in slots if slot is not None and slot.copy is not None)]

    def write_back(self, chunk: Chunk, link: str | None = None) -> None:
        """Start to copy a dirty slot home; nothing moves if it is clean.

        Args:
            link: for the copy; None: the one to the chunk's home.
        """
        slot = self.slot(chunk)
        slot.state = advance(chunk, slot.state, ChunkState.EVICTING)
        buffer = slot.buffer
        assert buffer is not None
        if slot.dirty and self.is_kept(chunk):
            slot.dirty = False  # it stays in its replicated buffer
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
        """Free the slot. Its data must be at home by now."""
        slot = self.slot(chunk)
        if slot.dirty:
            raise ChunkStateError(f"chunk {chunk} would be evicted before it was written back")
        slot.state = advance(chunk, slot.state, ChunkState.FREE)
        group = self.layout.groups[chunk.group]
        spare = slot.exchange if group.replicated_numel(chunk) else slot.buffer
        if spare is not None and group.slot_numel(chunk):
            if self.debug:
                self.tier.enqueue(fill_with_nan, spare)
            self._spare.give(spare)
        if slot.adds:
            self.replicated.waiting[chunk] = slot.adds
        slot.buffer = slot.copy = slot.exchange = None
        if chunk.part is not None:
            del self._slots[chunk]

    def drop_spare_slots(self) -> None:
        """Free buffers of evicted chunks that no prefetch has taken since."""
        self._spare.drop()

    def _whole(self, chunk: Chunk) -> tuple[Chunk, int]:
        """Return the whole chunk of a chunk or tile, and the offset in bytes where the latter begins in it."""
        begin, _ = chunk.part or (0, 0)
        itemsize = self.layout.groups[chunk.group].kind_dtype(chunk.kind).itemsize
        return chunk.whole, num_entries(chunk.kind, begin) * itemsize

    def begin_compute(self, chunk: Chunk) -> torch.Tensor:
        """Return the slot's flat buffer for the computation that starts now."""
        slot = self.slot(chunk)
        slot.state = advance(chunk, slot.state, ChunkState.COMPUTE)
        assert slot.buffer is not None
        return slot.buffer

    def end_compute(self, chunk: Chunk, *, wrote: bool = False) -> None:
        """Note the end of a computation on the slot, and whether it wrote to it."""
        slot = self.slot(chunk)
        slot.state = advance(chunk, slot.state, ChunkState.HOLD)
        slot.dirty |= wrote

    def release_slots(self) -> None:
        """Free every slot after its copies; dirty slots (of an interrupted step) are written home first.

        Raises:
            StreamError, HomeError: a copy failed; all slots are freed all the same. Gradients that could not be written
                home are lost: their `.grad` is None.
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
        """Refuse to write a sharded gradient home after an error: no other rank comes to the exchange."""
        if self.layout.groups[chunk.group].is_gathered(chunk):
            raise DistributedError(f"ranks had not exchanged chunk {chunk} before the error: its gradients are lost")

    def _drop_failed(self, chunk: Chunk) -> None:
        """Drop a slot after its copy failed."""
        slot = self._slots.pop(chunk)
        if slot.dirty or slot.state is ChunkState.EVICTING:
            self._forget_lost_data(chunk)

    @abstractmethod
    def _has_data_at_home(self, chunk: Chunk) -> bool:
        """Whether home has data to read for a chunk about to be fetched; collects the user's gradients home first."""

    @abstractmethod
    def _gradients_complete(self, chunk: Chunk, buffer: torch.Tensor) -> None:
        """Note that gradients are complete in their slot, and about to be written home."""

    @abstractmethod
    def _forget_lost_data(self, chunk: Chunk) -> None:
        """Reset references to data that was lost with a chunk's slot."""
