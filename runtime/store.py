"""The chunk store: every chunk of a model, its home, its slot, its state, and the parameters that live in it.

Between calls no chunk has a slot: parameters and gradients are home views, valid for any reader and writer.
During a call the executor moves chunks; computation reads slots only. The host keeps the books here; the order of
the bytes is the tier's (see `runtime.tier`): copies start after `mark()`, a wait is `hold_for`, and all that computes
is enqueued.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from chunkc.ir.chunks import (
    GRAD,
    PARAM,
    ChunkGroup,
    ChunkLayout,
    TensorSlice,
    chunk_name,
    chunk_part,
    split_chunk_name,
)
from chunkc.ir.errors import ChunkcError, ChunkStateError, HomeError, StreamError, UnsupportedError
from chunkc.ir.states import EXP_AVG, SCALES, num_entries
from chunkc.runtime.arena import Arena
from chunkc.runtime.gradients import NOTHING, accumulate, add_later, store_first
from chunkc.runtime.slots import Slot, SpareSlots, Traffic, fill_with_nan, length
from chunkc.runtime.states import ChunkState, advance
from chunkc.runtime.tier import Moment, Tier
from chunkc.runtime.updates import HomeUpdates


@dataclass
class ChunkStore:
    """Owns homes and slots of one model's chunks. Holds parameters weakly: the model's life is its user's.

    Args:
        layout: groups of parameters; may be extended, never changed.
        debug: fill every slot with NaN when it is taken and when it is given back.
    """

    layout: ChunkLayout
    arena: Arena
    tier: Tier
    debug: bool = False
    resident: frozenset[int] = frozenset()
    traffic: Traffic = field(default_factory=Traffic)
    updates: HomeUpdates = field(default_factory=HomeUpdates)
    _parameters: dict[str, weakref.ref[nn.Parameter]] = field(default_factory=dict)
    _slots: dict[str, Slot] = field(default_factory=dict)
    _spare: SpareSlots = field(default_factory=SpareSlots)
    _slices: dict[str, tuple[ChunkGroup, TensorSlice]] = field(default_factory=dict)
    _handed_out: dict[str, tuple[weakref.ref[torch.Tensor], int]] = field(default_factory=dict)  # with its address

    # --- parameters and their homes ---

    def parameter(self, name: str) -> nn.Parameter:
        """The parameter of that name.

        Raises:
            UnsupportedError: the model it belonged to is gone.
        """
        parameter = self._parameters[name]()
        if parameter is None:
            raise UnsupportedError(f"parameter {name} no longer exists, but code compiled for it still runs")
        return parameter

    def parameters(self) -> dict[str, nn.Parameter]:
        """Every parameter that still exists, by name."""
        return {name: p for name, ref in self._parameters.items() if (p := ref()) is not None}

    def is_managed(self, name: str) -> bool:
        """Whether the parameter's home is on the home tier (it is neither small nor resident)."""
        found = self._slices.get(name)
        return found is not None and found[0].index not in self.resident

    def group_index(self, name: str) -> int:
        return self._slices[name][0].index

    def place(self, layout: ChunkLayout, parameters: Mapping[str, nn.Parameter], resident: frozenset[int]) -> None:
        """Extend the layout by new parameters and move every group to where `resident` says.

        A parameter whose name was another's, which is gone, takes its place. A group may have become trainable.
        Room at home is reserved for all groups before the first parameter moves.

        Raises:
            HomeError: the home tier has no room. No parameter was moved.
            StreamError: an update at home had failed. No parameter was moved.
        """
        self.updates.finish()
        former = dict(self._parameters)
        self._parameters.update({name: weakref.ref(p) for name, p in parameters.items()})
        slices = {s.spec.name: (group, s) for group in layout.groups for s in group.slices}
        new = [g for g in layout.groups if g.index >= len(self.layout.groups)]
        leaving = [layout.groups[i] for i in sorted(self.resident - resident)]
        to_home = [g for g in (*new, *leaving) if g.index not in resident]
        unfrozen = [new for old, new in zip(self.layout.groups, layout.groups) if new.trainable and not old.trainable]
        to_tier = [layout.groups[i] for i in sorted(resident - self.resident) if i < len(self.layout.groups)]
        wanted = {
            chunk_name(kind, group.index): group.nbytes(kind)
            for group in to_home
            for kind in ((PARAM, GRAD) if group.trainable else (PARAM,))
        }
        wanted |= {chunk_name(GRAD, g.index): g.nbytes(GRAD) for g in unfrozen if g.index not in resident}
        try:
            self.arena.reserve(wanted)
        except BaseException:
            self._parameters = former
            raise
        self.layout, self._slices, self.resident = layout, slices, resident
        for group in to_home:
            self._move(group, lambda s: self.home_view(PARAM, s.spec.name), GRAD)
        for group in to_tier:
            self._move(group, self._tier_tensor, None)
            self.arena.free([name for name in self.arena.chunks if split_chunk_name(name)[1] == group.index])
        for name, parameter in parameters.items():
            if name in former and former[name]() is not parameter and self.is_managed(name):
                self._move_tensor(name, self.home_view(PARAM, name), GRAD)

    def restate(self, layout: ChunkLayout) -> None:
        """Take over a layout that differs in what states are kept; none may be at home yet where it does."""
        for old, new in zip(self.layout.groups, layout.groups, strict=True):
            assert old.states == new.states or chunk_name(EXP_AVG, old.index) not in self.arena, "states are at home"
        self.layout = layout
        self._slices = {s.spec.name: (group, s) for group in layout.groups for s in group.slices}

    def _move(self, group: ChunkGroup, target: Callable[[TensorSlice], torch.Tensor], grad_kind: str | None) -> None:
        for tensor_slice in group.slices:
            name = tensor_slice.spec.name
            if self._parameters[name]() is not None:
                self._move_tensor(name, target(tensor_slice), grad_kind)

    @torch.no_grad()
    def _move_tensor(self, name: str, data: torch.Tensor, grad_kind: str | None) -> None:
        parameter = self.parameter(name)
        self.fill(PARAM, name, data, parameter)
        parameter.data = data
        if parameter.grad is not None:
            grad = self.home_view(GRAD, name) if grad_kind else self._tier_tensor(self._slices[name][1])
            self.fill(GRAD, name, grad, parameter.grad)
            parameter.grad = grad

    def fill(self, kind: str, name: str, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a tensor into its new place: what the host has, the host copies home, past the device."""
        group, where = self._slices[name]
        if source.device.type == "cpu" and group.index not in self.resident:
            self.await_home(chunk_name(kind, group.index))
            chunk, numel = chunk_name(kind, group.index), num_entries(kind, group.numel)
            host = self.arena.host_view(chunk, group.kind_dtype(kind), numel)
            if host is not None:
                target = host[group.entries(kind, where)].as_strided(target.shape, target.stride())
        target.copy_(source)

    def _tier_tensor(self, tensor_slice: TensorSlice) -> torch.Tensor:
        spec = tensor_slice.spec
        return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=self.tier.device)

    def reserve_states(self, group: int) -> None:
        """Reserve home room, all zeros, for the optimizer states of a group, and of all others at the same time.

        Raises:
            HomeError: the home tier has no room.
        """
        if chunk_name(EXP_AVG, group) in self.arena:
            return
        groups = [g for g in self.layout.groups if g.trainable and g.index not in self.resident]
        self.arena.reserve(
            {
                chunk: g.nbytes(kind)
                for g in groups
                for kind in g.update_kinds
                if (chunk := chunk_name(kind, g.index)) not in self.arena
            }
        )

    def leave_states(self, group: int) -> None:
        """Leave a group's states at home to who has views of them; room for others has to be reserved."""
        chunks = [chunk_name(kind, group) for kind in self.layout.groups[group].state_kinds]
        self.arena.free([chunk for chunk in chunks if chunk in self.arena])

    def home_view(self, kind: str, name: str) -> torch.Tensor:
        """A tensor over a parameter's bytes (or its gradient's, or a state's) at home; its storage is its own."""
        group, where = self._slices[name]
        dtype, entries = group.kind_dtype(kind), group.entries(kind, where)
        shape, stride = (where.spec.shape, where.spec.stride) if kind not in SCALES else ((length(entries),), (1,))
        return self.arena.view(chunk_name(kind, group.index), dtype, shape, stride, entries.start * dtype.itemsize)

    # --- chunks on the move ---

    def slot(self, chunk: str) -> Slot:
        found = self._slots.get(chunk)
        if found is None:
            found = self._slots[chunk] = Slot()
        return found

    @property
    def present(self) -> frozenset[str]:
        """Chunks that have a slot now."""
        return frozenset(chunk for chunk, slot in self._slots.items() if slot.state is not ChunkState.FREE)

    def prefetch(self, chunk: str) -> None:
        """Take a slot and start to fill it from home. A gradient chunk without gradients has nothing to read."""
        kind, group_index = split_chunk_name(chunk)
        group, slot = self.layout.groups[group_index], self.slot(chunk)
        state = advance(chunk, slot.state, ChunkState.PREFETCHING)
        needs_data = kind != GRAD or self.collect_gradients(group_index)
        self.updates.note_use(group_index)
        begin, end = chunk_part(chunk) or (0, group.numel)
        slot.buffer = buffer = self._spare.take(self.tier, num_entries(kind, end - begin), group.kind_dtype(kind))
        if self.debug:
            self.tier.enqueue(fill_with_nan, buffer)
        slot.state, slot.copy, slot.dirty = state, None, False
        if needs_data:
            job = self.arena.reader(*self._whole(chunk), buffer)
            slot.copy = self.tier.to_device.submit(job, after=(*self.tier.mark(), *self.updates.before(group_index)))
            self.traffic.to_device_nbytes += buffer.nbytes

    def wait(self, chunk: str) -> None:
        """What is computed from now on finds the copy under way, in or out, done; the chunk can be read."""
        slot = self.slot(chunk)
        if slot.copy is not None:
            start_s = time.perf_counter()
            self.tier.hold_for(slot.copy)
            slot.copy = None
            self.traffic.wait_s += time.perf_counter() - start_s
        if slot.state in (ChunkState.PREFETCHING, ChunkState.EVICTING):
            slot.state = advance(chunk, slot.state, ChunkState.HOLD)

    def await_home(self, chunk: str) -> None:
        """Block the host until the chunk's home is as all that was enqueued so far leaves it.

        For a host that reads or writes home memory itself, as an update on CPU threads does.

        Raises:
            StreamError, HomeError: the chunk's copy, or its update, failed.
        """
        self.updates.wait(split_chunk_name(chunk)[1])
        slot = self._slots.get(chunk)
        if slot is not None and slot.copy is not None and slot.state is ChunkState.EVICTING:
            slot.copy.wait()
            return
        for moment in self.tier.mark():
            moment.wait()

    def home_moments(self, group: int) -> list[Moment]:
        """When all that was enqueued so far, and every copy of the group's chunks under way, is over."""
        slots = [self._slots.get(chunk_name(kind, group)) for kind in self.layout.groups[group].update_kinds]
        return [*self.tier.mark(), *(slot.copy for slot in slots if slot is not None and slot.copy is not None)]

    def write_back(self, chunk: str) -> None:
        """Start to copy a dirty slot home; nothing moves if it is clean."""
        slot = self.slot(chunk)
        slot.state = advance(chunk, slot.state, ChunkState.EVICTING)
        buffer = slot.buffer
        assert buffer is not None
        if slot.dirty:
            job = self.arena.writer(*self._whole(chunk), buffer)
            updates = self.updates.before(split_chunk_name(chunk)[1])
            slot.copy = self.tier.to_home.submit(job, after=(*self.tier.mark(), *updates))
            self.traffic.to_home_nbytes += buffer.nbytes
            slot.dirty = False

    def evict(self, chunk: str) -> None:
        """Give the slot back. Its data must be at home by now."""
        slot = self.slot(chunk)
        if slot.dirty:
            raise ChunkStateError(f"chunk {chunk} would be evicted before it was written back")
        slot.state = advance(chunk, slot.state, ChunkState.FREE)
        assert slot.buffer is not None
        if self.debug:
            self.tier.enqueue(fill_with_nan, slot.buffer)
        self._spare.give(slot.buffer)
        slot.buffer = slot.copy = None
        if chunk_part(chunk) is not None:
            del self._slots[chunk]

    def drop_spare_slots(self) -> None:
        """Give the tier back what evicted chunks left and no prefetch has taken since."""
        self._spare.drop()

    def _whole(self, chunk: str) -> tuple[str, int]:
        """The whole chunk that a name is of, and where in it the name's bytes begin."""
        kind, index = split_chunk_name(chunk)
        begin, _ = chunk_part(chunk) or (0, 0)
        return chunk_name(kind, index), num_entries(kind, begin) * self.layout.groups[index].kind_dtype(kind).itemsize

    def begin_compute(self, chunk: str) -> torch.Tensor:
        """The slot's flat buffer, for the computation that starts now."""
        slot = self.slot(chunk)
        slot.state = advance(chunk, slot.state, ChunkState.COMPUTE)
        assert slot.buffer is not None
        return slot.buffer

    def end_compute(self, chunk: str, *, wrote: bool = False) -> None:
        slot = self.slot(chunk)
        slot.state = advance(chunk, slot.state, ChunkState.HOLD)
        slot.dirty |= wrote

    def parameter_view(self, chunk: str, name: str) -> torch.Tensor:
        """The parameter in its slot, which must hold it."""
        slot, (_, where) = self.slot(chunk), self._slices[name]
        if slot.buffer is None or slot.state not in (ChunkState.HOLD, ChunkState.COMPUTE):
            raise ChunkStateError(f"{name} is read from chunk {chunk}, which is {slot.state.value}")
        return slot.buffer.as_strided(where.spec.shape, where.spec.stride, where.offset)

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
                    self.write_back(chunk)
                    self.wait(chunk)
                self.evict(chunk)
            except (StreamError, HomeError) as error:
                problem = problem or error
                self._lose(chunk)
        self.drop_spare_slots()
        if problem is not None:
            raise problem

    def _lose(self, chunk: str) -> None:
        """Forget a slot whose copy failed. A reader must find no gradient rather than one that never got home."""
        slot = self._slots.pop(chunk)
        kind, group = split_chunk_name(chunk)
        if kind == GRAD and (slot.dirty or slot.state is ChunkState.EVICTING):
            for tensor_slice in self.layout.groups[group].slices:
                parameter = self._parameters[tensor_slice.spec.name]()
                if parameter is not None:
                    parameter.grad = None

    # --- gradients ---

    def collect_gradients(self, index: int) -> bool:
        """Make home the place of every gradient the group has; whether it has any.

        A gradient that the user replaced by another tensor is copied home. A tensor that was handed out as
        `.grad` and is still held by someone gets a copy of its own, before its home is written again.
        """
        found = False
        for tensor_slice in self.layout.groups[index].slices:
            name = tensor_slice.spec.name
            parameter = self.parameter(name)
            reference, address = self._handed_out.get(name, NOTHING)
            handed = reference()
            grad = parameter.grad
            if handed is not None and handed is not grad:
                handed.data = handed.detach().clone()
            if grad is None:
                continue
            found = True
            if handed is not grad or grad.data_ptr() != address:
                self.updates.wait(index)
                self.tier.enqueue(self._hand_out(name, parameter).copy_, grad)
        return found

    def _hand_out(self, name: str, parameter: nn.Parameter) -> torch.Tensor:
        view = self.home_view(GRAD, name)
        parameter.grad = view
        self._handed_out[name] = (weakref.ref(view), view.data_ptr())
        return view

    def sink(self, name: str, chunk: str | None, take: Callable[[], torch.Tensor], *, owned: bool) -> None:
        """Take a complete gradient: into the slot of `chunk`, or, for a resident, straight into `.grad`.

        As autograd's AccumulateGrad: the first gradient is stored, later ones are added. Which of the two, the host
        decides now; `take` gives the gradient when computation gets there. `owned`: nothing else will ever read the
        gradient's storage, so a resident parameter may keep it without a copy.
        """
        parameter = self.parameter(name)
        if chunk is None:
            self.tier.enqueue(accumulate, parameter, take, owned)
            return
        slot = self.slot(chunk)
        target = self.parameter_view(chunk, name)
        slot.dirty = True
        if parameter.grad is None:
            self.tier.enqueue(store_first, target, take)
            self._hand_out(name, parameter)
        else:
            self.tier.enqueue(add_later, target, take)
