"""Decide which chunk groups one optimizer may update in the next backward of a session.

A group is eligible if this optimizer has all of its parameters, in a state that the update can begin with. Any other
group, or one with wrong arguments, is left to `step()`, which updates it or raises.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable, Sequence

import torch

from chunkc.ir.errors import OptionsError, UnsupportedError
from chunkc.optim.memory_checks import check_in_place
from chunkc.optim.stepping import SteppingOptimizer
from chunkc.optim.update_task import Task, Where
from chunkc.runtime.store.consumed_gradients import gradient_of
from chunkc.session.declared_states import declared
from chunkc.session.session import Session


class BoundToSession:
    """Weak references to an optimizer and a session, which both exist whenever a method runs."""

    def __init__(self, optimizer: SteppingOptimizer, session: Session) -> None:
        self._references = weakref.ref(optimizer), weakref.ref(session)

    @property
    def optimizer(self) -> SteppingOptimizer:
        optimizer = self._references[0]()
        assert optimizer is not None
        return optimizer

    @property
    def session(self) -> Session:
        session = self._references[1]()
        assert session is not None
        return session


class Eligibility(BoundToSession):
    """The chunk groups of a session that one optimizer's updates in the next backward may take.

    Attributes:
        numbers: each parameter's index among all of the optimizer's.
    """

    def __init__(self, optimizer: SteppingOptimizer, session: Session) -> None:
        super().__init__(optimizer, session)
        self.numbers: dict[torch.Tensor, int] = {}
        self._moving: frozenset[int] | None = None  # groups to update at home or in slots; None: as `forget` leaves it
        self._at_home: frozenset[int] = frozenset()  # those of these groups that the CPU updates
        self._looked_up: tuple[object, ...] | None = None  # layout and residents when `_moving` was found before a step
        self._tasks: dict[int, list[Task]] = {}  # this optimizer's parameters, by chunk group
        self._in_place: frozenset[int] = frozenset()  # resident groups that are all this optimizer's to update
        self._tasks_of: tuple[object, ...] | None = None  # layout and residents when `_tasks` was made
        self._groups: list[object] = []  # parameter groups, each with its parameters, when `_tasks` was made

    def forget(self) -> None:
        """Forget groups, since parameter groups or states have changed."""
        self._moving, self._at_home, self._looked_up = None, frozenset(), None
        self._tasks, self._tasks_of = {}, None

    def prepare(self, groups: frozenset[int], at_home: frozenset[int]) -> bool:
        """Let updates of these groups begin, those of `at_home` at home; return whether that is another choice."""
        self._looked_up = None
        if (self._moving, self._at_home) == (groups, at_home):
            return False
        self._moving, self._at_home = groups, at_home
        return True

    def of_group(self, index: int) -> Sequence[Task]:
        """Return the parameters of a group that are this optimizer's, as `follow` found them."""
        return self._tasks.get(index, ())

    def tasks(self, index: int, where: Where) -> Sequence[Task]:
        """Return the parameters of a group that the next backward may update there; none: it may not."""
        self.follow()
        optimizer, session, tasks = self.optimizer, self.session, self.of_group(index)
        if not self._may_be(index, where) or optimizer.is_accumulating:
            return ()
        if where is Where.HOME:  # parameters without a gradient may be left out
            due = [task for task in tasks if task.parameter.grad is not None]
        else:
            due = list(tasks) if all(task.parameter.requires_grad for task in tasks) else []
        if not due or not self._have_right_arguments(due):
            return ()
        names = [task.name for task in due]
        if where is Where.RESIDENT:
            others = session.store.trainers.trained_by_others()  # this thread may not look at their gradients
            without = not others.intersection(names) and all(gradient_of(task.parameter) is None for task in due)
            return due if without else ()
        has_room = session.keepers.has(optimizer, names)
        if where is Where.HOME and not has_room:
            return ()
        if optimizer.overlap.may_undo:
            return due if self._can_be_staged(index, tasks) else ()
        if where is Where.HOME:
            return due
        if has_room:
            has_states = all(self.has_states(task) for task in due)
        else:
            has_states = session.keepers.has_none(names) and all(self._can_make_states(task) for task in due)
        return due if has_states and self._is_whole(index, due) else ()

    def follow(self) -> None:
        """Find tasks anew if the layout, its residents or the optimizer's parameter groups have changed.

        A caller may have put other groups, or other parameters, into `param_groups`.
        """
        session, layout = self.session, self.session.store.layout
        groups = [entry for group in self.optimizer.own_groups for entry in (group, *group["params"])]
        tasks_of_now = layout.version, session.store.resident
        are_same = len(groups) == len(self._groups) and all(map(operator.is_, groups, self._groups))
        if are_same and self._tasks_of == tasks_of_now:
            return
        self._groups, self._tasks_of = groups, tasks_of_now
        self._tasks, self.numbers, group_of = {}, {}, layout.group_of()
        for number, (owned_by, task) in enumerate(self.optimizer.tasks()):
            self.numbers[task.parameter] = number
            if owned_by is session and (index := group_of.get(task.name)) is not None:
                self._tasks.setdefault(index, []).append(task)
        self._in_place = frozenset(
            index
            for index, tasks in self._tasks.items()
            if index in session.store.resident
            and self._is_whole(index, tasks)
            and all(self._updates_in_place(task.parameter) for task in tasks)
        )

    def _may_be(self, index: int, where: Where) -> bool:
        """Whether a group is updated there, as far as that depends on steps before."""
        optimizer = self.optimizer
        if index in self.session.store.resident:
            updates_residents = optimizer.overlap.updates_residents(optimizer.rule.num_stages)
            return where is Where.RESIDENT and index in self._in_place and updates_residents
        if where is Where.SLOTS:
            self._look_up()
        is_there = index in self._at_home if where is Where.HOME else index not in self._at_home
        may_move = self._moving is not None and index in self._moving and is_there
        return may_move and where is not Where.RESIDENT and optimizer.assumed_scale.is_likely

    def _look_up(self) -> None:
        """Let parameters that are declared to be this optimizer's be updated in slots, before the first step.

        Staged updates wait for that step: shadow copies exist only once states do.
        """
        optimizer, session, store = self.optimizer, self.session, self.session.store
        version = store.layout.version, store.resident
        if optimizer.overlap.may_undo or (self._moving is not None and self._looked_up in (None, version)):
            return
        fixed = store.resident | store.layout.cut
        groups = [group for group in store.layout.trainable_groups if group.index not in fixed]
        home, num_stages = session.options.home, optimizer.rule.num_stages
        in_slots = optimizer.overlap.in_slots(groups, session.hardware, home=home, num_stages=num_stages)
        self.prepare(in_slots, frozenset())
        self._looked_up = version

    def _have_right_arguments(self, tasks: Sequence[Task]) -> bool:
        """Whether states of the present format suffice, and all arguments are right; `step()` says what is wrong."""
        optimizer = self.optimizer
        if not set(optimizer.rule.states(optimizer.own_groups).kinds) <= set(optimizer.states.kinds):
            return False
        try:
            for group in {id(task.group): task.group for task in tasks}.values():
                optimizer.check_group(group)
            for parameter in {task.parameter.dtype: task.parameter for task in tasks}.values():
                optimizer.check_dtype(parameter)
        except (OptionsError, UnsupportedError):
            return False
        return True

    def _updates_in_place(self, parameter: torch.Tensor) -> bool:
        """Whether this optimizer updates a resident parameter, and can; where it cannot, `step()` says why."""
        optimizer, declaration = self.optimizer, declared(parameter)
        if declaration is None or declaration.keeper is None or declaration.keeper() is not optimizer:
            return False
        try:
            check_in_place(optimizer, parameter, parameter)
        except UnsupportedError:
            return False
        return True

    def _is_whole(self, index: int, tasks: Iterable[Task]) -> bool:
        """Whether these are all parameters of a group."""
        return {task.name for task in tasks} == {s.spec.name for s in self.session.store.layout.groups[index].slices}

    def _can_be_staged(self, index: int, tasks: Sequence[Task]) -> bool:
        """Whether a group has shadow copies, and all of it, with all states that it needs, is at home."""
        store = self.session.store
        return (
            self._is_whole(index, tasks)
            and store.shadow_copies.has(store.layout, index)
            and store.checksums.has(store.layout.groups[index])
            and all(self.has_states(task) for task in tasks)
        )

    def has_states(self, task: Task) -> bool:
        """Whether all states that an update of a parameter needs are at home already."""
        optimizer, store = self.optimizer, self.session.store
        state, needed = optimizer.states_of(task.parameter), optimizer.dtypes_of(task.parameter, task.group)
        if "step" not in state:
            return False
        kinds = [kind for kind in store.layout.groups[store.views.group_index(task.name)].state_kinds if kind in needed]
        return all(kind in state and store.views.is_home_view(state[kind], kind, task.name) for kind in kinds)

    def _can_make_states(self, task: Task) -> bool:
        """Whether a parameter has no states yet, and chunks have room for all that it needs."""
        optimizer, store = self.optimizer, self.session.store
        kinds = store.layout.groups[store.views.group_index(task.name)].state_kinds
        needed = optimizer.dtypes_of(task.parameter, task.group)
        return not optimizer.kept_states_of(task.parameter) and set(needed) <= set(kinds)
