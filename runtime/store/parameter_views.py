"""Map parameters to their chunks, and make home views and slot views of them and of their optimizer states."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from chunkc.ir.errors import ChunkStateError, UnsupportedError
from chunkc.ir.layout import CASTS, GRAD, PARAM, Chunk, ChunkGroup, ChunkLayout, TensorSlice
from chunkc.ir.states import is_scale, num_entries
from chunkc.runtime.device.streams import Launch
from chunkc.runtime.storage.forks import refuse_in_forks
from chunkc.runtime.storage.maps import drop_pages
from chunkc.runtime.store.chunk_states import ChunkState
from chunkc.runtime.store.gradient_sums import GradientSums
from chunkc.runtime.store.gradients import has_external_views
from chunkc.runtime.store.slots import ChunkSlots


@dataclass
class ParameterViews(ChunkSlots):
    """Slots, and home views of parameters, gradients and states. References to parameters are weak.

    Attributes:
        resident: groups that stay on the compute tier.
    """

    resident: frozenset[int] = frozenset()
    _parameters: dict[str, weakref.ref[nn.Parameter]] = field(default_factory=dict)
    _slices: dict[str, tuple[ChunkGroup, TensorSlice]] = field(default_factory=dict)
    _addresses: dict[str, int] = field(default_factory=dict)
    _home_storages: dict[str, StorageWeakRef] = field(default_factory=dict)

    @cached_property
    def sums(self) -> GradientSums:
        """Sums of squares of gradients, for their norms."""
        return GradientSums(self.arena.home)

    def parameter(self, name: str) -> nn.Parameter:
        """Return the parameter of a name.

        Raises:
            UnsupportedError: its model is gone.
        """
        parameter = self._parameters[name]()
        if parameter is None:
            raise UnsupportedError(
                f"parameter {name} no longer exists, but code compiled for it still runs; keep the model alive, or "
                "compile the new one"
            )
        return parameter

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that still exist, by name."""
        return {name: p for name, ref in self._parameters.items() if (p := ref()) is not None}

    def is_managed(self, name: str) -> bool:
        """Whether the parameter's home is on the home tier (it is neither small nor resident)."""
        entry = self._slices.get(name)
        return entry is not None and entry[0].index not in self.resident

    def group_index(self, name: str) -> int:
        return self._slices[name][0].index

    def parameters_in_chunk_of(self, name: str) -> dict[str, nn.Parameter]:
        """Return the parameters of this one's chunk that still exist, itself included, by name."""
        return self._parameters_of(self.group_index(name))

    def _parameters_of(self, index: int) -> dict[str, nn.Parameter]:
        """Return the parameters of a group that still exist, by name."""
        names = [tensor_slice.spec.name for tensor_slice in self.layout.groups[index].slices]
        bound = [(name, self._parameters[name]) for name in names if name in self._parameters]
        return {name: parameter for name, reference in bound if (parameter := reference()) is not None}

    def set_state_kinds(self, layout: ChunkLayout) -> None:
        """Take over a layout with other kinds of states; groups that differ may have no states at home yet."""
        for old, new in zip(self.layout.groups, layout.groups, strict=True):
            assert old.states == new.states or not self._states_at_home(old), "states are at home"
        self._take_over(layout)

    def set_replicated(self, layout: ChunkLayout) -> None:
        """Take over a layout with other replicated groups; free the buffers of groups that no longer are."""
        self._take_over(layout)

    def _take_over(self, layout: ChunkLayout) -> None:
        self.layout = layout
        self._slices = {s.spec.name: (group, s) for group in layout.groups for s in group.slices}
        self.replicated.keep(layout.replicated)

    @torch.no_grad()
    def write(self, kind: str, name: str, values: torch.Tensor) -> None:
        """Write a parameter's values (or its gradient's, or a state's) home, where memory must be reserved.

        The host copies CPU tensors itself, past the device. On a disk, pages touched by this leave the RAM.
        """
        group, where = self._slices[name]
        if values.device.type != "cpu":
            self.home_view(kind, name).copy_(values)
            return
        chunk = Chunk(kind, group.index)
        self.await_home(chunk)
        shape, stride = self._extent(kind, name)
        host = self.arena.host_view(chunk, group.kind_dtype(kind), num_entries(kind, group.numel))
        target = host[group.entries(kind, where)].as_strided(shape, stride)
        target.copy_(values)
        drop_pages(target)

    def home_view(self, kind: str, name: str) -> torch.Tensor:
        """Make a tensor over a parameter's bytes (or its gradient's, or a state's) at home, with its own storage."""
        group, where = self._slices[name]
        dtype, entries = group.kind_dtype(kind), group.entries(kind, where)
        shape, stride = self._extent(kind, name)
        return self.arena.view(Chunk(kind, group.index), dtype, shape, stride, entries.start * dtype.itemsize)

    def is_home_view(self, tensor: torch.Tensor, kind: str, name: str) -> bool:
        """Whether a tensor begins where `home_view` would, so that no new one is needed, which takes microseconds."""
        group, where = self._slices[name]
        begin_nbytes = group.entries(kind, where).start * group.kind_dtype(kind).itemsize
        return tensor.data_ptr() == self.arena.address(Chunk(kind, group.index)) + begin_nbytes

    def _set_data(self, name: str, parameter: nn.Parameter, data: torch.Tensor) -> None:
        parameter.data = data
        self._addresses[name] = data.data_ptr()
        self._home_storages[name] = StorageWeakRef(data.untyped_storage())
        if self.arena.is_shared_with_forks(PARAM):
            refuse_in_forks(parameter)

    def _extent(self, kind: str, name: str) -> tuple[Sequence[int], Sequence[int]]:
        """Return shape and strides at home of a parameter, its gradient, or a state; scales are a flat row."""
        group, where = self._slices[name]
        entries = group.entries(kind, where)
        return ((entries.stop - entries.start,), (1,)) if is_scale(kind) else (where.spec.shape, where.spec.stride)

    def _on_tier(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Copy a parameter's (or its gradient's) values to the compute tier."""
        shape, stride = self._extent(PARAM, name)
        return torch.empty_strided(shape, stride, dtype=values.dtype, device=self.tier.device).copy_(values)

    def _reader(self, chunk: Chunk, buffer: torch.Tensor) -> Callable[[], None]:
        """Make a job that fills a slot; a cast's from the parameters, at home or resident."""
        if chunk.kind not in CASTS:
            return super()._reader(chunk, buffer)
        group = self.layout.groups[chunk.group]
        if chunk.group not in self.resident:
            return self.arena.caster(Chunk(PARAM, chunk.group), group.dtype, buffer)
        pairs = [(self.parameter(s.spec.name).detach(), _placed(buffer, s)) for s in group.slices]
        return Launch(_cast_all, pairs) if self.tier.device.type == "cuda" else partial(_cast_all, pairs)

    def _read_nbytes(self, chunk: Chunk, buffer: torch.Tensor) -> int:
        if chunk.kind in CASTS:
            return self.layout.read_for_cast_nbytes(chunk, self.resident)
        return super()._read_nbytes(chunk, buffer)

    def parameter_view(self, chunk: Chunk, name: str) -> torch.Tensor:
        """Make a view of the parameter in its slot, which must hold it."""
        slot, (_, where) = self.slot(chunk), self._slices[name]
        if slot.buffer is None or slot.state not in (ChunkState.HOLD, ChunkState.COMPUTE):
            raise ChunkStateError(f"{name} is read from chunk {chunk}, which is {slot.state.value}")
        shards = where.spec.shards
        if shards is not None:
            return slot.buffer.as_strided(shards.shape, shards.stride, where.slot_offset)
        return _placed(slot.buffer, where)

    def reserve_states(self, group: int) -> None:
        """Reserve zeroed home memory for the optimizer states of a group, and of all other groups at the same time.

        Raises:
            HomeError: the home tier has no room.
        """
        own = self.layout.groups[group]
        if len(self._states_at_home(own)) == len(own.state_kinds):
            return
        groups = [g for g in self.layout.groups if g.trainable and g.index not in self.resident]
        wanted = {Chunk(kind, g.index): g.nbytes(kind) for g in groups for kind in g.update_kinds}
        self.arena.reserve({chunk: nbytes for chunk, nbytes in wanted.items() if chunk not in self.arena})

    def reserve_gradients(self, groups: Iterable[int]) -> None:
        """Allocate promised home memory for gradients of these groups, which no update will consume.

        Raises:
            HomeError: the home tier has no room.
        """
        self.arena.keep_promises(Chunk(GRAD, group) for group in groups)

    @torch.no_grad()
    def commit_shadow_copies(self, group: int, states: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Commit a group's update from its shadow copies (see `ShadowCopies`); the group must be unused meanwhile.

        Parameters and states become views of the new values, unless there are external views of their memory.

        Args:
            states: by parameter, its states at home by kind.
        """
        parameters, written = self._parameters_of(group), self.shadow_copies.written(group)
        views = {
            (kind, name): parameters[name] if kind == PARAM else states[name][kind]
            for name in parameters
            for kind in written
            if kind == PARAM or kind in states[name]
        }
        viewed = {kind for (kind, _), view in views.items() if has_external_views(view)}
        if viewed:
            self.updates.wait(group)
            for mark in self.home_marks(group):
                mark.wait()
        self.shadow_copies.commit(self.layout, group, copied=viewed)
        for (kind, name), view in views.items():
            if kind in viewed:
                continue
            if kind == PARAM:
                self._set_data(name, parameters[name], self.home_view(kind, name))
            else:
                view.data = self.home_view(kind, name)

    def release_states(self, group: int) -> None:
        """Free a group's states at home, except for external views; new states need `reserve_states`."""
        self.arena.free(self._states_at_home(self.layout.groups[group]))

    def _states_at_home(self, group: ChunkGroup) -> list[Chunk]:
        """Return the chunks of a group's states that have memory at home."""
        return [chunk for kind in group.state_kinds if (chunk := Chunk(kind, group.index)) in self.arena]


def _placed(buffer: torch.Tensor, where: TensorSlice) -> torch.Tensor:
    """Make a view of a parameter's elements in a slot of its group."""
    return buffer.as_strided(where.spec.shape, where.spec.stride, where.offset)


def _cast_all(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Cast the first tensor of each pair into the second."""
    for source, destination in pairs:
        destination.copy_(source)
