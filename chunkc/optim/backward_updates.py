"""The optimizer's side of updates that begin in the backward.

An update at home begins when its chunk group is settled (`chunkc.early`), and `step()` waits for it, or with "both" the
next forward. Updates in slots are `slot_updates`'s. What a user may change between `backward()` and `step()` is noted
when an update begins and compared by `step()`.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from chunkc.early import Starter
from chunkc.ir.errors import OptionsError, StreamError, UnsupportedError
from chunkc.kernels.formats import NO_SCALE, GradScale
from chunkc.optim.group_spans import Task
from chunkc.optim.overlap_mode import OverlapMode
from chunkc.optim.step import group_spans, job_of
from chunkc.optim.updates_under_way import UpdatesUnderWay, label_of
from chunkc.readers import await_readers
from chunkc.runtime.parts import part_of
from chunkc.runtime.updates import HomeUpdate
from chunkc.runtime.used_gradients import UsedGradient, used_up
from chunkc.session import Session, managing

if TYPE_CHECKING:
    from chunkc.optim.staying_updates import StayingGroups

Entry = tuple[torch.Tensor, str, Mapping[str, Any]]
"""A chunked parameter, its name, its parameter group."""


@dataclass(frozen=True)
class Begun:
    """A parameter whose update has begun, as it was then."""

    parameter: torch.Tensor
    name: str
    gradient: torch.Tensor
    gradient_version: int
    parameter_version: int
    hyper: Any


class Beginning(Protocol):
    """An update that is about to begin in a backward."""

    def has_begun(self) -> bool:
        """Whether it has: it might have been interrupted before."""

    def check(self) -> None:
        """Raise StreamError if it was interrupted since, and will not end."""


def interrupted(label: str) -> StreamError:
    """The error for an update that a backward did not bring to its end."""
    return StreamError(f"the update of {label} was interrupted in the backward and is half done: load a checkpoint")


class BackwardUpdates:
    """The updates that one optimizer begins in the backward.

    Attributes:
        accumulating: whether more gradients will be added, so that no update may begin.
    """

    def __init__(self, overlap: OverlapMode, under_way: UpdatesUnderWay, starter: Starter) -> None:
        self._overlap, self._under_way, self._starter = overlap, under_way, starter
        self.accumulating = False
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._staying: weakref.WeakKeyDictionary[Session, StayingGroups] = weakref.WeakKeyDictionary()
        self._known: weakref.WeakKeyDictionary[Session, dict[int, list[Entry]]] = weakref.WeakKeyDictionary()
        self._at_home: weakref.WeakKeyDictionary[Session, frozenset[int]] = weakref.WeakKeyDictionary()
        self._begun: weakref.WeakKeyDictionary[Session, dict[int, tuple[Sequence[Begun], Beginning]]]
        self._begun = weakref.WeakKeyDictionary()

    @property
    def starter(self) -> Starter | None:
        """By whom a session's graphs begin this optimizer's updates; None: they do not."""
        return self._starter if self._overlap.beside_backward else None

    @contextmanager
    def announced(self) -> Iterator[None]:
        """Inside, more gradients will be added to those of each backward."""
        before, self.accumulating = self.accumulating, True
        try:
            yield
        finally:
            self.accumulating = before

    def forget(self) -> None:
        """Parameter groups or states are others from now on: nothing begins early before the next step has ended."""
        self._known.clear()
        self._at_home.clear()
        self._staying.clear()
        self.end()

    def check_scale(self, scale: GradScale) -> None:
        """Refuse a loss scale where updates begin before it is known.

        Raises:
            UnsupportedError: there is one.
        """
        if self._overlap.beside_backward and scale is not NO_SCALE:
            raise UnsupportedError(
                "a GradScaler must see all gradients before the first update, but "
                f'overlap="{self._overlap.mode}" updates during the backward; use overlap="forward"'
                + (", and load parameters that this backward has updated anew" if self._begun else "")
            )

    def prepare(self, optimizer: Any, session: Session, groups: frozenset[int], at_home: frozenset[int]) -> None:
        """From the next backward on, these groups' updates may begin there, those of some of them at home: states and
        kernels are there now."""
        known = self._known.get(session)
        if known is not None and known.keys() == groups and self._at_home[session] == at_home:
            return
        known, self._at_home[session] = {index: [] for index in groups}, at_home
        self._known[session] = known
        for group in optimizer.param_groups:
            for parameter in map(part_of, group["params"]):
                found, name = managing(parameter) or (None, "")
                if found is session:
                    index = session.store.group_index(name)
                    if index in known:
                        known[index].append((parameter, name, group))
        self._sessions.add(session)
        self._under_way.watch(session)
        session.early.join(self._starter)

    def in_slots(self, session: Session, index: int) -> Sequence[Entry]:
        """The parameters of a group whose update may be made in slots, in the backward that is next; else nothing."""
        if self.accumulating or index in self._at_home.get(session, frozenset()):
            return ()
        return self._known.get(session, {}).get(index, ())

    def staying(self, session: Session) -> StayingGroups | None:
        """What `keep_staying` was told last."""
        return self._staying.get(session)

    def keep_staying(self, session: Session, groups: StayingGroups) -> None:
        """Keep which groups of a session stay, and are this optimizer's to update where they are."""
        self._staying[session] = groups
        self._sessions.add(session)

    def note(self, session: Session, index: int, noted: Sequence[Begun], update: Beginning) -> None:
        """The update of a group begins now, of these parameters."""
        self._begun.setdefault(session, {})[index] = noted, update

    def beginning(self, session: Session, index: int) -> Beginning | None:
        """The update of a group that has been noted since the last step, if one has."""
        _, update = self._begun.get(session, {}).get(index, (None, None))
        return update

    def begin(self, optimizer: Any, session: Session, index: int) -> bool:
        """Begin the update of a settled group; whether it is this optimizer's, and nothing is waited for."""
        if index not in self._at_home.get(session, frozenset()):
            return False
        entries = [e for e in self._known[session][index] if e[0].grad is not None]
        if self.accumulating or not entries or not session.keepers.has(optimizer, [name for _, name, _ in entries]):
            return False
        store = session.store
        await_readers(entry[0] for entry in entries)
        store.updates.wait(index)
        with torch.no_grad():
            spans = group_spans(optimizer, session, index, [Task(optimizer, *entry) for entry in entries])
        job = job_of(optimizer, session, index, spans, NO_SCALE)
        update = HomeUpdate(job, label_of(session, index), store.home_marks(index))
        noted = [_noted(optimizer, *entry) for entry in entries]
        self.note(session, index, noted, _AtHome(session, index, update))  # before it begins: it may be interrupted
        store.updates.enter(index, update)
        return True

    def begun_in(self, session: Session) -> Container[int]:
        """The groups whose updates have begun in the backward, since the last step."""
        return self._begun.get(session, {})

    def collect(
        self,
        optimizer: Any,
        chunked: dict[Session, dict[int, list[Task]]],
        in_place: list[tuple[torch.Tensor, int]],
    ) -> dict[Session, frozenset[int]]:
        """The groups whose updates began in the backward, taken out of `chunked` and `in_place` (see `Due`); they count
        until `end`.

        Raises:
            UnsupportedError: gradients or parameters were changed since, or a gradient was used up by a step before.
                Nothing counts as begun any more.
            OptionsError: hyper-parameters were.
            StreamError: an update was interrupted.
        """
        staying = {id(parameter): (parameter, number) for parameter, number in in_place}
        try:
            for session, groups in self._begun.items():
                by_group = chunked.setdefault(session, {})
                for index, (noted, update) in list(groups.items()):
                    if not update.has_begun():
                        _take_back(optimizer, noted)
                        del groups[index]
                        continue
                    tasks = {id(task.parameter): task for task in by_group.pop(index, ())}
                    for note in noted:
                        if (found := staying.pop(id(note.parameter), None)) is not None:
                            group = optimizer.param_groups[found[1]]
                            tasks[id(note.parameter)] = Task(optimizer, note.parameter, note.name, group)
                        _check_unchanged(optimizer, note, tasks.pop(id(note.parameter), None))
                    for task in tasks.values():
                        raise UnsupportedError(f"{task.name} got its gradient {_LATE}")
                    update.check()
            for by_group in chunked.values():
                for tasks_left in by_group.values():
                    for task in tasks_left:
                        if isinstance(task.parameter.grad, UsedGradient):
                            raise used_up(task.name)
            for parameter, _ in staying.values():
                if isinstance(parameter.grad, UsedGradient):
                    raise parameter.grad.refusal()
        except (UnsupportedError, OptionsError, StreamError):
            self.end()
            raise
        in_place[:] = staying.values()
        return {session: frozenset(groups) for session, groups in self._begun.items()}

    def end(self) -> None:
        """What began in the backward is the optimizer's step's from now on: the next may begin."""
        self._begun.clear()
        for session in list(self._sessions):
            session.early.stepped(self._starter)


