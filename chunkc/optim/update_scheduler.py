"""The optimizer's side of updates that begin in the backward.

An update at home begins when its chunk group is settled (`chunkc.session.in_backward`), and `step()` waits for it, or
with "both" the next forward. Updates in slots are `slot_updates`'s. What a user may change between `backward()` and
`step()` is noted when an update begins and compared by `step()`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from chunkc.ir.errors import OptionsError, StreamError, UnsupportedError
from chunkc.kernels.formats import NO_SCALE, GradScale
from chunkc.optim.gradient_scaling import AssumedScale
from chunkc.optim.group_spans import Task
from chunkc.optim.running_updates import UpdatesUnderWay, label_of
from chunkc.optim.step import group_spans, job_of
from chunkc.optim.undo import NotCounted, count
from chunkc.optim.update_mode import UpdateMode, groups_at_home
from chunkc.runtime.device.updates import HomeUpdate
from chunkc.runtime.store.consumed_gradients import ConsumedGradient, consumed_error
from chunkc.runtime.store.shards import local_shard_of
from chunkc.session.pending_readers import await_readers
from chunkc.session.protocols import Starter
from chunkc.session.session import Session, managing

if TYPE_CHECKING:
    from chunkc.optim.resident_updates import ResidentGroups

_CPU = torch.device("cpu")

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
        assumed: with which scale updates begin that can be undone.
    """

    def __init__(
        self,
        overlap: UpdateMode,
        under_way: UpdatesUnderWay,
        starter: Callable[[Session], Starter],
        assumed: AssumedScale,
    ) -> None:
        self._overlap, self._under_way, self._new_starter = overlap, under_way, starter
        self.accumulating, self.assumed = False, assumed
        self._starters: weakref.WeakKeyDictionary[Session, Starter] = weakref.WeakKeyDictionary()
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._resident_groups: weakref.WeakKeyDictionary[Session, ResidentGroups] = weakref.WeakKeyDictionary()
        self._known: weakref.WeakKeyDictionary[Session, dict[int, list[Entry]]] = weakref.WeakKeyDictionary()
        self._looked_up: weakref.WeakKeyDictionary[Session, tuple[object, ...]] = weakref.WeakKeyDictionary()
        self._at_home: weakref.WeakKeyDictionary[Session, frozenset[int]] = weakref.WeakKeyDictionary()
        self._begun: weakref.WeakKeyDictionary[Session, dict[int, tuple[Sequence[Begun], Beginning]]]
        self._begun = weakref.WeakKeyDictionary()

    def starter_in(self, session: Session) -> Starter:
        """Return the object by which a session's graphs begin this optimizer's updates."""
        if session not in self._starters:
            self._starters[session] = self._new_starter(session)
        return self._starters[session]

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
        for session in list(self._begun):
            self.take_back(session)
        self._known.clear()
        self._looked_up.clear()
        self._at_home.clear()
        self._resident_groups.clear()
        self.end()

    def prepare(self, optimizer: Any, session: Session, groups: frozenset[int], at_home: frozenset[int]) -> None:
        """From the next backward on, these groups' updates may begin there, those of some of them at home: states and
        kernels are there now."""
        self._looked_up.pop(session, None)
        known = self._known.get(session)
        if known is not None and known.keys() == groups and self._at_home[session] == at_home:
            return
        known, self._at_home[session] = {index: [] for index in groups}, at_home
        self._known[session] = known
        for group in optimizer.param_groups:
            for parameter in map(local_shard_of, group["params"]):
                found, name = managing(parameter) or (None, "")
                if found is session:
                    index = session.store.group_index(name)
                    if index in known:
                        known[index].append((parameter, name, group))
        self._sessions.add(session)
        self._under_way.watch(session)
        session.in_backward.join(self.starter_in(session))

    def look_up(self, optimizer: Any, session: Session) -> None:
        """Before the first step: what is declared to be this optimizer's may be updated in slots in the first backward.

        Not what can be undone: it has twins only once it has states.
        """
        layout = session.store.layout
        there = layout.version, session.store.resident
        if self._overlap.undoable or (session in self._known and self._looked_up.get(session, there) == there):
            return
        groups = [g for g in layout.groups if g.trainable and g.index not in session.store.resident | layout.cut]
        home = groups_at_home(session, groups, self._overlap.update_on, optimizer.rule.num_stages)
        self.prepare(optimizer, session, frozenset(g.index for g in groups if g.index not in home), frozenset())
        self._looked_up[session] = there

    def in_slots(self, session: Session, index: int) -> Sequence[Entry]:
        """The parameters of a group whose update may be made in slots, in the backward that is next; else nothing."""
        if self.accumulating or not self.assumed.is_likely or index in self._at_home.get(session, frozenset()):
            return ()
        return self._known.get(session, {}).get(index, ())

    def staying(self, session: Session) -> ResidentGroups | None:
        """What `keep_resident_groups` was told last."""
        return self._resident_groups.get(session)

    def keep_resident_groups(self, session: Session, groups: ResidentGroups) -> None:
        """Keep which groups of a session stay, and are this optimizer's to update where they are."""
        self._resident_groups[session] = groups
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
        store, undoable = session.store, self._overlap.undoable
        known, is_likely = self._known[session][index], self.assumed.is_likely
        if undoable and not (is_likely and can_be_undone(optimizer, session, index, known)):
            return False
        await_readers(entry[0] for entry in entries)
        store.updates.wait(index)
        stepping = NotCounted(optimizer) if undoable else optimizer
        with torch.no_grad():
            if undoable:
                for parameter, _, _ in entries:
                    optimizer.contents.follow(parameter, optimizer.states_of(parameter))
            spans = group_spans(optimizer, session, index, [Task(stepping, *entry) for entry in entries])
        if undoable:
            store.shadow_copies.begin(index)
        job = job_of(optimizer, session, index, spans, self.assumed.on(_CPU), in_shadow_copies=undoable)
        update = HomeUpdate(job, label_of(session, index), store.home_marks(index))
        noted = [noted_of(optimizer, *entry) for entry in entries]
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
                    if self._overlap.undoable:  # those that `settle` has left
                        del by_group[index]
                        continue
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
                        if isinstance(task.parameter.grad, ConsumedGradient):
                            raise consumed_error(task.name)
            for parameter, _ in staying.values():
                if isinstance(parameter.grad, ConsumedGradient):
                    raise parameter.grad.refusal()
        except (UnsupportedError, OptionsError, StreamError):
            self.end()
            raise
        in_place[:] = staying.values()
        return {session: frozenset(groups) for session, groups in self._begun.items()}

    def settle(self, optimizer: Any, scale: GradScale) -> None:
        """Take back what would not have been updated as it was (see `undo`), now that a step's scale is known.

        Raises:
            UnsupportedError: there is one, and nothing can be taken back.
        """
        if self._overlap.is_final and scale is not NO_SCALE:
            raise UnsupportedError(
                "a GradScaler must see all gradients before the first update, but "
                f'overlap="{self._overlap.mode}" updates during the backward; use undoable=True beside it, or overlap='
                '"forward"' + (", and load parameters that this backward has updated anew" if self._begun else "")
            )
        if not self._overlap.undoable:
            return
        stands = self.assumed.is_what_was(scale)
        for session, groups in list(self._begun.items()):
            changed = [index for index in groups if not stands or not self._stands(optimizer, session, index)]
            self.take_back(session, changed)

    def _stands(self, optimizer: Any, session: Session, index: int) -> bool:
        noted, update = self._begun[session][index]
        entries, store = self._known.get(session, {}).get(index, ()), session.store
        if index in store.resident or {id(p) for p, _, _ in entries if p.grad is not None} != {
            id(note.parameter) for note in noted
        }:
            return False
        groups = {id(parameter): (name, group) for parameter, name, group in entries}
        try:
            for note in noted:
                name, group = groups[id(note.parameter)]
                _check_unchanged(optimizer, note, Task(optimizer, note.parameter, name, group))
            update.check()
        except (UnsupportedError, OptionsError, StreamError):
            return False
        return update.has_begun() and not store.replaced([name for name, _ in groups.values()])

    def take_back(self, session: Session, groups: Iterable[int] | None = None) -> None:
        """Undo the updates that have begun of these groups, if they can be undone; None: of all.

        Raises:
            StreamError: one at home had failed.
        """
        begun = self._begun.get(session, {}) if self._overlap.undoable else {}
        for index in [index for index in begun if groups is None or index in groups]:
            session.store.updates.wait(index)
            session.store.shadow_copies.roll_back(index)
            del begun[index]

    def adopt(self, optimizer: Any) -> None:
        """What has begun stands from now on, and the next may begin. What could be undone is at home, and counts."""
        for session, groups in self._begun.items() if self._overlap.undoable else ():
            for index, (noted, _) in groups.items():
                for note in noted:
                    count(optimizer, note.parameter)
                states = {name: optimizer.kept_states_of(p) for p, name, _ in self._known[session][index]}
                session.store.commit_shadow_copies(index, states)
        self.end()

    def end(self) -> None:
        """What began in the backward is the optimizer's step's from now on: the next may begin."""
        self._begun.clear()
        for session in list(self._sessions):
            session.in_backward.stepped(self.starter_in(session))


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


