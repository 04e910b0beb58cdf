"""Schedule an optimizer's updates at home, in the backward before `step()`, and during the forward after it.

In the backward, a chunk group is updated as soon as its gradients are complete:
- in slots: the update is part of the backward's plan, so eligibility is decided before the backward runs;
- resident: likewise, but nothing moves: the same kernels run earlier than in `step()`;
- at home, by a thread of the CPU: the update begins when the group's gradients are complete at home. `step()` waits
  for it, or with overlap="both" the next forward.

What a user may change between `backward()` and `step()` is noted when an update begins, and compared by `step()`. An
update in slots or of a resident group consumes the gradients, and counts the steps, when it begins.

With `undoable=True`, and with overlap="auto" where it updates in the backward (see `update_mode.resolved`), updates are
staged: they write to shadow copies (see `chunkc.runtime.store.shadow_copies`), and the gradients are written back, too.
`step()` commits them if no gradient, parameter or hyperparameter was changed since, no gradient overflowed and the norm
asks for no clipping. Otherwise it rolls them back and updates the group as if the backward had not; the next backward
does not try. So the bits are always those of overlap="none". (SuperOffload, arXiv:2509.21271, speculates and validates
like this, and computes backwards to undo, which is not exact.) With "auto", after a step that had to undo updates for
another reason, such as a second backward or a changed gradient, the next steps do not try either (see `pauses`).

Updates at home run on one thread of the CPU, whether a backward or `step()` begins them. `step()` waits for them; with
overlap="forward" or "both" they go on after it, and the next forward waits for each group when it fetches it.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from chunkc.ir.errors import HomeError, OptionsError, StreamError, UnsupportedError
from chunkc.ir.layout import GRAD, PARAM, ChunkGroup
from chunkc.ir.plan import Tile
from chunkc.kernels.formats import NO_SCALE, GradScale
from chunkc.machines.host import compute_tier_memory
from chunkc.optim.eligibility import BoundToSession, Eligibility
from chunkc.optim.grad_scale import is_skipped, on_the_cpu
from chunkc.optim.group_updates import (
    home_update,
    make_states,
    slot_update,
    spans_of,
    update_in_place,
    update_tile,
)
from chunkc.optim.pauses import Pauses
from chunkc.optim.stepping import SteppingOptimizer
from chunkc.optim.unseen_writes import has_other_readers, note_slots, noted_states, noting_home, written_groups
from chunkc.optim.update_mode import AUTO, UpdateMode, resolved
from chunkc.optim.update_task import NotedParameter, Task, UpdateTask, Where
from chunkc.policy.host_memory import with_room_for_copies
from chunkc.policy.state import PhaseContext
from chunkc.runtime.device.tier import Mark
from chunkc.runtime.device.updates import HomeUpdate, finish_all
from chunkc.runtime.store.consumed_gradients import ConsumedGradient
from chunkc.runtime.store.watched_gradients import unwatched, watch
from chunkc.session.pending_readers import await_readers
from chunkc.session.session import Session, sessions_of

_CPU = torch.device("cpu")

logger = logging.getLogger(__name__)

_UNDONE = (
    "step() has undone what the backward had updated, since gradients, parameters, states or hyperparameters were "
    "changed in between, or may have been. The bits are the same, but such steps are slower. Clip with the optimizer's "
    "own clip_grad_norm_, scale with chunkc.GradScaler, run all but the last backward of a step inside `with "
    "optimizer.accumulating():`, and ask for optimizer.state after step()"
)

_CHANGED_LATE = (
    'after its update had begun: overlap="backward" is for gradients that one compiled backward makes and nothing '
    'changes (no clipping, no unscaling, no use of the parameter outside compiled code); use overlap="forward"'
)


class SessionUpdates(BoundToSession):
    """The updates of one optimizer in one session, outside of `step()` or at home (a `session.protocols.Starter`).

    The optimizer owns it, and the session calls it.

    Attributes:
        begun: updates that a backward has begun, by chunk group, until the optimizer's step.
        states_were_read: whether the user has asked for the optimizer's states since updates began.
    """

    def __init__(self, optimizer: SteppingOptimizer, session: Session) -> None:
        super().__init__(optimizer, session)
        self._eligibility = Eligibility(optimizer, session)
        self._hooked: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.begun: dict[int, UpdateTask] = {}
        self._to_wait_for = set[int]()  # groups with updates at home that have begun since the last wait for them
        self.states_were_read = False
        self._mode: tuple[object, UpdateMode] | None = None  # with the version of the layout that it is for
        self._without_room = set[int]()  # groups that found no room for shadow copies
        self._has_no_room = self._has_shadow_copies = False
        self._pauses = Pauses()
        self._has_told = False

    @property
    def mode(self) -> UpdateMode:
        """Mode of the updates in this session (see `update_mode.resolved`); it does not change while any have begun."""
        session, layout = self.session, self.session.store.layout
        if self._mode is None or (self._mode[0] != layout.version and not self.begun):
            optimizer = self.optimizer
            mode = resolved(
                optimizer.overlap,
                layout,
                session.hardware,
                num_stages=optimizer.rule.num_stages,
                over_ranks=session.transport is not None,
            )
            self._mode, self._without_room = (layout.version, mode), set()
        return self._mode[1]

    @property
    def in_backward(self) -> bool:
        """Whether backwards of this session may begin updates."""
        return self.mode.in_backward and not self._has_no_room

    @property
    def stages(self) -> bool:
        """Whether backwards may begin updates that can be undone: there are shadow copies for these."""
        return self.in_backward and self._has_shadow_copies

    @property
    def _may_try(self) -> bool:
        """Whether the next backward may begin updates, as far as that does not depend on the group."""
        return self.in_backward and (self.optimizer.overlap.mode != AUTO or self._pauses.may_try)

    def _reserve_shadow_copies(self, groups: Sequence[int]) -> None:
        """Allocate shadow copies of these groups, as far as the mode has any, if their updates can be undone.

        With overlap="auto" they take at most half of the memory that is free, and of the disk.

        Raises:
            HomeError: the host has no room, and the user asked for `undoable=True`.
        """
        store = self.session.store
        if not (self.in_backward and self.mode.undoable):
            return
        groups = sorted(self.mode.shadow_copied(store.layout, store.resident).intersection(groups))
        groups = self._with_room(groups) if self.optimizer.overlap.mode == AUTO else groups
        try:
            store.shadow_copies.reserve(store.layout, groups)
            store.checksums.reserve(store.layout.groups[index] for index in groups)
            self._has_shadow_copies |= bool(groups)
        except HomeError as error:
            if self.optimizer.overlap.mode != AUTO:
                raise
            self._has_no_room = True
            logger.info("no update runs in the backward: home has no room for parameters and states twice: %s", error)

    def _with_room(self, groups: Sequence[int]) -> list[int]:
        """Leave out groups with shadow copies yet to come that half of what is free has no room for, for good."""
        store = self.session.store
        has, layout = store.shadow_copies.has, store.layout
        new = [index for index in groups if index not in self._without_room and not has(layout, index)]
        if new:
            (_, memory_nbytes), disk_nbytes = compute_tier_memory(), store.arena.disk_free_nbytes
            disk_room = math.inf if disk_nbytes is None else disk_nbytes / 2
            if without := set(new) - with_room_for_copies(layout, new, memory_nbytes / 2, disk_room):
                self._without_room |= without
                logger.info(
                    "step() updates %d of %d chunks that the backward could update: half of what is free in the host's "
                    "memory, or on its disk, has no room for their parameters and states twice",
                    len(without),
                    len(groups),
                )
        return [index for index in groups if index not in self._without_room]

    # --- which groups may be updated in the backward ---

    def forget(self, *, loaded: bool) -> None:
        """Forget groups, since parameter groups or states have changed; undo staged updates.

        Updates at home begin again after the next step.

        Args:
            loaded: abandon other updates that have begun, since other states were loaded.
        """
        if loaded:
            self.abandon()
        else:
            self.take_back()
        self._eligibility.forget()

    def prepare(self, groups: Sequence[int], at_home: frozenset[int]) -> None:
        """Let updates of these groups begin in the next backward, if any may, those of `at_home` at home.

        States are ready, and shadow copies are from now on.

        Raises:
            HomeError: the host has no room for shadow copies, and the user asked for `undoable=True`.
        """
        self._reserve_shadow_copies(groups)
        if self.in_backward and self._eligibility.prepare(frozenset(groups), at_home):
            self.session.in_backward.join(self)

    def expected(self, groups: Sequence[ChunkGroup]) -> PhaseContext:
        """Return the context of calls of graphs with these groups, all this optimizer's, once states exist."""
        session, num_stages = self.session, self.optimizer.rule.num_stages
        return self.mode.expected(groups, session.hardware, home=session.options.home, num_stages=num_stages)

    def stages_in_slots(self, group: int) -> int:
        """Return the stages of a group's update if the next backward may run it, in slots or resident, else 0."""
        if not self._may_try:
            return 0
        where = Where.RESIDENT if group in self.session.store.resident else Where.SLOTS
        return self.optimizer.rule.num_stages if self._eligibility.tasks(group, where) else 0

    # --- updates in slots, and of resident groups ---

    def updating(self, group: int, tiles: Sequence[Tile]) -> Callable[[Tile], None]:
        """Prepare a group for its update in the backward that is about to run.

        Its parameters have no readers left, its states exist, and masters are of what parameters contain.

        Returns:
            The function that updates one of its tiles, once its gradients are complete; the first begins the update.
        """
        optimizer, session = self.optimizer, self.session
        tasks = self._eligibility.of_group(group)
        await_readers(task.parameter for task in tasks)
        if group not in session.store.resident:
            session.store.updates.wait(group)
            names = [task.name for task in tasks]
            if not session.keepers.has(optimizer, names):
                session.store.reserve_states(group)
                session.keepers.keep(optimizer, group, names)
                with torch.no_grad():
                    make_states(optimizer, session, group, tasks)
        for task in tasks:
            optimizer.contents.follow(task.parameter, optimizer.kept_states_of(task.parameter))
        update = self._update_resident if group in session.store.resident else self._update_in_slots
        return lambda tile: update(tile, tiles)

    def _update_in_slots(self, tile: Tile, tiles: Sequence[Tile]) -> None:
        update = self.begun.get(tile.group) or self._begin_in_slots(tile.group, tiles)
        assert update.in_slots is not None
        update_tile(self.session.store, update.in_slots, tile, whole=(PARAM, GRAD))
        update.tiles.remove(tile)

    def _begin_in_slots(self, index: int, tiles: Sequence[Tile]) -> UpdateTask:
        optimizer, session, store = self.optimizer, self.session, self.session.store
        update = UpdateTask.of(session, index, self._eligibility.of_group(index), Where.SLOTS, is_staged=self.undoable)
        update.spans = spans_of(optimizer, session, update)
        scale = optimizer.assumed_scale.on(store.tier.device) if update.is_staged else NO_SCALE
        update.in_slots, update.tiles = slot_update(optimizer, store, update, tiles, scale), set(tiles)
        if update.is_staged:
            note_slots(store, index)
            store.shadow_copies.begin(index)
            update.noted = [self._note(task) for task in update.tasks]
            self.begun[index] = update
            return update
        stand_ins = {task.name: ConsumedGradient(task.parameter, task.name) for task in update.tasks}
        update.noted = [self._note(task, stand_ins[task.name]) for task in update.tasks]
        self.begun[index] = update  # before the update begins: it may be interrupted
        store.gradients.consume(index, stand_ins)
        return update

    def _update_resident(self, tile: Tile, tiles: Sequence[Tile]) -> None:
        """Enqueue the update of a resident group behind what has computed its gradients, which it gives back."""
        update = UpdateTask.of(self.session, tile.group, self._eligibility.of_group(tile.group), Where.RESIDENT)
        update.tiles = set(tiles)
        self.begun[tile.group] = update  # before the update begins: it may be interrupted
        optimizer, note, numbers = self.optimizer, self._note, self._eligibility.numbers

        def run() -> None:
            update_in_place(optimizer, update.tasks, NO_SCALE, numbers)
            noted = []
            for task in update.tasks:
                task.parameter.grad = stand_in = ConsumedGradient(task.parameter, task.name)
                noted.append(note(task, stand_in))
            update.noted = noted
            update.tiles.clear()

        self.session.store.tier.enqueue(run)

    # --- updates at home ---

    def begin_update(self, group: int) -> None:
        """Begin the update at home of a group with complete gradients, if it is this optimizer's."""
        optimizer, session, store = self.optimizer, self.session, self.session.store
        if not self._may_try or not (tasks := self._eligibility.tasks(group, Where.HOME)):
            return
        update = UpdateTask.of(session, group, tasks, Where.HOME, is_staged=self.undoable)
        await_readers(task.parameter for task in tasks)
        store.updates.wait(group)
        with torch.no_grad():
            if update.is_staged:
                for task in tasks:
                    optimizer.contents.follow(task.parameter, optimizer.states_of(task.parameter))
            update.spans = spans_of(optimizer, session, update)
        if update.is_staged:
            store.shadow_copies.begin(group)
        update.noted = [self._note(task) for task in tasks]
        self.begun[group] = update  # before it begins: it may be interrupted
        self._begin_at_home([update], optimizer.assumed_scale.on(_CPU), store.slots.home_marks(group))

    def update_at_home(self, updates: Sequence[UpdateTask], scale: GradScale, after: Sequence[Mark]) -> None:
        """Begin a step's updates at home; if they may go on after it, those first that the next forward needs soonest.

        Waits for a loss scale: whether anything changes is known only when all gradients are.
        """
        if is_skipped(scale := on_the_cpu(scale)):
            return
        if self.optimizer.overlap.in_forward:
            by_group = {update.group: update for update in updates}
            updates = [by_group[index] for index in self.session.store.updates.in_order_of_use(list(by_group))]
        self._begin_at_home(updates, scale, after)

    def _begin_at_home(self, updates: Sequence[UpdateTask], scale: GradScale, after: Sequence[Mark]) -> None:
        """Begin updates on the CPU's thread, in this order, once `after` has happened; none before all are ready."""
        session = self.session
        for update in updates:
            job = home_update(self.optimizer, session, update, scale)
            job = noting_home(session, update.group, job) if update.is_staged else job
            update.at_home = HomeUpdate(job, update.label, after)
        self._watch_modules()
        for update in updates:
            assert update.at_home is not None
            self._to_wait_for.add(update.group)  # before it begins: it may be interrupted
            session.store.updates.begin(update.group, update.at_home)

    def wait_after_step(self, updates: Sequence[UpdateTask]) -> None:
        """Wait for this optimizer's updates at home, the step's and the backward's, that may not go on after the step.

        These are all, or the step's of groups that uncompiled code reads.

        Raises:
            StreamError: an update failed.
        """
        session, running = self.session, self.session.store.updates
        if not self.optimizer.overlap.in_forward:
            running.finish(self._to_wait_for)
            self._to_wait_for.clear()  # not if interrupted
            return
        for update in updates:
            names = {s.spec.name for s in session.store.layout.groups[update.group].slices}
            if not names <= session.trained:
                running.wait(update.group)

    def _watch_modules(self) -> None:
        """Make the `state_dict` of the session's models wait for updates that go on after `step()`."""
        models = self.session.modules - self._hooked if self.optimizer.overlap.in_forward else ()
        for model in models:
            for module in model.modules():  # `state_dict()` of each module with parameters of its own waits, too
                has_parameters = any(True for _ in module.parameters(recurse=False))
                if (module is model or has_parameters) and module not in self._hooked:
                    self._hooked.add(module)
                    module.register_state_dict_pre_hook(_finish_updates)

    # --- what becomes of begun updates ---

    @property
    def undoable(self) -> bool:
        """Whether updates leave gradients as they are, and can be undone."""
        return self.mode.undoable

    def has_begun(self, index: int) -> bool:
        """Whether a noted update of a group has begun: it may have been interrupted before."""
        update = self.begun[index]
        if update.where is not Where.HOME:
            return True
        return update.at_home is not None and self.session.store.updates.has(index, update.at_home)

    def take_back(self, groups: Collection[int] | None = None, *, by_program: bool = True) -> None:
        """Undo the updates of these groups (None: of all) that have begun, if they can be undone.

        Args:
            by_program: whether what the program does between backward and step is why, and not the gradients' scale.

        Raises:
            StreamError: one at home had failed.
        """
        store = self.session.store
        for index in list(self.begun) if self.undoable else ():
            if groups is None or index in groups:
                self._pauses.has_undone |= by_program
                store.updates.wait(index)
                store.shadow_copies.roll_back(index)
                del self.begun[index]

    @unwatched()
    def validate(self, is_as_assumed: bool) -> None:
        """Undo the staged updates that would differ now: all, unless the scale of gradients is as was assumed."""
        self._eligibility.follow()
        unchanged = [index for index in self.begun if is_as_assumed and self._stands(index)]
        self.take_back([index for index in self.begun if index not in unchanged], by_program=is_as_assumed)
        self.take_back(written_groups(self.session, {index: self.begun[index] for index in unchanged}))
        if self._pauses.has_undone and not self._has_told:
            self._has_told = True
            logger.info(_UNDONE)

    def _stands(self, index: int) -> bool:
        """Whether nothing has changed since a staged update of a group began, and the update is complete."""
        update, store = self.begun[index], self.session.store
        tasks = {id(task.parameter): task for task in self._eligibility.of_group(index)}
        with_gradients = {key for key, task in tasks.items() if task.parameter.grad is not None}
        if index in store.resident or with_gradients != {id(noted.task.parameter) for noted in update.noted}:
            return False
        try:
            for noted in update.noted:
                # An update in slots does not read home, so checksums tell whether a counted write changed a bit. One at
                # home may have read between two writes, the second of which took the first one back.
                counts = update.where is not Where.SLOTS
                self._check_unchanged(noted, tasks[id(noted.task.parameter)], writes_count=counts)
            update.check_complete()
        except (UnsupportedError, OptionsError, StreamError):
            return False
        if not self.has_begun(index) or store.replaced([task.name for task in tasks.values()]):
            return False
        are_home = all(store.views.is_home_view(noted.gradient, GRAD, noted.task.name) for noted in update.noted)
        return are_home and self._states_stand(update)

    def _states_stand(self, update: UpdateTask) -> bool:
        """Whether the states of a staged update are unchanged, and no other code could change them unseen."""
        optimizer = self.optimizer
        return (
            not self.states_were_read
            and all(noted.states == noted_states(optimizer.states_of(noted.task.parameter)) for noted in update.noted)
            and all(self._eligibility.has_states(noted.task) for noted in update.noted)
            and not has_other_readers(optimizer, [noted.task.parameter for noted in update.noted])
        )

    def commit(self) -> None:
        """Make staged updates count: shadow copies become home. Leaves all that has begun to the optimizer's step."""
        optimizer, store = self.optimizer, self.session.store
        for index, update in self.begun.items() if self.undoable else ():
            for parameter, *_ in update.tasks:
                state = optimizer.states_of(parameter)
                optimizer.begin_update_of(parameter, state)
                state["step"].fill_(int(state["step"]) + 1)
            tasks = self._eligibility.of_group(index)
            store.commit_shadow_copies(index, {task.name: optimizer.kept_states_of(task.parameter) for task in tasks})
        self._end_step()

    def abandon(self) -> None:
        """Forget updates that have begun, since no step will end them; undo those that can be undone.

        Gradients of the others count as consumed, wherever they are: no later step may apply them a second time, and no
        backward add to them.
        """
        self.take_back()
        for index, update in self.begun.items():
            if self.has_begun(index):
                for task in update.tasks:
                    if task.parameter.grad is not None:
                        task.parameter.grad = ConsumedGradient(task.parameter, task.name)
            else:
                self._take_counts_back(update)
        self._end_step()

    def _take_counts_back(self, update: UpdateTask) -> None:
        """Take back the steps that were counted for an update that was interrupted before it began."""
        for task in update.tasks:
            self.optimizer.states_of(task.parameter)["step"].sub_(1)

    def _end_step(self) -> None:
        """Forget what has begun, so that the next updates may begin."""
        self.begun.clear()
        self.states_were_read = False
        self._pauses.end_step()
        self.session.in_backward.stepped(self)

    def collect(self, by_group: dict[int, list[Task]], in_place: dict[int, Task]) -> None:
        """Take the groups with updates that have begun out of what a step is to update.

        Args:
            in_place: parameters outside of chunks, by id.

        Raises:
            OptionsError, UnsupportedError, StreamError: see `UpdateScheduler.collect`.
        """
        for index, update in list(self.begun.items()):
            if self.undoable:  # `validate` has undone all others
                del by_group[index]
                continue
            if not self.has_begun(index):
                self._take_counts_back(update)
                del self.begun[index]
                continue
            tasks = {id(task.parameter): task for task in by_group.pop(index, ())}
            for noted in update.noted:
                key = id(noted.task.parameter)
                self._check_unchanged(noted, in_place.pop(key, None) or tasks.get(key))
                tasks.pop(key, None)
            for task in tasks.values():
                raise UnsupportedError(f"{task.name} got its gradient {_CHANGED_LATE}")
            update.check_complete()

    def _note(self, task: Task, gradient: torch.Tensor | None = None) -> NotedParameter:
        """Note a parameter as its update begins, with its gradient, watched if staged, or that gradient's stand-in."""
        gradient = task.parameter.grad if gradient is None else gradient
        assert gradient is not None
        states = noted_states(self.optimizer.states_of(task.parameter)) if self.undoable else ()
        parameter, hyper = task.parameter, self._hyper(task)
        noted = NotedParameter(
            task, gradient, gradient._version, parameter._version, parameter.data_ptr(), hyper, states
        )
        if self.undoable:
            watch(gradient)
        return noted

    def _hyper(self, task: Task) -> Any:
        """Return the hyperparameters of a parameter's update in the backward; a staged one counts no step yet."""
        num_steps = int(self.optimizer.states_of(task.parameter)["step"])
        return self.optimizer.hyper_at(task.group, num_steps + self.undoable)

    def _check_unchanged(self, noted: NotedParameter, task: Task | None, *, writes_count: bool = True) -> None:
        parameter, name, _ = noted.task
        gradient = parameter.grad
        was_written = gradient is not None and gradient._version != noted.gradient_version
        if task is None or gradient is not noted.gradient or (writes_count and was_written):
            raise UnsupportedError(f"the gradient of {name} was changed {_CHANGED_LATE}")
        if parameter._version != noted.parameter_version or parameter.data_ptr() != noted.data_ptr:
            raise UnsupportedError(f"the parameter {name} was changed {_CHANGED_LATE}")
        if self._hyper(task) != noted.hyper:
            raise OptionsError(
                f"the hyper-parameters of {name} were changed between backward() and step(), after its update had "
                'begun; change them after step(), or use overlap="forward"'
            )


