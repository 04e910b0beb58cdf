"""Updates that begin during the backward, as the graphs of a session see them: which groups, and who must not run then.

A compiled backward says when a group is settled at home: its gradients are complete and on their way, and nothing of
it is read from home again. Whoever wants to update the group may begin then. From then to that optimizer's `step()` no
graph that uses the group may run: it would compute with parameters of two steps.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection, Container
from typing import TYPE_CHECKING, Protocol

from chunkc.ir.errors import UnsupportedError

if TYPE_CHECKING:
    from chunkc.session import Session


class Starter(Protocol):
    """An optimizer that begins updates during the backward."""

    def begin_update(self, session: Session, group: int) -> bool:
        """Begin a settled group's update, if it is this optimizer's and may begin; whether it did."""

    def begun_in(self, session: Session) -> Container[int]:
        """Groups of a session whose updates have begun during a backward since the last step."""

    def __hash__(self) -> int: ...


class EarlyUpdates:
    """Who begins updates during a session's backward, and which forwards still wait for theirs.

    Forwards are counted for each optimizer, since its own last step: another one's step says nothing of them.
    """

    def __init__(self) -> None:
        self._in_flight: weakref.WeakKeyDictionary[Starter, Counter[int]] = weakref.WeakKeyDictionary()

    @property
    def wanted(self) -> bool:
        """Whether anybody wants to know when a group is settled."""
        return len(self._in_flight) > 0

    def join(self, starter: Starter) -> None:
        self._in_flight.setdefault(starter, Counter())

    def enter_forward(self, session: Session, groups: Collection[int]) -> None:
        """A graph that uses these groups is about to run its forward.

        Raises:
            UnsupportedError: the update of one of them has begun.
        """
        self._refuse(session, groups, "forward")

    def leave_forward(self, groups: Collection[int]) -> None:
        """A graph that uses these groups has run a forward that has a backward; one that failed has none."""
        for in_flight in self._in_flight.values():
            in_flight.update(groups)

    def enter_backward(self, session: Session, groups: Collection[int]) -> None:
        """A graph that uses these groups is about to run the backward of one of its forwards; raises as above."""
        self._refuse(session, groups, "backward")
        for in_flight in self._in_flight.values():
            for group in groups:
                if in_flight[group] > 0:
                    in_flight[group] -= 1

    def settled(self, session: Session, group: int) -> None:
        """A group is settled in the backward that runs now; its updates begin unless another backward may follow."""
        for starter, in_flight in list(self._in_flight.items()):
            if in_flight[group] == 0:
                starter.begin_update(session, group)

    def stepped(self, starter: Starter) -> None:
        """An optimizer has ended its step: for it, no forward before this counts any more."""
        if starter in self._in_flight:
            self._in_flight[starter].clear()

    def has_begun(self, session: Session, group: int) -> bool:
        """Whether a group's update has begun in the backward, and no step has ended since."""
        return any(group in starter.begun_in(session) for starter in self._in_flight)

    def _refuse(self, session: Session, groups: Collection[int], phase: str) -> None:
        if any(self.has_begun(session, group) for group in groups):
            raise UnsupportedError(
                f'a {phase} would use parameters that the last backward has begun to update (overlap="backward"): call '
                "optimizer.step() after each backward(), or, where gradients are accumulated, run all but the last "
                "backward() inside `with optimizer.accumulating():`; a GradScaler, which may skip a step, needs overlap"
                '="forward" or "none"'
            )
