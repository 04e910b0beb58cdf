"""Store the chunks of a model: parameters and gradients as home views, and their moves between homes.

Between calls no chunk has a slot: parameters and gradients are home views, valid for any reader and writer.
During a call the executor moves chunks (see `runtime.store.slots`); computation reads slots only.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from chunkc.ir.layout import GRAD, PARAM, Chunk, ChunkGroup, ChunkLayout
from chunkc.ir.states import MASTER_LOW
from chunkc.runtime.store.consumed_gradients import (
    ConsumedGradient,
    LocalGradient,
    consumed_error,
    gradient_of,
    refuse_without_memory,
)
from chunkc.runtime.store.gradients import (
    NOT_HANDED_OUT,
    HandedOut,
    accumulate,
    add_later,
    has_external_references,
    has_external_views,
    note_replicated,
    parameters_sharing_gradients,
    share_gradients,
    store_first,
)
from chunkc.runtime.store.parameter_views import ParameterViews
from chunkc.runtime.store.slots import Slot
from chunkc.runtime.store.trainers import Trainers


@dataclass
class ChunkStore(ParameterViews):
    """Owner of homes and slots of one model's chunks. References to parameters are weak: the user owns the model.

    Attributes:
        autograd_owned: parameters with a `.grad` that must stay the same tensor object (see `find_autograd_owned`).
        trainers: which thread trains which parameters; no other thread reads their gradients.
    """

    autograd_owned: frozenset[str] = frozenset()
    trainers: Trainers = field(default_factory=Trainers)
    _handed_out: dict[str, HandedOut] = field(default_factory=dict)

    # --- parameters and their homes ---

    def reserve(self, layout: ChunkLayout, resident: frozenset[int], having: Collection[str] = ()) -> None:
        """Take over a layout, after reserving home memory for all chunks that move there. Moves nothing.

        Gradients are allocated when the first one gets home, or now for groups of parameters `having` one.

        `layout` extends the present one; a group may have become trainable. Until it is bound, a parameter and its
        memory are unchanged.

        Raises:
            HomeError: the home tier has no room. Nothing has changed.
            StreamError: an update at home had failed. Nothing has changed.
        """
        self.updates.finish()
        to_home, _ = self._moving(layout, resident)
        unfrozen = [new for old, new in zip(self.layout.groups, layout.groups) if new.trainable and not old.trainable]
        trained = [group for group in (*to_home, *unfrozen) if group.trainable and group.index not in resident]
        gradients = {Chunk(GRAD, group.index): group.nbytes(GRAD) for group in trained}
        having_groups = layout.groups_of(having)
        now = {chunk: nbytes for chunk, nbytes in gradients.items() if chunk.group in having_groups}
        self.arena.reserve({Chunk(PARAM, group.index): group.nbytes(PARAM) for group in to_home} | now)
        self.arena.promise({chunk: nbytes for chunk, nbytes in gradients.items() if chunk not in now})
        self._take_over(layout)
        self.resident = resident

    def _moving(self, layout: ChunkLayout, resident: frozenset[int]) -> tuple[list[ChunkGroup], list[ChunkGroup]]:
        """Return the groups that have to move home, and those that become resident."""
        num_present = len(self.layout.groups)
        new = [group for group in layout.groups[num_present:] if group.index not in resident]
        to_tier = [layout.groups[index] for index in sorted(resident - self.resident) if index < num_present]
        return [*new, *(layout.groups[index] for index in sorted(self.resident - resident))], to_tier

    @torch.no_grad()
    def bind(self, name: str, parameter: nn.Parameter) -> None:
        """Bind a parameter to its memory in a reserved layout.

        At home its data becomes the home view, with the values written there, or zeros. On the compute tier it becomes
        a copy in memory of its own; a parameter in no chunk is unchanged.
        """
        self._parameters[name] = weakref.ref(parameter)
        if name in self._slices:
            at_home = self.is_managed(name)
            self._set_data(name, parameter, self.home_view(PARAM, name) if at_home else self._on_tier(name, parameter))

    def place(self, layout: ChunkLayout, parameters: Mapping[str, nn.Parameter], resident: frozenset[int]) -> None:
        """Extend the layout by new parameters and move every group home or to the compute tier, tensor by tensor.

        A parameter with the name of a former one, which is gone, replaces it. Each tensor's former memory is freed
        before the next one moves.

        Raises:
            HomeError, StreamError: as `reserve`. No parameter was moved.
            UnsupportedError: a gradient cannot be copied home. Nothing has changed.
        """
        to_home, to_tier = self._moving(layout, resident)
        going_home = {s.spec.name for group in to_home for s in group.slices}
        present = self.readable() | dict(parameters) if going_home else {}
        refuse_without_memory({name: gradient_of(p) for name, p in present.items() if name in going_home})
        # No gradient may be kept in a variable here: `has_external_references` would count it as the user's.
        self.reserve(
            layout, resident, [n for n, p in present.items() if n in going_home and gradient_of(p) is not None]
        )
        former = dict(self._parameters)
        self._parameters.update({name: weakref.ref(p) for name, p in parameters.items()})
        from_home = {name: p for group in to_tier for name, p in self._parameters_of(group.index).items()}
        unread = self.trainers.trained_by_others()
        held = {name for name, p in from_home.items() if name not in unread and has_external_references(p)}
        moving = {name for group in (*to_home, *to_tier) for name in self._parameters_of(group.index)}
        self.autograd_owned = (
            self.find_autograd_owned() | parameters_sharing_gradients(self.readable()) | held | (unread & moving)
        )
        for name in from_home:
            self._handed_out.pop(name, None)
        for group in (*to_home, *to_tier):
            for name, parameter in self._parameters_of(group.index).items():
                self._move(name, parameter)
        for group in to_tier:
            self.arena.free([name for name in self.arena.chunks if name.group == group.index])
        for name, parameter in parameters.items():
            if name in former and former[name]() is not parameter and self.is_managed(name):
                self._move(name, parameter)

    @torch.no_grad()
    def _move(self, name: str, parameter: nn.Parameter) -> None:
        """Move a parameter's values and gradient to its new memory. If a copy fails, those not moved are unchanged."""
        is_managed = self.is_managed(name)
        if is_managed:
            self.write(PARAM, name, parameter)
        self.bind(name, parameter)
        if name in self.autograd_owned or (gradient := gradient_of(parameter)) is None:
            return
        if is_managed:
            self.write(GRAD, name, gradient)
            self._hand_out(name, parameter)
        else:
            parameter.grad = self._on_tier(name, gradient)

    def replaced(self, names: Iterable[str]) -> list[str]:
        """Find managed parameters with data that is no longer the home view bound to them."""
        replaced = []
        for name in names:
            if self.is_managed(name):
                parameter = self.parameter(name)
                stride = self._slices[name][1].spec.stride
                if parameter.data_ptr() != self._addresses[name] or parameter.stride() != stride:
                    replaced.append(name)
        return replaced

    def has_external_views(self, name: str) -> bool:
        """Whether there are external views of the former home of a parameter with replaced data."""
        return not self._home_storages[name].expired()

    @torch.no_grad()
    def take_over(self, names: Iterable[str]) -> None:
        """Write parameters with replaced data home, and make them home views again.

        External views of a parameter's former home keep its bytes, and the chunk gets another home.

        Raises:
            StreamError, HomeError: an update or a copy of the home had failed, or there is no room for another home.
        """
        by_group: dict[int, list[str]] = {}
        for name in names:
            by_group.setdefault(self.group_index(name), []).append(name)
        for index, moved in by_group.items():
            changed = frozenset(moved)
            self.await_home(Chunk(PARAM, index))
            if any(self.has_external_views(name) for name in moved):
                self.arena.replace(Chunk(PARAM, index), self.layout.groups[index].nbytes(PARAM))
                moved = list(self._parameters_of(index))
            for name in moved:
                parameter = self.parameter(name)
                self.write(PARAM, name, parameter.data)
                self.bind(name, parameter)
                if name in changed and Chunk(MASTER_LOW, index) in self.arena:  # they are of the former values
                    self.home_view(MASTER_LOW, name).zero_()

    def close(self) -> None:
        """Free all slots and homes as they are, and end the threads behind their queued work."""
        self._slots.clear()
        self.drop_spare_slots()
        self.replicated.clear()
        self.updates.end_soon()
        self.tier.end_soon()
        self.arena.free(self.arena.chunks)

    # --- gradients ---

    def _has_data_at_home(self, chunk: Chunk) -> bool:
        kind, group = chunk.kind, chunk.group
        return kind != GRAD or self.collect_gradients(group)

    def _gradients_complete(self, chunk: Chunk, buffer: torch.Tensor) -> None:
        parameters = self._parameters_of(chunk.group)
        for name, parameter in parameters.items():
            if isinstance(parameter.grad, ConsumedGradient):  # an update was to consume it, and has not
                self._hand_out(name, parameter)
        parameters = parameters if self.sums.requesters else {}
        gradients = {name: p.grad for name, p in parameters.items()}
        own = {n: g for n, g in gradients.items() if g is not None and not self._is_foreign(n, g)}
        self.sums.take(self.layout.groups[chunk.group], buffer, own, self.tier)

    def _forget_lost_data(self, chunk: Chunk) -> None:
        """Reset gradients that never got home: a reader must find None rather than stale values."""
        for parameter in self._parameters_of(chunk.group).values() if chunk.kind == GRAD else ():
            parameter.grad = None

    def collect_gradients(self, index: int) -> bool:
        """Copy the group's gradients home that are not there; return whether the group has any gradient.

        A gradient that the user replaced by another tensor is copied home, and the home view replaces it, unless
        autograd must add to that tensor object (`autograd_owned`). External views of a gradient that is no longer a
        parameter's keep its bytes, and the group's gradients get another home.

        Raises:
            HomeError: there is no room for another home.
        """
        parameters = self._parameters_of(index)
        if any(self._is_viewed_former(name, parameter) for name, parameter in parameters.items()):
            self.autograd_owned |= self._move_gradients(index)
        has_gradients = False
        for name, parameter in parameters.items():
            grad = gradient_of(parameter)
            if grad is None:
                continue
            has_gradients = True
            if self._is_foreign(name, grad):
                self.updates.wait(index)
                left = name in self.autograd_owned
                home = self.home_view(GRAD, name) if left else self._hand_out(name, parameter)
                source = grad.clone() if grad.untyped_storage().data_ptr() == home.data_ptr() else grad
                self.tier.enqueue(home.copy_, source)
        return has_gradients

    def take_gradients_home(self) -> list[torch.Tensor]:
        """Collect the user's own gradients, and a hook's, unless they must stay where they are; frees their memory.

        Returns:
            The gradients that still do not lie at home, and take room on the compute tier.

        Raises:
            HomeError: see `collect_gradients`.
        """
        off_home = self._gradients_off_home()
        for index in sorted({self.group_index(name) for name in off_home.keys() - self.autograd_owned}):
            if Chunk(GRAD, index) in self.arena:
                self.collect_gradients(index)
        return list(self._gradients_off_home().values()) if off_home else []

    def has_gradients(self, index: int) -> bool:
        """Whether a parameter of a group has a gradient, or there are references to a former one."""
        handed_out = [self._handed_out.get(s.spec.name, NOT_HANDED_OUT) for s in self.layout.groups[index].slices]
        has_gradient = any(parameter.grad is not None for parameter in self._parameters_of(index).values())
        return has_gradient or not all(handed.is_gone() for handed in handed_out)

    @contextmanager
    def gradients_set_aside(self, names: Collection[str]) -> Iterator[int]:
        """Set aside the gradients of these parameters and of all others in their chunks, and restore them afterwards.

        Gradients made inside lie in memory of their own, which is freed with the last view of it.

        Yields:
            Bytes that the gradients put aside take on the compute tier.

        Raises:
            StreamError, HomeError: a copy failed.
        """
        groups = sorted(self.layout.groups_of(names))
        apart = {name: self.parameter(name) for name in names}
        for index in groups:
            apart |= self._parameters_of(index)
        chunks = {Chunk(GRAD, index): self.layout.groups[index].nbytes(GRAD) for index in groups}
        if not self.present.isdisjoint(chunks):
            self.release_slots()
        gradients = {name: parameter.grad for name, parameter in apart.items()}
        handed_out = {name: self._handed_out.pop(name) for name in apart if name in self._handed_out}
        left, aside = self.autograd_owned, self.arena.put_aside(chunks)
        on_tier = [g for n, p in apart.items() if not self.is_managed(n) and (g := gradient_of(p)) is not None]
        for parameter in apart.values():
            parameter.grad = None
        try:
            with self.sums.without_requests():
                yield sum(gradient.untyped_storage().nbytes() for gradient in on_tier)
        finally:
            try:
                self.release_slots()  # write-backs still under way go to the memory for gradients made inside
            finally:
                for name, parameter in apart.items():
                    self._handed_out.pop(name, None)
                    parameter.grad = gradients[name]
                self._handed_out |= handed_out
                self.arena.put_back(aside)
                self.autograd_owned |= left

    def _is_viewed_former(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether there are views of the home view handed out as the parameter's gradient, which is not `.grad` now."""
        handed = self._handed_out.get(name, NOT_HANDED_OUT)
        if handed.is_gone():
            return False
        grad = gradient_of(parameter)
        return grad is None or grad.untyped_storage().data_ptr() != handed.address

    def _move_gradients(self, index: int) -> set[str]:
        """Move a group's gradients to another home; external views of the former one keep its bytes.

        Returns:
            Parameters with a `.grad` that did not move, since there are external views of it.
        """
        chunk = Chunk(GRAD, index)
        self.await_home(chunk)
        self.arena.replace(chunk, self.layout.groups[index].nbytes(GRAD))
        left = set()
        for name, parameter in self._parameters_of(index).items():
            grad = gradient_of(parameter)
            is_foreign = self._is_foreign(name, grad)
            self._handed_out.pop(name, None)
            if grad is None or is_foreign:
                continue
            if has_external_views(grad):
                left.add(name)
            else:
                view = self.home_view(GRAD, name)
                view.copy_(grad)
                grad.data = view
                self._handed_out[name] = HandedOut.of(grad)
        return left

    def find_autograd_owned(self) -> frozenset[str]:
        """Find and note the parameters with a `.grad` that must stay the same tensor, so that autograd adds to it.

        Such a gradient is one tensor for several parameters, so that the order of additions is PyTorch's wherever the
        parameters are; or it is the user's own tensor, with references or views in user code. A home view that was
        handed out becomes one if it has external views when the chunk gets another home.

        Raises:
            HomeError: there is no room for another home.
            UnsupportedError: a gradient of a parameter at home cannot be copied there.
        """
        parameters = self.readable()
        unread = self.autograd_owned - parameters.keys()
        changed = {n: p for n, p in parameters.items() if self.is_managed(n) and self._is_foreign(n, gradient_of(p))}
        refuse_without_memory({name: gradient_of(p) for name, p in changed.items()})
        on_tier = [p for name, p in parameters.items() if not self.is_managed(name)]
        left = {name for name, parameter in changed.items() if has_external_references(parameter)}
        if any(gradient_of(parameter) is not None for parameter in changed.values()) or share_gradients(on_tier):
            left |= parameters_sharing_gradients(parameters)
        for index in {self.group_index(name) for name, p in changed.items() if self._is_viewed_former(name, p)}:
            left |= self._move_gradients(index)
        self.autograd_owned = frozenset(left | unread)
        return self.autograd_owned

    def readable(self) -> dict[str, nn.Parameter]:
        """Return the parameters with a `.grad` that this thread may read, by name."""
        others = self.trainers.trained_by_others()
        return {n: p for n, p in self.parameters().items() if n not in others} if others else self.parameters()

    def _gradients_off_home(self) -> dict[str, torch.Tensor]:
        """Find gradients of managed parameters that do not lie at home, such as a hook's results, by name."""
        off_home = {}
        for name, parameter in self.readable().items():
            grad, handed = gradient_of(parameter), self._handed_out.get(name, NOT_HANDED_OUT)
            if grad is None or not self.is_managed(name) or not self._is_foreign(name, grad):
                continue
            if grad.untyped_storage().data_ptr() != handed.address:
                off_home[name] = grad
        return off_home

    def _is_foreign(self, name: str, grad: torch.Tensor | None) -> bool:
        """Whether a parameter's `.grad` is not the home view that was handed out."""
        handed = self._handed_out.get(name, NOT_HANDED_OUT)
        return grad is None or grad is not handed.view() or grad.data_ptr() != handed.address

    def _hand_out(self, name: str, parameter: nn.Parameter) -> torch.Tensor:
        view = self.home_view(GRAD, name)
        parameter.grad = view
        self._handed_out[name] = HandedOut.of(view)
        return view

    def _scatter(self, chunk: Chunk, slot: Slot) -> Callable[[], None]:
        for name in slot.adds:
            if isinstance((parameter := self.parameter(name)).grad, LocalGradient):  # this backward has added nothing
                self._hand_out(name, parameter)
        return super()._scatter(chunk, slot)

    def check_not_consumed(self, group: int) -> None:
        """Refuse to add to gradients of a group that an update in a backward has consumed.

        Raises:
            UnsupportedError: it has consumed one; says what to do.
        """
        for name, parameter in self._parameters_of(group).items():
            if isinstance(parameter.grad, ConsumedGradient):
                raise consumed_error(name)

    def consume_gradients(self, group: int, gradients: Mapping[str, ConsumedGradient]) -> None:
        """Note that an update in the backward consumes a group's gradients in their slot: they are not written home.

        Args:
            gradients: their placeholders, by parameter.
        """
        self.slot(Chunk(GRAD, group)).dirty = False
        for name, gradient in gradients.items():
            self.parameter(name).grad = gradient
            self._handed_out.pop(name, None)

    def sink(self, name: str, chunk: Chunk | None, take: Callable[[], torch.Tensor], *, owned: bool) -> None:
        """Take a complete gradient: into the slot of `chunk`, or, for a resident, straight into `.grad`.

        As autograd's AccumulateGrad: the first gradient is stored, later ones are added. The host decides now which of
        the two; `take` returns the gradient when the computation has reached it. A parameter that was frozen since the
        forward gets none.

        Args:
            owned: no other value reads the gradient's storage, so a resident parameter may keep it without a copy.
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
        if self.layout.groups[chunk.group].is_gathered(chunk):
            hand_out = partial(self._hand_out, name, parameter)
            accumulate_into = note_replicated(name, parameter, slot.adds, hand_out, is_last=not self.is_kept(chunk))
            self.tier.enqueue(accumulate_into, target, take)
        elif parameter.grad is None:
            self.tier.enqueue(store_first, target, take)
            if self.arena.is_promised(Chunk(GRAD, chunk.group)):  # an update will consume it
                parameter.grad = ConsumedGradient(parameter, name)
            else:
                self._hand_out(name, parameter)
        else:
            self.tier.enqueue(add_later, target, take)
