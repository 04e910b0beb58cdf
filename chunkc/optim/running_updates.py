"""An optimizer's updates at home that run on a thread of their own: handed over by `step()`, waited for later.

With "forward", `step()` hands a chunk group's update to the CPU and returns; the next forward waits for each group
when it fetches it. With "backward", `step()` waits for all, also for those that began before (`backward_updates`).
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from chunkc.kernels.formats import GradScale
from chunkc.optim.gradient_scaling import is_skipped, on_the_cpu
from chunkc.optim.step import job_of
from chunkc.optim.update_mode import UpdateMode
from chunkc.runtime.device.updates import finish_all
from chunkc.session.session import Session, sessions_of


class UpdatesUnderWay:
    """What one optimizer has under way beside the model's own work."""

    def __init__(self, overlap: UpdateMode) -> None:
        self._overlap = overlap
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._waiting: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def watch(self, session: Session) -> None:
        """A session's updates may be under way from now on: `finish` waits for them, and its models' `state_dict`."""
        self._sessions.add(session)
        for model in session.modules - self._waiting if self._overlap.in_forward else ():
            self._let_state_dict_wait(model)

    def _let_state_dict_wait(self, model: nn.Module) -> None:
        """`state_dict()` of a model, and of each of its modules with parameters of its own, waits for updates."""
        for module in model.modules():
            has_parameters = any(True for _ in module.parameters(recurse=False))
            if (module is model or has_parameters) and module not in self._waiting:
                self._waiting.add(module)
                module.register_state_dict_pre_hook(_finish_updates)

    def finish(self) -> None:
        """Block until no update of this optimizer's models is under way.

        Raises:
            StreamError: one failed; named.
        """
        finish_all(session.store.updates for session in list(self._sessions))

    def submit(
        self,
        optimizer: Any,
        session: Session,
        spans: Mapping[int, Sequence[Any]],
        scale: GradScale,
        after: Sequence[Any],
    ) -> None:
        """Begin the update of groups at home, those that the next forward needs soonest first.

        A loss scale is waited for: whether anything changes is known only when all gradients are.
        """
        if not spans or is_skipped(scale := on_the_cpu(scale)):
            return
        self.watch(session)
        updates = session.store.updates
        jobs = {index: job_of(optimizer, session, index, spans[index], scale) for index in spans}
        for index in updates.in_order_of_use(list(spans)):
            updates.begin(index, jobs[index], label=label_of(session, index), after=after)

    def end_step(self, session: Session, at_home: frozenset[int]) -> None:
        """Wait for what may not go on after the step: all, or what code that is not compiled may read.

        Raises:
            StreamError: an update failed.
        """
        updates = session.store.updates
        if not self._overlap.in_forward:
            updates.finish()
            return
        for index in sorted(at_home):
            names = {s.spec.name for s in session.store.layout.groups[index].slices}
            if not names <= session.trained:
                updates.wait(index)


def _finish_updates(model: nn.Module, prefix: str, keep_vars: bool) -> None:
    synchronize(model)


def label_of(session: Session, index: int) -> str:
    """A group as its user knows it, for the error of an update that fails."""
    return f"chunk param:{index} ({session.store.layout.groups[index].title})"


def synchronize(model: nn.Module) -> None:
    """Wait until every update of the model's parameters that goes on after `step()` has ended.

    With `overlap="forward"` or `"both"`, call this before code that is not the compiled model reads or writes
    parameters, gradients or optimizer states: an evaluation without `torch.compile`, an average. The model's
    `state_dict()` waits by itself, and so does the optimizer's.

    Raises:
        StreamError: an update failed; named.
    """
    finish_all(session.store.updates for session in sessions_of(model.parameters()))
