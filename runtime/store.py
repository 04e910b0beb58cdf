"""The chunk store: every parameter of a model, the chunk that it lives in, and the chunk's home.

Between calls no chunk has a slot: parameters and gradients are home views, valid for any reader and writer.
During a call the executor moves chunks (see `runtime.slots`); computation reads slots only.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from chunkc.ir.chunks import (
    GRAD,
    PARAM,
    ChunkGroup,
    ChunkLayout,
    TensorSlice,
    chunk_name,
    split_chunk_name,
)
from chunkc.ir.errors import ChunkStateError, UnsupportedError
from chunkc.ir.states import MASTER_LOW, is_scale, num_entries
from chunkc.runtime.chunk_states import ChunkState
from chunkc.runtime.forks import refuse_in_forks
from chunkc.runtime.gradients import NOTHING, HandedOut, accumulate, add_later, of_several, store_first
from chunkc.runtime.slots import ChunkSlots


@dataclass
class ChunkStore(ChunkSlots):
    """Owns homes and slots of one model's chunks. Holds parameters weakly: the model's life is its user's.

    Attributes:
        resident: groups that stay on the compute tier.
        left_to_autograd: parameters whose `.grad` is one tensor with another's: it stays the tensor that it is.
    """

    resident: frozenset[int] = frozenset()
    left_to_autograd: frozenset[str] = frozenset()
    _parameters: dict[str, weakref.ref[nn.Parameter]] = field(default_factory=dict)
    _addresses: dict[str, int] = field(default_factory=dict)
    _home_storages: dict[str, StorageWeakRef] = field(default_factory=dict)
    _slices: dict[str, tuple[ChunkGroup, TensorSlice]] = field(default_factory=dict)
    _handed_out: dict[str, HandedOut] = field(default_factory=dict)

    # --- parameters and their homes ---

    def parameter(self, name: str) -> nn.Parameter:
        """The parameter of that name.

        Raises:
            UnsupportedError: the model it belonged to is gone.
        """
        parameter = self._parameters[name]()
        if parameter is None:
            raise UnsupportedError(
                f"parameter {name} no longer exists, but code compiled for it still runs; keep the model alive, or "
                "compile the new one"
            )
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
        self.left_to_autograd = of_several(self.parameters())
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
            assert old.states == new.states or not self._states_at_home(old), "states are at home"
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
        self._set_data(name, parameter, data)
        if parameter.grad is not None and name not in self.left_to_autograd:
            grad = self.home_view(GRAD, name) if grad_kind else self._tier_tensor(self._slices[name][1])
            self.fill(GRAD, name, grad, parameter.grad)  # may fail: `.grad` is the former one until then
            parameter.grad = grad
            if grad_kind:
                self._handed_out[name] = HandedOut.of(grad)

    def _set_data(self, name: str, parameter: nn.Parameter, data: torch.Tensor) -> None:
        parameter.data = data
        self._addresses[name] = data.data_ptr()
        self._home_storages[name] = StorageWeakRef(data.untyped_storage())
        if self.arena.is_shared_with_forks(PARAM):
            refuse_in_forks(parameter)

    def replaced(self, names: Iterable[str]) -> list[str]:
        """Those of the parameters that are managed, and whose data is not the home view that it was made."""
        found = []
        for name in names:
            if self.is_managed(name):
                parameter = self.parameter(name)
                stride = self._slices[name][1].spec.stride
                if parameter.data_ptr() != self._addresses[name] or parameter.stride() != stride:
                    found.append(name)
        return found

    def is_viewed(self, name: str) -> bool:
        """Whether somebody has views of the home of a parameter whose data was replaced."""
        return not self._home_storages[name].expired()

    def beside(self, name: str) -> dict[str, nn.Parameter]:
        """The parameters that share a chunk with this one and still exist, itself included."""
        return self._parameters_of(self.group_index(name))

    @torch.no_grad()
    def take_over(self, names: Iterable[str]) -> None:
        """Bring the values of parameters home whose data was replaced; they are home views again.

        Where somebody has views of what one was, they keep its bytes, and the chunk gets another home.

        Raises:
            StreamError, HomeError: an update or a copy of its home had failed, or there is no room for another.
        """
        by_group: dict[int, list[str]] = {}
        for name in names:
            by_group.setdefault(self.group_index(name), []).append(name)
        for index, of_group in by_group.items():
            self.await_home(chunk_name(PARAM, index))
            if any(self.is_viewed(name) for name in of_group):
                self.arena.replace(chunk_name(PARAM, index), self.layout.groups[index].nbytes(PARAM))
                of_group = list(self._parameters_of(index))
            for name in of_group:
                parameter, view = self.parameter(name), self.home_view(PARAM, name)
                self.fill(PARAM, name, view, parameter.data)
                self._set_data(name, parameter, view)
                if chunk_name(MASTER_LOW, index) in self.arena:  # lower bits of other contents
                    self.home_view(MASTER_LOW, name).zero_()

    def fill(self, kind: str, name: str, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a tensor into its new place: what the host has, the host copies home, past the device."""
        group, where = self._slices[name]
        if source.device.type == "cpu" and group.index not in self.resident:
            self.await_home(chunk_name(kind, group.index))
            chunk, numel = chunk_name(kind, group.index), num_entries(kind, group.numel)
            host = self.arena.host_view(chunk, group.kind_dtype(kind), numel)
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
        of_group = self.layout.groups[group]
        if len(self._states_at_home(of_group)) == len(of_group.state_kinds):
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
        self.arena.free(self._states_at_home(self.layout.groups[group]))

    def _states_at_home(self, group: ChunkGroup) -> list[str]:
        """The chunks of a group's states that have room at home."""
        chunks = [chunk_name(kind, group.index) for kind in group.state_kinds]
        return [chunk for chunk in chunks if chunk in self.arena]

    def home_view(self, kind: str, name: str) -> torch.Tensor:
        """A tensor over a parameter's bytes (or its gradient's, or a state's) at home; its storage is its own."""
        group, where = self._slices[name]
        dtype, entries = group.kind_dtype(kind), group.entries(kind, where)
        shape, stride = where.spec.shape, where.spec.stride
        if is_scale(kind):
            shape, stride = (entries.stop - entries.start,), (1,)
        return self.arena.view(chunk_name(kind, group.index), dtype, shape, stride, entries.start * dtype.itemsize)

    def parameter_view(self, chunk: str, name: str) -> torch.Tensor:
        """The parameter in its slot, which must hold it."""
        slot, (_, where) = self.slot(chunk), self._slices[name]
        if slot.buffer is None or slot.state not in (ChunkState.HOLD, ChunkState.COMPUTE):
            raise ChunkStateError(f"{name} is read from chunk {chunk}, which is {slot.state.value}")
        return slot.buffer.as_strided(where.spec.shape, where.spec.stride, where.offset)

    def close(self) -> None:
        """Give back all slots and homes as they are, and end the threads once nothing is under way."""
        self._slots.clear()
        self.drop_spare_slots()
        self.updates.end_soon()
        self.tier.end_soon()
        self.arena.free(self.arena.chunks)

    # --- gradients ---

    def _has_data_at_home(self, chunk: str) -> bool:
        kind, group = split_chunk_name(chunk)
        return kind != GRAD or self.collect_gradients(group)

    def _never_got_home(self, chunk: str) -> None:
        """A reader must find no gradient rather than one that never got home."""
        kind, group = split_chunk_name(chunk)
        if kind != GRAD:
            return
        for tensor_slice in self.layout.groups[group].slices:
            parameter = self._parameters[tensor_slice.spec.name]()
            if parameter is not None:
                parameter.grad = None

    def collect_gradients(self, index: int) -> bool:
        """Make home the place of every gradient the group has; whether it has any.

        A gradient that the user replaced by another tensor is copied home, and the home view takes its place unless
        autograd is to add to that very tensor (`left_to_autograd`). Where somebody still has views of a gradient that
        is no parameter's any more, they keep its bytes, and the group's gradients get another home.

        Raises:
            HomeError: there is no room for another home.
        """
        parameters = self._parameters_of(index)
        if any(self._is_kept_elsewhere(name, parameter) for name, parameter in parameters.items()):
            self._leave_gradients(index)
        found = False
        for name, parameter in parameters.items():
            grad = parameter.grad
            if grad is None:
                continue
            found = True
            if (
                grad is not self._handed_out.get(name, NOTHING).view()
                or grad.data_ptr() != self._handed_out[name].address
            ):
                self.updates.wait(index)
                left = name in self.left_to_autograd
                home = self.home_view(GRAD, name) if left else self._hand_out(name, parameter)
                source = grad.clone() if grad.untyped_storage().data_ptr() == home.data_ptr() else grad
                self.tier.enqueue(home.copy_, source)
        return found

    def _parameters_of(self, index: int) -> dict[str, nn.Parameter]:
        """The parameters of a group that still exist, by name."""
        names = [tensor_slice.spec.name for tensor_slice in self.layout.groups[index].slices]
        return {name: p for name in names if (p := self._parameters[name]()) is not None}

    def _is_kept_elsewhere(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether somebody has views of what was handed out as the parameter's gradient and is not `.grad` now."""
        handed = self._handed_out.get(name, NOTHING)
        if handed.is_gone():
            return False
        grad = parameter.grad
        return grad is None or grad.untyped_storage().data_ptr() != handed.address

    def _leave_gradients(self, index: int) -> None:
        """Leave a group's gradients at home to who has views of them; those that are still `.grad` move to new room."""
        chunk = chunk_name(GRAD, index)
        self.await_home(chunk)
        self.arena.replace(chunk, self.layout.groups[index].nbytes(GRAD))
        for name, parameter in self._parameters_of(index).items():
            handed = self._handed_out.pop(name, NOTHING)
            grad = parameter.grad
            if grad is not None and grad is handed.view() and grad.data_ptr() == handed.address:
                view = self.home_view(GRAD, name)
                view.copy_(grad)
                grad.data = view
                self._handed_out[name] = HandedOut.of(grad)

    def has_foreign_gradients(self) -> bool:
        """Whether some gradient of a managed parameter is not the home view that was handed out."""
        return any(
            p.grad is not None and p.grad is not self._handed_out.get(name, NOTHING).view()
            for name, p in self.parameters().items()
            if self.is_managed(name)
        )

    def _hand_out(self, name: str, parameter: nn.Parameter) -> torch.Tensor:
        view = self.home_view(GRAD, name)
        parameter.grad = view
        self._handed_out[name] = HandedOut.of(view)
        return view

    def sink(self, name: str, chunk: str | None, take: Callable[[], torch.Tensor], *, owned: bool) -> None:
        """Take a complete gradient: into the slot of `chunk`, or, for a resident, straight into `.grad`.

        As autograd's AccumulateGrad: the first gradient is stored, later ones are added. Which of the two, the host
        decides now; `take` gives the gradient when computation gets there. `owned`: nothing else will ever read the
        gradient's storage, so a resident parameter may keep it without a copy. A parameter that was frozen since the
        forward gets none.
        """
        parameter = self.parameter(name)
        if not parameter.requires_grad:
            self.tier.enqueue(take)
            return
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
