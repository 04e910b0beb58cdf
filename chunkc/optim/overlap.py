"""The optimizer's side of updates at home that run beside the forward or the backward.

With "forward", `step()` hands a chunk group's update to the CPU and returns; the next forward waits for each group
when it fetches it. With "backward", an update begins when the group is settled (`chunkc.early`), and `step()` waits for
it. What a user may change between `backward()` and `step()` is noted when an update begins and compared by `step()`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from chunkc.ir.errors import OptionsError, UnsupportedError
from chunkc.kernels.formats import NO_SCALE, GradScale
from chunkc.optim.grad_scale import is_skipped, on_the_cpu
from chunkc.optim.group_runs import Task
from chunkc.optim.update_on import CPU, DEVICE, UPDATE_ON
from chunkc.runtime.updates import HomeUpdate, finish_all
from chunkc.session import Session, managing, sessions_of

NONE, FORWARD, BACKWARD, BOTH = "none", "forward", "backward", "both"
OVERLAP = (NONE, FORWARD, BACKWARD, BOTH)

Entry = tuple[torch.Tensor, str, Mapping[str, Any]]
"""A chunked parameter, its name, its parameter group."""


@dataclass(frozen=True)
class _Begun:
    """A parameter whose update has begun, as it was then."""

    parameter: torch.Tensor
    name: str
    gradient: torch.Tensor
    gradient_version: int
    parameter_version: int
    hyper: Any


class Overlap:
    """What one optimizer has under way beside the model's own work.

    Args:
        mode: one of `OVERLAP`.
        update_on: where the optimizer updates chunks.

    Raises:
        OptionsError: there is no such mode or place, or nothing is updated by the CPU that could overlap.
    """

    def __init__(self, mode: str, update_on: str) -> None:
        for name, value, allowed in (("update_on", update_on, UPDATE_ON), ("overlap", mode, OVERLAP)):
            if value not in allowed:
                words = ", ".join(f'"{word}"' for word in allowed)
                raise OptionsError(f"{name} is {value!r}; allowed: {words}")
        if mode != NONE and update_on == DEVICE:
            raise OptionsError(f'overlap={mode!r} is for updates by the CPU: use update_on="{CPU}" or "auto"')
        self.mode, self._update_on = mode, update_on
        self.beside_forward = mode in (FORWARD, BOTH)
        self.beside_backward = mode in (BACKWARD, BOTH)
        self.accumulating = False
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._known: weakref.WeakKeyDictionary[Session, dict[int, list[Entry]]] = weakref.WeakKeyDictionary()
        self._begun: weakref.WeakKeyDictionary[Session, dict[int, tuple[list[_Begun], HomeUpdate]]]
        self._begun = weakref.WeakKeyDictionary()

    def __reduce__(self) -> tuple[type[Overlap], tuple[str, str]]:
        return Overlap, (self.mode, self._update_on)  # a copy has nothing under way

    # --- everything ---

    def finish(self) -> None:
        """Block until no update of this optimizer's models is under way.

        Raises:
            StreamError: one failed; named.
        """
        finish_all(session.store.updates for session in list(self._sessions))

    def forget(self, starter: Any) -> None:
        """Parameter groups or states are others from now on: nothing begins early before the next step has ended."""
        self._known.clear()
        self.end_backward(starter)

    # --- beside the forward ---

    def submit(
        self,
        optimizer: Any,
        session: Session,
        runs: Mapping[int, Sequence[Any]],
        scale: GradScale,
        after: Sequence[Any],
    ) -> None:
        """Begin the update of groups at home, those that the next forward needs soonest first.

        A loss scale is waited for: whether anything changes is known only when all gradients are.
        """
        if not runs or is_skipped(scale := on_the_cpu(scale)):
            return
        self._sessions.add(session)
        updates = session.store.updates
        jobs = {index: _job(optimizer, session, index, runs[index], scale) for index in runs}
        for index in updates.in_order_of_use(list(runs)):
            updates.begin(index, jobs[index], label=_label(session, index), after=after)

    def end_step(self, session: Session, at_home: frozenset[int]) -> None:
        """Wait for what may not go on after the step: all, or what code that is not compiled may read.

        Raises:
            StreamError: an update failed.
        """
        updates = session.store.updates
        if not self.beside_forward:
            updates.finish()
            return
        for index in sorted(at_home):
            names = {s.spec.name for s in session.store.layout.groups[index].slices}
            if not names <= session.trained:
                updates.wait(index)

    # --- beside the backward ---

    def check_scale(self, scale: GradScale) -> None:
        """Refuse a loss scale where updates begin before it is known.

        Raises:
            UnsupportedError: there is one.
        """
        if self.beside_backward and scale is not NO_SCALE:
            raise UnsupportedError(
                f'a GradScaler must see all gradients before the first update, but overlap="{self.mode}" updates '
                'during the backward; use overlap="forward"'
            )

    def prepare(self, optimizer: Any, session: Session, at_home: frozenset[int]) -> None:
        """From the next backward on, these groups' updates may begin there: states and kernels are there now."""
        known = self._known.get(session)
        if known is not None and known.keys() == at_home:
            return
        known = self._known[session] = {index: [] for index in at_home}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                found, name = managing(parameter) or (None, "")
                if found is session:
                    index = session.store.group_index(name)
                    if index in known:
                        known[index].append((parameter, name, group))
        self._sessions.add(session)
        session.early.join(optimizer)

    def begin(self, optimizer: Any, session: Session, index: int) -> bool:
        """Begin the update of a settled group; whether it is this optimizer's, and nothing is waited for."""
        entries = [e for e in self._known.get(session, {}).get(index, ()) if e[0].grad is not None]
        if self.accumulating or not entries or not session.has_states_of(optimizer, [name for _, name, _ in entries]):
            return False
        store = session.store
        store.updates.wait(index)
        with torch.no_grad():
            runs = optimizer.runs(session, index, [Task(optimizer, *entry) for entry in entries])
        job = _job(optimizer, session, index, runs, NO_SCALE)
        update = HomeUpdate(job, _label(session, index), store.home_moments(index))
        noted = [_noted(optimizer, *entry) for entry in entries]
        self._begun.setdefault(session, {})[index] = noted, update  # before it begins: it may be interrupted
        store.updates.enter(index, update)
        return True

    def begun_in(self, session: Session) -> Container[int]:
        """The groups whose updates have begun in the backward, since the last step."""
        return self._begun.get(session, {})

    def collect(self, optimizer: Any, chunked: dict[Session, dict[int, list[Task]]]) -> dict[Session, frozenset[int]]:
        """The groups whose updates began in the backward, taken out of `chunked`; they count until `end_backward`.

        Raises:
            UnsupportedError: gradients or parameters were changed since. Nothing counts as begun any more.
            OptionsError: hyper-parameters were.
        """
        try:
            for session, groups in self._begun.items():
                by_group = chunked.setdefault(session, {})
                for index, (noted, update) in list(groups.items()):
                    if not session.store.updates.has(index, update):
                        _take_back(optimizer, noted)
                        del groups[index]
                        continue
                    tasks = {id(task.parameter): task for task in by_group.pop(index, ())}
                    for note in noted:
                        _check_unchanged(optimizer, note, tasks.pop(id(note.parameter), None))
                    for task in tasks.values():
                        raise UnsupportedError(f"{task.name} got its gradient {_LATE}")
        except (UnsupportedError, OptionsError):
            self.end_backward(optimizer)
            raise
        return {session: frozenset(groups) for session, groups in self._begun.items()}

    def end_backward(self, starter: Any) -> None:
        """What began in the backward is the optimizer's step's from now on: the next may begin."""
        self._begun.clear()
        for session in list(self._sessions):
            session.early.stepped(starter)