_LATE = (
    'after its update had begun: overlap="backward" is for gradients that one compiled backward makes and nothing '
    'changes (no clipping, no unscaling, no use of the parameter outside compiled code); use overlap="forward"'
)


@dataclass(frozen=True)
class _AtHome:
    """An update at home. One that fails says so where it is waited for."""

    session: Session
    index: int
    update: HomeUpdate

    def has_begun(self) -> bool:
        return self.session.store.updates.has(self.index, self.update)

    def check(self) -> None:
        return


def _noted(optimizer: Any, parameter: torch.Tensor, name: str, group: Mapping[str, Any]) -> Begun:
    assert parameter.grad is not None
    hyper = optimizer.hyper_now(group, parameter)
    return Begun(parameter, name, parameter.grad, parameter.grad._version, parameter._version, hyper)


def _take_back(optimizer: Any, noted: Sequence[Begun]) -> None:
    """The update of these parameters was interrupted before it began: the step counted for it is still to come."""
    for note in noted:
        optimizer.states_of(note.parameter)["step"].sub_(1)


def _check_unchanged(optimizer: Any, noted: Begun, task: Task | None) -> None:
    name, gradient = noted.name, noted.parameter.grad
    if task is None or gradient is not noted.gradient or gradient._version != noted.gradient_version:
        raise UnsupportedError(f"the gradient of {name} was changed {_LATE}")
    if noted.parameter._version != noted.parameter_version:
        raise UnsupportedError(f"the parameter {name} was changed {_LATE}")
    if optimizer.hyper_now(task.group, noted.parameter) != noted.hyper:
        raise OptionsError(
            f"the hyper-parameters of {name} were changed between backward() and step(), after its update had begun; "
            'change them after step(), or use overlap="forward"'
        )
