"""Store the chunks of a model: parameters and gradients as home views, and their moves between homes.

Between calls no chunk has a slot: parameters and gradients are home views, valid for any reader and writer.
During a call the executor moves chunks (see `runtime.store.slots`); computation reads slots only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from chunkc.ir.errors import ChunkcError, DistributedError, HomeError, StreamError
from chunkc.ir.layout import CASTS, GRAD, PARAM, Chunk, ChunkGroup, ChunkLayout
from chunkc.ir.states import MASTER_LOW
from chunkc.runtime.device.tier import Tier
from chunkc.runtime.device.updates import HomeUpdates
from chunkc.runtime.storage.arena import Arena
from chunkc.runtime.storage.maps import drop_pages
from chunkc.runtime.store.checksums import Checksums
from chunkc.runtime.store.consumed_gradients import gradient_of, refuse_without_memory
from chunkc.runtime.store.gradient_states import Gradients, Trainers
from chunkc.runtime.store.gradient_sums import GradientSums
from chunkc.runtime.store.gradients import (
    has_external_references,
    has_external_views,
    parameters_sharing_gradients,
)
from chunkc.runtime.store.parameter_views import ParameterViews, placed
from chunkc.runtime.store.replicated import Replicated
from chunkc.runtime.store.shadow_copies import ShadowCopies
from chunkc.runtime.store.slots import ChunkSlots, ChunkState, Copy, advance


class ChunkStore:
    """Owner of homes and slots of one model's chunks. References to parameters are weak: the user owns the model.

    Args:
        layout: groups of parameters; may be extended, never changed.
        debug: fill every slot with NaN when it is taken and when it is given back.

    Attributes:
        updates: of homes by CPU threads.
        checksums: of groups that are updated into their shadow copies.
        slots, views, gradients: see there. Each knows those before it in this list, and none knows the store.
        trainers: which thread trains which parameters; no other thread reads their gradients.
    """

    def __init__(self, layout: ChunkLayout, arena: Arena, tier: Tier, debug: bool = False) -> None:
        self.arena = arena
        self.tier = tier
        self.updates = HomeUpdates()
        self.shadow_copies = ShadowCopies(arena)
        self.checksums = Checksums(arena.home)
        self.replicated = Replicated()
        self.trainers = Trainers()
        self.sums = GradientSums(arena.home)
        self.slots = ChunkSlots(layout, arena, tier, self.updates, self.shadow_copies, self.replicated, debug=debug)
        self.views = ParameterViews(arena, self.slots)
        self.gradients = Gradients(self.views, self.slots, arena, self.updates, self.sums, self.trainers)

    @property
    def layout(self) -> ChunkLayout:
        return self.slots.layout

    @property
    def resident(self) -> frozenset[int]:
        """Groups that stay on the compute tier."""
        return self.views.resident

    # --- chunks in slots ---

    def prefetch(self, chunk: Chunk, link: str | None = None) -> None:
        """Take a slot and start to fill it. A gradient chunk without gradients has nothing to read.

        Args:
            link: for the copy; None: the one from the chunk's home.
        """
        if chunk.kind == GRAD:
            advance(chunk, self.slots.slot(chunk).state, ChunkState.PREFETCHING)  # refuses before gradients move
            self.slots.prefetch(chunk, link, has_data=self.gradients.collect(chunk.group))
        elif chunk.kind in CASTS and chunk.group in self.resident:
            self.slots.prefetch(chunk, link, read=partial(self._cast_residents, self.layout.groups[chunk.group]))
        else:
            self.slots.prefetch(chunk, link)

    def _cast_residents(self, group: ChunkGroup, buffer: torch.Tensor) -> Copy:
        """Make a job that fills a slot with casts of resident parameters."""
        pairs = [(self.views.parameter(s.spec.name).detach(), placed(buffer, s)) for s in group.slices]
        return self.slots.job_on_tier(_cast_all, pairs)

    def write_back(self, chunk: Chunk, link: str | None = None) -> None:
        """Start to copy a dirty slot home; nothing moves if it is clean.

        Args:
            link: for the copy; None: the one to the chunk's home.
        """
        if chunk.kind == GRAD and (slot := self.slots.slot(chunk)).dirty:
            if self.gradients.is_kept(chunk):
                slot.dirty = False  # it stays in its replicated buffer
            else:
                self.gradients.complete(chunk, slot)
        self.slots.write_back(chunk, link)

    def release_slots(self) -> None:
        """Free every slot after its copies; dirty slots (of an interrupted step) are written home first.

        Raises:
            StreamError, HomeError: a copy failed; all slots are freed all the same. Gradients that could not be written
                home are lost: their `.grad` is None.
        """
        slots = self.slots
        problem: ChunkcError | None = None
        for chunk in sorted(slots.present):
            slot = slots.slot(chunk)
            try:
                slots.wait(chunk)
                if slot.state is ChunkState.COMPUTE:
                    slot.state = advance(chunk, slot.state, ChunkState.HOLD)
                if slot.dirty:
                    self._refuse_exchange(chunk)
                    self.write_back(chunk)
                    slots.wait(chunk)
                slots.evict(chunk)
            except (StreamError, HomeError) as error:
                problem = problem or error
                dropped = slots.drop(chunk)
                if chunk.kind == GRAD and (dropped.dirty or dropped.state is ChunkState.EVICTING):
                    self.gradients.forget_lost(chunk.group)
        slots.drop_spare()
        if problem is not None:
            raise problem

    def _refuse_exchange(self, chunk: Chunk) -> None:
        """Refuse to write a sharded gradient home after an error: no other rank comes to the exchange."""
        if self.layout.groups[chunk.group].is_gathered(chunk):
            raise DistributedError(f"ranks had not exchanged chunk {chunk} before the error: its gradients are lost")

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
        self.views.resident = resident
        self.set_layout(layout)

    def set_layout(self, layout: ChunkLayout) -> None:
        """Take over a layout of the same groups and more; free the buffers of groups that are no longer replicated."""
        self.slots.layout = layout
        self.views.note_layout()
        self.replicated.keep(layout.replicated)

    def set_state_kinds(self, layout: ChunkLayout) -> None:
        """Take over a layout with other kinds of states; groups that differ may have no states at home yet."""
        for old, new in zip(self.layout.groups, layout.groups, strict=True):
            assert old.states == new.states or not self._states_at_home(old), "states are at home"
        self.set_layout(layout)

    def outdated(self, groups: Iterable[int]) -> list[int]:
        """Find groups with replicated parameters that differ from home; those in slots are in use and left out.

        Raises:
            StreamError, HomeError: an update or a copy of their home had failed.
        """
        outdated, present = [], self.slots.present
        for index in sorted(groups):
            group, chunk = self.layout.groups[index], Chunk(PARAM, index)
            if not group.replicated_numel(chunk) or chunk in present:
                continue
            if self.updates.before(index):  # under way: the gather waits for it, so the host need not
                outdated.append(index)
                continue
            self.slots.await_home(chunk)
            if self.replicated.is_outdated(group, self.slots.home_on_tier(chunk)):
                outdated.append(index)
        return outdated

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
        self.views.add(name, parameter)
        if self.views.is_managed(name):
            self.views.point_home(name, parameter)
        elif self.views.is_in_chunk(name):
            self.views.point(name, parameter, self._on_tier(name, parameter))

    def place(self, layout: ChunkLayout, parameters: Mapping[str, nn.Parameter], resident: frozenset[int]) -> None:
        """Extend the layout by new parameters and move every group home or to the compute tier, tensor by tensor.

        A parameter with the name of a former one, which is gone, replaces it. Each tensor's former memory is freed
        before the next one moves.

        Raises:
            HomeError, StreamError: as `reserve`. No parameter was moved.
            UnsupportedError: a gradient cannot be copied home. Nothing has changed.
        """
        views, gradients = self.views, self.gradients
        to_home, to_tier = self._moving(layout, resident)
        going_home = {s.spec.name for group in to_home for s in group.slices}
        present = gradients.readable() | dict(parameters) if going_home else {}
        refuse_without_memory({name: gradient_of(p) for name, p in present.items() if name in going_home})
        # No gradient may be kept in a variable here: `has_external_references` would count it as the user's.
        self.reserve(
            layout, resident, [n for n, p in present.items() if n in going_home and gradient_of(p) is not None]
        )
        replacing = [name for name, parameter in parameters.items() if views.add(name, parameter)]
        from_home = {name: p for group in to_tier for name, p in views.of_group(group.index).items()}
        unread = self.trainers.trained_by_others()
        referenced = {name for name, p in from_home.items() if name not in unread and has_external_references(p)}
        moving = {name for group in (*to_home, *to_tier) for name in views.of_group(group.index)}
        gradients.autograd_owned = (
            gradients.find_autograd_owned()
            | parameters_sharing_gradients(gradients.readable())
            | referenced
            | (unread & moving)
        )
        for name in from_home:
            gradients.forget_home(name)
        for group in (*to_home, *to_tier):
            for name, parameter in views.of_group(group.index).items():
                self._move(name, parameter)
        for group in to_tier:
            self.arena.free([name for name in self.arena.chunks if name.group == group.index])
        for name in replacing:
            if views.is_managed(name):
                self._move(name, parameters[name])

    @torch.no_grad()
    def _move(self, name: str, parameter: nn.Parameter) -> None:
        """Move a parameter's values and gradient to its new memory. If a copy fails, those not moved are unchanged."""
        is_managed = self.views.is_managed(name)
        if is_managed:
            self.write(PARAM, name, parameter)
        self.bind(name, parameter)
        if name in self.gradients.autograd_owned or (gradient := gradient_of(parameter)) is None:
            return
        if is_managed:
            self.write(GRAD, name, gradient)
            self.gradients.hand_out(name, parameter)
        else:
            parameter.grad = self._on_tier(name, gradient)

    def _on_tier(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Copy a parameter's (or its gradient's) values to the compute tier."""
        shape, stride = self.views.extent(PARAM, name)
        return torch.empty_strided(shape, stride, dtype=values.dtype, device=self.tier.device).copy_(values)

    @torch.no_grad()
    def write(self, kind: str, name: str, values: torch.Tensor) -> None:
        """Write a parameter's values (or its gradient's, or a state's) home, where memory must be reserved.

        The host copies CPU tensors itself, past the device. On a disk, pages touched by this leave the RAM.
        """
        if values.device.type != "cpu":
            self.views.home_view(kind, name).copy_(values)
            return
        self.slots.await_home(Chunk(kind, self.views.group_index(name)))
        target = self.views.host_view(kind, name)
        target.copy_(values)
        drop_pages(target)

    def replaced(self, names: Iterable[str]) -> list[str]:
        """Find managed parameters with data that is no longer the home view bound to them."""
        return [name for name in names if self.views.is_managed(name) and self.views.is_replaced(name)]

    @torch.no_grad()
    def take_over(self, names: Iterable[str]) -> None:
        """Write parameters with replaced data home, and make them home views again.

        External views of a parameter's former home keep its bytes, and the chunk gets another home.

        Raises:
            StreamError, HomeError: an update or a copy of the home had failed, or there is no room for another home.
        """
        views = self.views
        by_group: dict[int, list[str]] = {}
        for name in names:
            by_group.setdefault(views.group_index(name), []).append(name)
        for index, moved in by_group.items():
            changed = frozenset(moved)
            self.slots.await_home(Chunk(PARAM, index))
            if any(views.has_external_views(name) for name in moved):
                self.arena.replace(Chunk(PARAM, index), self.layout.groups[index].nbytes(PARAM))
                moved = list(views.of_group(index))
            for name in moved:
                parameter = views.parameter(name)
                self.write(PARAM, name, parameter.data)
                self.bind(name, parameter)
                if name in changed and Chunk(MASTER_LOW, index) in self.arena:  # they are of the former values
                    views.home_view(MASTER_LOW, name).zero_()

    def close(self) -> None:
        """Free all slots and homes as they are, and end the threads behind their queued work."""
        self.slots.drop_all()
        self.replicated.clear()
        self.updates.end_soon()
        self.tier.end_soon()
        self.arena.free(self.arena.chunks)

    # --- states and gradients at home ---

    def reserve_states(self, group: int) -> None:
        """Reserve zeroed home memory for the optimizer states of a group, and of all other groups at the same time.

        Raises:
            HomeError: the home tier has no room.
        """
        own = self.layout.groups[group]
        if len(self._states_at_home(own)) == len(own.state_kinds):
            return
        groups = [g for g in self.layout.trainable_groups if g.index not in self.resident]
        wanted = {Chunk(kind, g.index): g.nbytes(kind) for g in groups for kind in g.update_kinds}
        self.arena.reserve({chunk: nbytes for chunk, nbytes in wanted.items() if chunk not in self.arena})

    def release_states(self, group: int) -> None:
        """Free a group's states at home, except for external views; new states need `reserve_states`."""
        self.arena.free(self._states_at_home(self.layout.groups[group]))

    def _states_at_home(self, group: ChunkGroup) -> list[Chunk]:
        """Return the chunks of a group's states that have memory at home."""
        return [chunk for kind in group.state_kinds if (chunk := Chunk(kind, group.index)) in self.arena]

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
        parameters, written = self.views.of_group(group), self.shadow_copies.written(group)
        views = {
            (kind, name): parameters[name] if kind == PARAM else states[name][kind]
            for name in parameters
            for kind in written
            if kind == PARAM or kind in states[name]
        }
        viewed = {kind for (kind, _), view in views.items() if has_external_views(view)}
        if viewed:
            self.updates.wait(group)
            for mark in self.slots.home_marks(group):
                mark.wait()
        self.shadow_copies.commit(self.layout, group, copied=viewed)
        for (kind, name), view in views.items():
            if kind in viewed:
                continue
            if kind == PARAM:
                self.views.point_home(name, parameters[name])
            else:
                view.data = self.views.home_view(kind, name)

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
        apart = {name: self.views.parameter(name) for name in names}
        for index in groups:
            apart |= self.views.of_group(index)
        chunks = {Chunk(GRAD, index): self.layout.groups[index].nbytes(GRAD) for index in groups}
        if not self.slots.present.isdisjoint(chunks):
            self.release_slots()
        on_tier = [gradient_of(p) for name, p in apart.items() if not self.views.is_managed(name)]
        nbytes = sum(gradient.untyped_storage().nbytes() for gradient in on_tier if gradient is not None)
        aside = self.arena.put_aside(chunks)
        try:
            with self.gradients.set_aside(apart):
                try:
                    with self.sums.without_requests():
                        yield nbytes
                finally:
                    self.release_slots()  # write-backs still under way go to the memory for gradients made inside
        finally:
            self.arena.put_back(aside)


def _cast_all(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Cast the first tensor of each pair into the second."""
    for source, destination in pairs:
        destination.copy_(source)
