"""Move gradients between a backward, their slots, home and `.grad`.

Between calls a parameter's `.grad` is in one of five states, and `.grad` itself says which:

- *none*: None.
- *at home*: the home view that was handed out last, the same tensor object at the same address.
- *foreign*: any other tensor, of user code or of a hook. It is copied home before a phase reads home (`collect`),
  unless autograd must add to this very tensor object (`autograd_owned`).
- *consumed*: a `ConsumedGradient`. An update in the backward reads it in its slot, and it does not get home.
- *local*: a `LocalGradient`. It stays in its replicated buffer, and ranks exchange it in a later backward.

In a backward `sink` adds to the slot, and makes *none* at home, consumed or local. `complete`, before the slot is
written home, makes consumed (its update did not begin) and local (ranks exchange it now) at home. User code may set
`.grad` at any time between calls; views of a former home view keep its bytes, and the chunk gets another home.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from chunkc.ir.layout import GRAD, Chunk
from chunkc.runtime.device.updates import HomeUpdates
from chunkc.runtime.storage.arena import Arena
from chunkc.runtime.store.consumed_gradients import (
    ConsumedGradient,
    LocalGradient,
    consumed_error,
    gradient_of,
    refuse_without_memory,
)
from chunkc.runtime.store.gradient_sums import GradientSums
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
from chunkc.runtime.store.slots import ChunkSlots, Slot
from chunkc.runtime.store.watched_gradients import unwatched


class Trainers:
    """Threads that ran backwards or steps of one session, by the parameters that took part.

    No other thread may read these parameters' `.grad`. `parameter.grad = None` is not atomic in PyTorch (it releases
    the interpreter's lock while it frees the gradient, and only then clears the reference), nor are the writes of a CPU
    backward. A thread that reads `.grad` meanwhile reads memory that is being freed. Several threads share a session,
    so each reads only the gradients that it trains itself.
    """

    def __init__(self) -> None:
        self._threads: dict[frozenset[str], int] = {}
        self._works_for: dict[int, int] = {}

    def claim(self, names: frozenset[str], thread: int | None = None) -> None:
        """Note that a thread, this one by default, trains these parameters from now on, and no other does.

        If `thread` is another one, this thread works for it until its next claim: on CUDA, backwards run in a thread of
        autograd's, while the calling thread waits.
        """
        here = threading.get_ident()
        self._works_for[here] = self._threads[names] = here if thread is None else thread

    def trained_by_others(self) -> frozenset[str]:
        """Return the parameters with a `.grad` that this thread must not read."""
        here = self._works_for.get(threading.get_ident(), threading.get_ident())
        others = [names for names, thread in self._threads.items() if thread != here]
        if not others:
            return frozenset()
        own = [names for names, thread in self._threads.items() if thread == here]
        return frozenset[str]().union(*others).difference(*own)


class Gradients:
    """Gradients of one model's parameters.

    Args:
        updates: at home, which a host that writes gradients there waits for.
        sums: of squares, computed of gradients that go home.
        trainers: which thread trains which parameters; no other thread reads their gradients.

    Attributes:
        autograd_owned: parameters with a `.grad` that must stay the same tensor object (see `find_autograd_owned`).
    """

    def __init__(
        self,
        views: ParameterViews,
        slots: ChunkSlots,
        arena: Arena,
        updates: HomeUpdates,
        sums: GradientSums,
        trainers: Trainers,
    ) -> None:
        self.autograd_owned: frozenset[str] = frozenset()
        self._views = views
        self._slots = slots
        self._arena = arena
        self._updates = updates
        self._sums = sums
        self._trainers = trainers
        self._handed_out: dict[str, HandedOut] = {}

    # --- in a backward ---

    def sink(self, name: str, chunk: Chunk | None, take: Callable[[], torch.Tensor], *, owned: bool) -> None:
        """Take a complete gradient: into the slot of `chunk`, or, for a resident, straight into `.grad`.

        As autograd's AccumulateGrad: the first gradient is stored, later ones are added. The host decides now which of
        the two; `take` returns the gradient when the computation has reached it. A parameter that was frozen since the
        forward gets none.

        Args:
            owned: no other value reads the gradient's storage, so a resident parameter may keep it without a copy.
        """
        parameter, tier = self._views.parameter(name), self._slots.tier
        if not parameter.requires_grad:
            tier.enqueue(take)
            return
        if chunk is None:
            tier.enqueue(accumulate, parameter, take, owned)
            return
        slot = self._slots.slot(chunk)
        target = self._views.slot_view(chunk, name)
        slot.dirty = True
        if self._views.layout.groups[chunk.group].is_gathered(chunk):
            hand_out = partial(self.hand_out, name, parameter)
            accumulate_into = note_replicated(name, parameter, slot.adds, hand_out, is_last=not self.is_kept(chunk))
            tier.enqueue(accumulate_into, target, take)
        elif parameter.grad is None:
            tier.enqueue(store_first, target, take)
            if self._arena.is_promised(Chunk(GRAD, chunk.group)):  # an update will consume it
                parameter.grad = ConsumedGradient(parameter, name)
            else:
                self.hand_out(name, parameter)
        else:
            tier.enqueue(add_later, target, take)

    def is_kept(self, chunk: Chunk) -> bool:
        """Whether a gradient stays in its replicated buffer, and is exchanged in a later backward."""
        transport = self._slots.transport
        if transport is None or not transport.accumulating:
            return False
        return self._views.layout.groups[chunk.group].replicated_numel(chunk) > 0

    @unwatched()
    def complete(self, chunk: Chunk, slot: Slot) -> None:
        """Note that a group's gradients are complete in their slot, and about to be written home."""
        group, parameters = self._views.layout.groups[chunk.group], self._views.of_group(chunk.group)
        for name, parameter in parameters.items():
            if isinstance(parameter.grad, ConsumedGradient):  # an update was to consume it, and has not
                self.hand_out(name, parameter)
        gradients = {name: p.grad for name, p in parameters.items()} if self._sums.requesters else {}
        own = {n: g for n, g in gradients.items() if g is not None and not self._is_foreign(n, g)}
        assert slot.buffer is not None
        self._sums.take(group, slot.buffer, own, self._slots.tier)
        for name in slot.adds if group.is_gathered(chunk) else ():
            if isinstance((parameter := self._views.parameter(name)).grad, LocalGradient):  # nothing was added to it
                self.hand_out(name, parameter)

    def check_not_consumed(self, group: int) -> None:
        """Refuse to add to gradients of a group that an update in a backward has consumed.

        Raises:
            UnsupportedError: it has consumed one; says what to do.
        """
        for name, parameter in self._views.of_group(group).items():
            if isinstance(parameter.grad, ConsumedGradient):
                raise consumed_error(name)

    def consume(self, group: int, gradients: Mapping[str, ConsumedGradient]) -> None:
        """Note that an update in the backward consumes a group's gradients in their slot: they are not written home.

        Args:
            gradients: their placeholders, by parameter.
        """
        self._slots.slot(Chunk(GRAD, group)).dirty = False
        for name, gradient in gradients.items():
            self._views.parameter(name).grad = gradient
            self._handed_out.pop(name, None)

    # --- home ---

    def hand_out(self, name: str, parameter: nn.Parameter) -> torch.Tensor:
        """Make a parameter's gradient its home view, and return it."""
        view = self._views.home_view(GRAD, name)
        parameter.grad = view
        self._handed_out[name] = HandedOut.of(view)
        return view

    @unwatched()
    def collect(self, index: int) -> bool:
        """Copy the group's gradients home that are not there; return whether the group has any gradient.

        A gradient that the user replaced by another tensor is copied home, and the home view replaces it, unless
        autograd must add to that tensor object (`autograd_owned`). External views of a gradient that is no longer a
        parameter's keep its bytes, and the group's gradients get another home.

        Raises:
            HomeError: there is no room for another home.
        """
        parameters = self._views.of_group(index)
        if any(self._is_viewed_former(name, parameter) for name, parameter in parameters.items()):
            self.autograd_owned |= self._move(index)
        has_gradients = False
        for name, parameter in parameters.items():
            grad = gradient_of(parameter)
            if grad is None:
                continue
            has_gradients = True
            if self._is_foreign(name, grad):
                self._updates.wait(index)
                is_left = name in self.autograd_owned
                home = self._views.home_view(GRAD, name) if is_left else self.hand_out(name, parameter)
                source = grad.clone() if grad.untyped_storage().data_ptr() == home.data_ptr() else grad
                self._slots.tier.enqueue(home.copy_, source)
        return has_gradients

    @unwatched()
    def take_home(self) -> list[torch.Tensor]:
        """Collect the user's own gradients, and a hook's, unless they must stay where they are; frees their memory.

        Returns:
            The gradients that still do not lie at home, and take room on the compute tier.

        Raises:
            HomeError: see `collect`.
        """
        off_home = self._off_home()
        for index in sorted({self._views.group_index(name) for name in off_home.keys() - self.autograd_owned}):
            if Chunk(GRAD, index) in self._arena:
                self.collect(index)
        return list(self._off_home().values()) if off_home else []

    def exist_in(self, index: int) -> bool:
        """Whether a parameter of a group has a gradient, or there are references to a former one."""
        slices = self._views.layout.groups[index].slices
        handed_out = [self._handed_out.get(s.spec.name, NOT_HANDED_OUT) for s in slices]
        has_gradient = any(parameter.grad is not None for parameter in self._views.of_group(index).values())
        return has_gradient or not all(handed.is_gone() for handed in handed_out)

    def forget_lost(self, index: int) -> None:
        """Reset gradients of a group that never got home: a reader must find None rather than stale values."""
        for parameter in self._views.of_group(index).values():
            parameter.grad = None

    def forget_home(self, name: str) -> None:
        """Note that a parameter's gradient, if any, is no longer the home view that was handed out."""
        self._handed_out.pop(name, None)

    @contextmanager
    def set_aside(self, parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
        """Inside, the parameters have no gradients; afterwards, they have their former ones."""
        gradients = {name: parameter.grad for name, parameter in parameters.items()}
        handed_out = {name: self._handed_out.pop(name) for name in parameters if name in self._handed_out}
        owned = self.autograd_owned
        for parameter in parameters.values():
            parameter.grad = None
        try:
            yield
        finally:
            for name, parameter in parameters.items():
                self._handed_out.pop(name, None)
                parameter.grad = gradients[name]
            self._handed_out |= handed_out
            self.autograd_owned |= owned

    # --- user code's own gradients ---

    @unwatched()
    def find_autograd_owned(self) -> frozenset[str]:
        """Find and note the parameters with a `.grad` that must stay the same tensor, so that autograd adds to it.

        There are two kinds: one tensor that is the gradient of several parameters, at home or on the compute tier,
        where additions must keep PyTorch's order; and the user's own tensor, with references or views in user code. A
        home view that was handed out becomes the user's own if it has external views when the chunk gets another home.

        Raises:
            HomeError: there is no room for another home.
            UnsupportedError: a gradient of a parameter at home cannot be copied there.
        """
        views, parameters = self._views, self.readable()
        unread = self.autograd_owned - parameters.keys()
        changed = {n: p for n, p in parameters.items() if views.is_managed(n) and self._is_foreign(n, gradient_of(p))}
        refuse_without_memory({name: gradient_of(p) for name, p in changed.items()})
        on_tier = [p for name, p in parameters.items() if not views.is_managed(name)]
        owned = {name for name, parameter in changed.items() if has_external_references(parameter)}
        if any(gradient_of(parameter) is not None for parameter in changed.values()) or share_gradients(on_tier):
            owned |= parameters_sharing_gradients(parameters)
        for index in {views.group_index(name) for name, p in changed.items() if self._is_viewed_former(name, p)}:
            owned |= self._move(index)
        self.autograd_owned = frozenset(owned | unread)
        return self.autograd_owned

    def readable(self) -> dict[str, nn.Parameter]:
        """Return the parameters with a `.grad` that this thread may read, by name."""
        parameters, others = self._views.parameters(), self._trainers.trained_by_others()
        return {n: p for n, p in parameters.items() if n not in others} if others else parameters

    def _move(self, index: int) -> set[str]:
        """Move a group's gradients to another home; external views of the former one keep its bytes.

        Returns:
            Parameters with a `.grad` that did not move, since there are external views of it.
        """
        chunk = Chunk(GRAD, index)
        self._slots.await_home(chunk)
        self._arena.replace(chunk, self._views.layout.groups[index].nbytes(GRAD))
        unmoved = set()
        for name, parameter in self._views.of_group(index).items():
            grad = gradient_of(parameter)
            is_foreign = self._is_foreign(name, grad)
            self._handed_out.pop(name, None)
            if grad is None or is_foreign:
                continue
            if has_external_views(grad):
                unmoved.add(name)
            else:
                view = self._views.home_view(GRAD, name)
                view.copy_(grad)
                grad.data = view
                self._handed_out[name] = HandedOut.of(grad)
        return unmoved

    def _off_home(self) -> dict[str, torch.Tensor]:
        """Find gradients of managed parameters that do not lie at home, such as a hook's results, by name."""
        off_home = {}
        for name, parameter in self.readable().items():
            grad, handed = gradient_of(parameter), self._handed_out.get(name, NOT_HANDED_OUT)
            if grad is None or not self._views.is_managed(name) or not self._is_foreign(name, grad):
                continue
            if grad.untyped_storage().data_ptr() != handed.address:
                off_home[name] = grad
        return off_home

    def _is_foreign(self, name: str, grad: torch.Tensor | None) -> bool:
        """Whether a parameter's `.grad` is not the home view that was handed out."""
        handed = self._handed_out.get(name, NOT_HANDED_OUT)
        return grad is None or grad is not handed.view() or grad.data_ptr() != handed.address

    def _is_viewed_former(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether there are views of the home view handed out as the parameter's gradient, which is not `.grad` now."""
        handed = self._handed_out.get(name, NOT_HANDED_OUT)
        if handed.is_gone():
            return False
        grad = gradient_of(parameter)
        return grad is None or grad.untyped_storage().data_ptr() != handed.address