def can_be_undone(optimizer: Any, session: Session, index: int, entries: Sequence[Entry]) -> bool:
    """Whether a group has room for an update that waits, and all of it, with all states that it needs, is at home."""
    store = session.store
    names = {name for _, name, _ in entries}
    is_whole = names == {s.spec.name for s in store.layout.groups[index].slices}
    return (
        is_whole
        and store.shadow_copies.has(store.layout, index)
        and all(has_states(optimizer, session, e) for e in entries)
    )


def has_states(optimizer: Any, session: Session, entry: Entry) -> bool:
    """Whether all states that an update of a parameter needs are at home already."""
    parameter, name, group = entry
    state, needed, store = optimizer.states_of(parameter), optimizer.dtypes_of(parameter, group), session.store
    if "step" not in state:
        return False
    kinds = [kind for kind in store.layout.groups[store.group_index(name)].state_kinds if kind in needed]
    return all(kind in state and store.is_home_view(state[kind], kind, name) for kind in kinds)


def noted_of(optimizer: Any, parameter: torch.Tensor, name: str, group: Mapping[str, Any]) -> Begun:
    """A parameter whose update begins, whose gradient is there."""
    gradient = parameter.grad
    assert gradient is not None
    return Begun(parameter, name, gradient, gradient._version, parameter._version, _hyper(optimizer, group, parameter))


def _hyper(optimizer: Any, group: Mapping[str, Any], parameter: torch.Tensor) -> Any:
    """The hyper-parameters of a parameter's update in the backward."""
    if optimizer.overlap.undoable:
        return optimizer.hyper_at(group, int(optimizer.states_of(parameter)["step"]) + 1)
    return optimizer.hyper_now(group, parameter)


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
    if _hyper(optimizer, task.group, noted.parameter) != noted.hyper:
        raise OptionsError(
            f"the hyper-parameters of {name} were changed between backward() and step(), after its update had begun; "
            'change them after step(), or use overlap="forward"'
        )
