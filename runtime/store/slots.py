"""Manage slots: chunks' buffers on the compute tier, their states, and the copies from and to home.

The host keeps the books here; the order of the bytes is the tier's (see `runtime.device.tier`): copies start after
`mark()`, a wait is `hold_for`, and all computation is enqueued.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from chunkc.ir.errors import ChunkStateError
from chunkc.ir.layout import CASTS, GRAD, PARAM, Chunk, ChunkGroup, ChunkLayout
from chunkc.ir.states import num_entries
from chunkc.runtime.device.streams import Launch
from chunkc.runtime.device.tier import Mark, Tier
from chunkc.runtime.device.updates import HomeUpdates
from chunkc.runtime.distributed.exchange import gather, scatter_sums
from chunkc.runtime.distributed.transport import Transport
from chunkc.runtime.storage.arena import Arena
from chunkc.runtime.store.replicated import Replicated
from chunkc.runtime.store.shadow_copies import ShadowCopies


class ChunkState(enum.Enum):
    """State of a chunk (after Gemini's and PatrickStar's). Only HOLD and COMPUTE may be read; only FREE has no slot."""

    FREE = "FREE"
    PREFETCHING = "PREFETCHING"
    HOLD = "HOLD"
    COMPUTE = "COMPUTE"
    EVICTING = "EVICTING"


_ALLOWED = {
    (ChunkState.FREE, ChunkState.PREFETCHING),
    (ChunkState.PREFETCHING, ChunkState.HOLD),
    (ChunkState.HOLD, ChunkState.COMPUTE),
    (ChunkState.COMPUTE, ChunkState.HOLD),
    (ChunkState.HOLD, ChunkState.EVICTING),
    (ChunkState.EVICTING, ChunkState.HOLD),
    (ChunkState.HOLD, ChunkState.FREE),
}


def advance(chunk: Chunk, current: ChunkState, new: ChunkState) -> ChunkState:
    """Return `new`, if the transition from `current` is allowed.

    Raises:
        ChunkStateError: it is not.
    """
    if (current, new) not in _ALLOWED:
        raise ChunkStateError(f"chunk {chunk} cannot go from {current.value} to {new.value}")
    return new


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


Copy = Callable[[], None]
"""Job of a link: makes a copy."""


class ChunkSlots:
    """Slots of one model's chunks: taken, filled from home, computed with, written home, given back.

    Args:
        layout: groups of parameters; may be extended, never changed.
        updates: of homes by CPU threads; copies of the same home come after them.
        shadow_copies: where write-backs go instead of home while an update may be rolled back.
        replicated: buffers of replicated chunks, which keep their contents between slots.
        debug: fill every slot with NaN when it is taken and when it is given back.

    Attributes:
        transport: of the ranks that parameters are sharded over; None without sharding.
    """

    def __init__(
        self,
        layout: ChunkLayout,
        arena: Arena,
        tier: Tier,
        updates: HomeUpdates,
        shadow_copies: ShadowCopies,
        replicated: Replicated,
        *,
        debug: bool = False,
    ) -> None:
        self.layout = layout
        self.tier = tier
        self.debug = debug
        self.transport: Transport | None = None
        self.traffic = Traffic()
        self._arena = arena
        self._updates = updates
        self._shadow_copies = shadow_copies
        self._replicated = replicated
        self._slots: dict[Chunk, Slot] = {}
        self._spare = SpareSlots()

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
    def nbytes(self) -> int:
        """Bytes of the slots that chunks have now."""
        return sum(self.layout.chunk_nbytes_of(chunk) for chunk in self.present)

    def prefetch(
        self,
        chunk: Chunk,
        link: str | None = None,
        *,
        has_data: bool = True,
        read: Callable[[torch.Tensor], Copy] | None = None,
    ) -> None:
        """Take a slot and start to fill it.

        Args:
            link: for the copy; None: the one from the chunk's home.
            has_data: whether home has data to read; False: the slot is only taken.
            read: makes the job that fills the slot's buffer from other memory of the compute tier than home.
        """
        kind, group_index = chunk.kind, chunk.group
        group, slot = self.layout.groups[group_index], self.slot(chunk)
        state = advance(chunk, slot.state, ChunkState.PREFETCHING)
        self._updates.note_use(group_index)
        with torch.inference_mode(False):  # links and later phases write to it outside of inference mode
            slot.buffer, slot.exchange = self._room(chunk, group)
        buffer = slot.buffer
        if kind == PARAM and group.replicated_numel(chunk):
            has_data = group_index not in self._replicated.current
            self._replicated.current.add(group_index)
        slot.state, slot.copy, slot.dirty = state, None, False
        slot.adds = self._replicated.waiting.pop(chunk, {})
        if self.debug and (has_data or kind != PARAM) and not slot.adds:
            self.tier.enqueue(fill_with_nan, buffer)
        is_gathered = group.is_gathered(chunk)
        if not has_data or (is_gathered and kind == GRAD):  # home has a shard, and the new shard is added to it there
            return
        if read is not None:
            job, nbytes = read(buffer), 0
        elif is_gathered:
            job, nbytes = self._gather(chunk, group, slot), buffer.nbytes
        elif kind in CASTS:
            job = self._arena.caster(Chunk(PARAM, group_index), group.dtype, buffer)
            nbytes = self.layout.read_for_cast_nbytes(chunk, ())
        else:
            job, nbytes = self._arena.reader(chunk.whole, _begin_nbytes(chunk, group), buffer), buffer.nbytes
        queue = self.tier.links[link or self.layout.links_of_chunk(chunk)[0]]
        slot.copy = queue.submit(job, after=(*self.tier.mark(), *self._updates.before(group_index)))
        self.traffic.to_device_nbytes += nbytes

    def _room(self, chunk: Chunk, group: ChunkGroup) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the buffer that computation uses for a chunk, and scratch memory for exchanges between ranks.

        A replicated chunk has a buffer that persists; its slot, if any, is scratch memory only. The slot of any other
        sharded chunk has its scratch memory behind the gathered elements.
        """
        is_replicated = group.replicated_numel(chunk) > 0
        numel = num_entries(chunk.kind, group.slot_numel(chunk))
        slot = self._spare.take(self.tier, numel, group.kind_dtype(chunk.kind)) if numel or not is_replicated else None
        if is_replicated:
            replica = self._replicated.room(chunk, group, self.tier)
            return replica, replica[group.gathered_numel :] if slot is None else slot
        assert slot is not None
        return slot, slot[group.gathered_numel :] if group.is_gathered(chunk) else None

    def _gather(self, chunk: Chunk, group: ChunkGroup, slot: Slot) -> Copy:
        """Make a job that fills a slot with all ranks' shards of a chunk."""
        assert self.transport is not None
        assert slot.buffer is not None
        home = self._exchanged_home(chunk)
        return self.job_on_tier(gather, group, home, slot.buffer, slot.exchange, self.transport)

    def _scatter(self, chunk: Chunk, group: ChunkGroup, slot: Slot) -> Copy:
        """Make a job that writes this rank's shard of the mean of all ranks' gradients home."""
        assert self.transport is not None
        assert slot.buffer is not None
        assert slot.exchange is not None
        adds, home, on_tier = slot.adds, self._exchanged_home(chunk), self.home_on_tier(chunk)
        slot.adds = {}
        return self.job_on_tier(scatter_sums, group, slot.buffer, slot.exchange, home, on_tier, adds, self.transport)

    def job_on_tier(self, do: Callable[..., None], *args: Any) -> Copy:
        """Make a job of what the tier computes or exchanges: on a GPU it only needs launching; on a CPU it blocks."""
        return partial(do, *args) if self.tier.device.type == "cpu" else Launch(do, *args)

    def _exchanged_home(self, chunk: Chunk) -> torch.Tensor:
        """View a chunk's home for copies in stream order: pinned host memory, or the device's view of it."""
        if self.tier.device.type == "cpu" or self._arena.only_launches(chunk):
            return self._flat_home(chunk)
        return self.home_on_tier(chunk)

    def _flat_home(self, chunk: Chunk) -> torch.Tensor:
        """View a chunk's home as a flat CPU tensor."""
        group = self.layout.groups[chunk.group]
        return self._arena.host_view(chunk, group.kind_dtype(chunk.kind), group.numel)

    def home_on_tier(self, chunk: Chunk) -> torch.Tensor:
        """View a chunk's home as a flat tensor for computation on the tier."""
        if self.tier.device.type == "cpu":
            return self._flat_home(chunk)
        group = self.layout.groups[chunk.group]
        return self._arena.view(chunk, group.kind_dtype(chunk.kind), (group.numel,), (1,), 0)

    def wait(self, chunk: Chunk) -> None:
        """Make later computation start after the copy under way, in or out; the chunk can be read then."""
        slot = self.slot(chunk)
        if slot.copy is not None:
            self.hold_for(slot.copy)
            slot.copy = None
        if slot.state in (ChunkState.PREFETCHING, ChunkState.EVICTING):
            slot.state = advance(chunk, slot.state, ChunkState.HOLD)

    def hold_for(self, copy: Mark) -> None:
        """Make later computation start after a copy, and count the seconds for which the host waits."""
        start_s = time.perf_counter()
        self.tier.hold_for(copy)
        self.traffic.wait_s += time.perf_counter() - start_s

    def await_home(self, chunk: Chunk) -> None:
        """Block the host until the chunk's home is as all that was enqueued so far leaves it.

        For a host that reads or writes home memory itself, as an update on CPU threads does.

        Raises:
            StreamError, HomeError: the chunk's copy, or its update, failed.
        """
        self._updates.wait(chunk.group)
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
        """Start to copy a dirty slot home, or into the chunk's shadow copy; nothing moves if it is clean.

        Args:
            link: for the copy; None: the one to the chunk's home.
        """
        slot = self.slot(chunk)
        slot.state = advance(chunk, slot.state, ChunkState.EVICTING)
        buffer, group = slot.buffer, self.layout.groups[chunk.group]
        assert buffer is not None
        if not slot.dirty:
            return
        if group.is_gathered(chunk):
            job = self._scatter(chunk, group, slot)
        else:
            writer = self._shadow_copies.writer if self._shadow_copies.takes(chunk) else self._arena.writer
            job = writer(chunk.whole, _begin_nbytes(chunk, group), buffer)
        queue = self.tier.links[link or self.layout.links_of_chunk(chunk)[1]]
        slot.copy = queue.submit(job, after=(*self.tier.mark(), *self._updates.before(chunk.group)))
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
            self._replicated.waiting[chunk] = slot.adds
        slot.buffer = slot.copy = slot.exchange = None
        if chunk.part is not None:
            del self._slots[chunk]

    def drop(self, chunk: Chunk) -> Slot:
        """Free a slot as it is, after its copy failed, and return what it was."""
        return self._slots.pop(chunk)

    def drop_spare(self) -> None:
        """Free buffers of evicted chunks that no prefetch has taken since."""
        self._spare.drop()

    def drop_all(self) -> None:
        """Free all slots as they are."""
        self._slots.clear()
        self._spare.drop()

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


def _begin_nbytes(chunk: Chunk, group: ChunkGroup) -> int:
    """Return the offset in bytes where a chunk, or a part of one, begins in the whole chunk."""
    if chunk.part is None:
        return 0
    return num_entries(chunk.kind, chunk.part[0]) * group.kind_dtype(chunk.kind).itemsize