class UpdateScheduler:
    """The updates of one optimizer, outside of its step or at home, in each session that has parameters of it."""

    def __init__(self, optimizer: SteppingOptimizer) -> None:
        self._reference = weakref.ref(optimizer)
        self._sessions: weakref.WeakKeyDictionary[Session, SessionUpdates] = weakref.WeakKeyDictionary()

    @property
    def optimizer(self) -> SteppingOptimizer:
        optimizer = self._reference()
        assert optimizer is not None
        return optimizer

    def in_session(self, session: Session) -> SessionUpdates:
        """Return the optimizer's updates in a session."""
        if session not in self._sessions:
            self._sessions[session] = SessionUpdates(self.optimizer, session)
        return self._sessions[session]

    def __iter__(self) -> Iterator[SessionUpdates]:
        """Iterate over the updates in all sessions so far, which stay alive meanwhile."""
        for _, updates in list(self._sessions.items()):
            yield updates

    @property
    def stages(self) -> bool:
        """Whether backwards of any session may begin updates that can be undone."""
        return any(updates.stages for updates in self)

    # --- from the backward to the step ---

    def validate(self, scale: GradScale) -> None:
        """Undo staged updates that would differ, now that a step's scale of gradients is known.

        Raises:
            UnsupportedError: gradients have a scale, and updates cannot be undone.
        """
        mode = self.optimizer.overlap
        if mode.is_final and scale is not NO_SCALE:
            has_begun = any(updates.begun for updates in self)
            raise UnsupportedError(
                "a GradScaler must see all gradients before the first update, but "
                f'overlap="{mode.mode}" updates during the backward; use undoable=True with it, or overlap="forward"'
                + (", and load parameters that this backward has updated anew" if has_begun else "")
            )
        if self.stages:
            is_as_assumed = self.optimizer.assumed_scale.is_what_was(scale)
            for updates in self:
                updates.validate(is_as_assumed)

    def collect(self, chunked: dict[Session, dict[int, list[Task]]], in_place: list[Task]) -> None:
        """Take the groups with updates that began in the backward out of `chunked` and `in_place` (see `step.Due`).

        Their sessions stay in `chunked`. They count as begun until they are committed.

        Raises:
            UnsupportedError: gradients or parameters were changed since, or a gradient was consumed by a former step.
                Nothing counts as begun any more, and gradients of what had begun as consumed.
            OptionsError: hyperparameters were changed.
            StreamError: an update was interrupted.
        """
        tasks_in_place = {id(task.parameter): task for task in in_place}
        try:
            for updates in self:
                if updates.begun:
                    updates.collect(chunked.setdefault(updates.session, {}), tasks_in_place)
            in_chunks = [task for by_group in chunked.values() for tasks in by_group.values() for task in tasks]
            for task in (*in_chunks, *tasks_in_place.values()):
                if isinstance(task.parameter.grad, ConsumedGradient):
                    raise task.parameter.grad.refusal()
        except (UnsupportedError, OptionsError, StreamError):
            for updates in self:
                updates.abandon()
            raise
        in_place[:] = tasks_in_place.values()

    def finish(self) -> None:
        """Block until no update of this optimizer's models is running.

        Raises:
            StreamError: one failed; named.
        """
        finish_all(session.store.updates for session in list(self._sessions))


def synchronize(model: nn.Module) -> None:
    """Wait until every update of the model's parameters that goes on after `step()` has ended.

    With `overlap="forward"` or `"both"`, call this before code that is not the compiled model reads or writes
    parameters, gradients or optimizer states: an evaluation without `torch.compile`, an average. The model's
    `state_dict()` waits by itself, and so does the optimizer's.

    Raises:
        StreamError: an update failed; named.
    """
    finish_all(session.store.updates for session in sessions_of(model.parameters()))


def _finish_updates(model: nn.Module, prefix: str, keep_vars: bool) -> None:
    synchronize(model)