_LATE = (
    'after its update had begun: overlap="backward" is for gradients that one compiled backward makes and nothing '
    'changes (no clipping, no unscaling, no use of the parameter outside compiled code); use overlap="forward"'
)


def _noted(optimizer: Any, parameter: torch.Tensor, name: str, group: Mapping[str, Any]) -> _Begun:
    assert parameter.grad is not None
    hyper = optimizer.hyper_now(group, parameter)
    return _Begun(parameter, name, parameter.grad, parameter.grad._version, parameter._version, hyper)


def _take_back(optimizer: Any, noted: Sequence[_Begun]) -> None:
    """The update of these parameters was interrupted before it began: the step counted for it is still to come."""
    for note in noted:
        optimizer.states_of(note.parameter)["step"].sub_(1)


def _check_unchanged(optimizer: Any, noted: _Begun, task: Task | None) -> None:
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


def _job(optimizer: Any, session: Session, index: int, runs: Sequence[Any], scale: GradScale) -> Callable[[], None]:
    optimizer.compile_for_home(session, index, runs, scale)
    return optimizer.at_home(session, index, runs, scale)


def _label(session: Session, index: int) -> str:
    return f"chunk param:{index} ({session.store.layout.groups[index].title})"


def synchronize(model: nn.Module) -> None:
    """Wait until every update of the model's parameters that goes on after `step()` has ended.

    With `overlap="forward"` or `"both"`, call this before code that is not the compiled model reads or writes
    parameters, gradients or optimizer states: a checkpoint, an evaluation without `torch.compile`, an average.

    Raises:
        StreamError: an update failed; named.
    """
    finish_all(session.store.updates for session in sessions_of(model.parameters()))
