"""Map parameters to their chunks, and make home views and slot views of them and of their optimizer states."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from chunkc.ir.errors import ChunkStateError, UnsupportedError
from chunkc.ir.layout import PARAM, Chunk, ChunkGroup, ChunkLayout, TensorSlice
from chunkc.ir.states import is_scale, num_entries
from chunkc.runtime.storage.arena import Arena
from chunkc.runtime.storage.forks import refuse_in_forks
from chunkc.runtime.store.slots import ChunkSlots, ChunkState


class ParameterViews:
    """Parameters of one model by name, and views of their chunks. References to parameters are weak.

    Args:
        arena: the chunks' home memory.
        slots: for slot views; they have the layout.

    Attributes:
        resident: groups that stay on the compute tier.
    """

    def __init__(self, arena: Arena, slots: ChunkSlots) -> None:
        self.resident: frozenset[int] = frozenset()
        self._arena = arena
        self._slots = slots
        self._parameters: dict[str, weakref.ref[nn.Parameter]] = {}
        self._slices: dict[str, tuple[ChunkGroup, TensorSlice]] = {}
        self._addresses: dict[str, int] = {}
        self._home_storages: dict[str, StorageWeakRef] = {}

    @property
    def layout(self) -> ChunkLayout:
        return self._slots.layout

    def note_layout(self) -> None:
        """Note where the layout has each parameter, once it is another; moves nothing."""
        self._slices = {s.spec.name: (group, s) for group in self.layout.groups for s in group.slices}

    # --- parameters by name ---

    def add(self, name: str, parameter: nn.Parameter) -> bool:
        """Give a parameter its name; return whether it replaces another one of this name, which may be gone."""
        former = self._parameters.get(name)
        self._parameters[name] = weakref.ref(parameter)
        return former is not None and former() is not parameter

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

    def of_group(self, index: int) -> dict[str, nn.Parameter]:
        """Return the parameters of a group that still exist, by name."""
        names = [tensor_slice.spec.name for tensor_slice in self.layout.groups[index].slices]
        bound = [(name, self._parameters[name]) for name in names if name in self._parameters]
        return {name: parameter for name, reference in bound if (parameter := reference()) is not None}

    def in_chunk_of(self, name: str) -> dict[str, nn.Parameter]:
        """Return the parameters of this one's chunk that still exist, itself included, by name."""
        return self.of_group(self.group_index(name))

    def is_in_chunk(self, name: str) -> bool:
        """Whether a parameter is in a chunk; small ones are in none."""
        return name in self._slices

    def is_managed(self, name: str) -> bool:
        """Whether the parameter's home is on the home tier (it is neither small nor resident)."""
        entry = self._slices.get(name)
        return entry is not None and entry[0].index not in self.resident

    def group_index(self, name: str) -> int:
        return self._slices[name][0].index

    # --- views ---

    def extent(self, kind: str, name: str) -> tuple[Sequence[int], Sequence[int]]:
        """Return shape and strides at home of a parameter, its gradient, or a state; scales are a flat row."""
        group, where = self._slices[name]
        entries = group.entries(kind, where)
        return ((entries.stop - entries.start,), (1,)) if is_scale(kind) else (where.spec.shape, where.spec.stride)

    def home_view(self, kind: str, name: str) -> torch.Tensor:
        """Make a tensor over a parameter's bytes (or its gradient's, or a state's) at home, with its own storage."""
        group, where = self._slices[name]
        dtype, entries = group.kind_dtype(kind), group.entries(kind, where)
        shape, stride = self.extent(kind, name)
        return self._arena.view(Chunk(kind, group.index), dtype, shape, stride, entries.start * dtype.itemsize)

    def host_view(self, kind: str, name: str) -> torch.Tensor:
        """Make a CPU tensor over the same bytes; the caller orders its reads and writes (`ChunkSlots.await_home`)."""
        group, where = self._slices[name]
        shape, stride = self.extent(kind, name)
        host = self._arena.host_view(Chunk(kind, group.index), group.kind_dtype(kind), num_entries(kind, group.numel))
        return host[group.entries(kind, where)].as_strided(shape, stride)

    def is_home_view(self, tensor: torch.Tensor, kind: str, name: str) -> bool:
        """Whether a tensor begins where `home_view` would, so that no new one is needed, which takes microseconds."""
        group, where = self._slices[name]
        begin_nbytes = group.entries(kind, where).start * group.kind_dtype(kind).itemsize
        return tensor.data_ptr() == self._arena.address(Chunk(kind, group.index)) + begin_nbytes

    def slot_view(self, chunk: Chunk, name: str) -> torch.Tensor:
        """Make a view of the parameter in its slot, which must hold it."""
        slot, (_, where) = self._slots.slot(chunk), self._slices[name]
        if slot.buffer is None or slot.state not in (ChunkState.HOLD, ChunkState.COMPUTE):
            raise ChunkStateError(f"{name} is read from chunk {chunk}, which is {slot.state.value}")
        shards = where.spec.shards
        if shards is not None:
            return slot.buffer.as_strided(shards.shape, shards.stride, where.slot_offset)
        return placed(slot.buffer, where)

    # --- what a parameter's data is ---

    def point_home(self, name: str, parameter: nn.Parameter) -> None:
        """Make a parameter's data its home view."""
        self.point(name, parameter, self.home_view(PARAM, name))

    def point(self, name: str, parameter: nn.Parameter, data: torch.Tensor) -> None:
        """Make a tensor the data of a parameter in a chunk."""
        parameter.data = data
        self._addresses[name] = data.data_ptr()
        self._home_storages[name] = StorageWeakRef(data.untyped_storage())
        if self._arena.is_shared_with_forks(PARAM):
            refuse_in_forks(parameter)

    def is_replaced(self, name: str) -> bool:
        """Whether a managed parameter's data is no longer the home view that it was pointed at."""
        parameter, stride = self.parameter(name), self._slices[name][1].spec.stride
        return parameter.data_ptr() != self._addresses[name] or parameter.stride() != stride

    def has_external_views(self, name: str) -> bool:
        """Whether there are external views of the former home of a parameter with replaced data."""
        return not self._home_storages[name].expired()


def placed(buffer: torch.Tensor, where: TensorSlice) -> torch.Tensor:
    """Make a view of a parameter's elements in a slot of its group."""
    return buffer.as_strided(where.spec.shape, where.spec.stride, where.offset)
