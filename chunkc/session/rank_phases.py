"""The beginning of a phase of a model that is cut over ranks: all come to the same one, and plan it beside the same.

Ranks' batches may have other shapes. Then each has its own sizes, and may have compiled its own graph: what they have
in common is the program, call by call. They plan for the most that any of them needs at each call, so that exchanges
come in the same order everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

from chunkc.distributed.agreement import Here, agree, begin_phase, refuse, together
from chunkc.ir.errors import BudgetError, DistributedError, UnsupportedError
from chunkc.ir.layout import ChunkLayout
from chunkc.ir.program import BACKWARD
from chunkc.policy.captured_step import CallNeeds
from chunkc.policy.state import Forms, PhaseContext
from chunkc.runtime.distributed.transport import Transport
from chunkc.runtime.store.consumed_gradients import gradient_of
from chunkc.session.session import Session
from chunkc.tracing.steps import SizedStep

T = TypeVar("T")

OPTIMIZER_STEPS = "the optimizer's steps, or in their hyper-parameters"


@dataclass(frozen=True)
class Code:
    """A graph as ranks compare it.

    Attributes:
        program: what it computes of what, without sizes.
        exact: its code.
        kind: whether its sizes are symbols, and how many.
    """

    program: str
    exact: str
    kind: str


@dataclass
class PhaseOfAll:
    """A phase that all ranks are about to begin.

    Attributes:
        name: the phase's, as messages show it.
        groups: that the graph uses.
        step: at this rank's sizes; once `beside` was asked, the one that all plan.
    """

    session: Session
    transport: Transport
    name: str
    groups: Collection[int]
    code: Code
    step: SizedStep
    context: PhaseContext
    own_beside: Callable[[], int]

    def __post_init__(self) -> None:
        self._own = self.step
        self._needed = CallNeeds.of(self.context.applied_to(self._own.captured), self.session.store.layout)

    def beside(self) -> int:
        """What is held beside the phase on any rank. Each call is an agreement of all: none begins a phase that others
        do not, and what stands outdated on any of them is gathered in it.

        Raises:
            UnsupportedError: somebody looks at gradients on their way; or ranks are to keep gradients that are to be
                added to others.
            DistributedError: ranks have come to other phases or programs, or one is gone.
        """
        store = self.session.store
        if self.context.hooked:
            raise UnsupportedError(
                f"somebody looks at the gradient of {min(self.context.hooked)} on its way (a hook, or a tensor that is "
                "kept of an earlier .grad), and this rank has a part of it only: remove hooks of distributed "
                "parameters, and read .grad after backward()"
            )
        facts = {
            "the phase": f"{self.name}{', cold' if self.context.cold_backward else ''}",
            "the program of the model": self.code.program,
            OPTIMIZER_STEPS: self.transport.steps,
        }
        if self.name.startswith(BACKWARD):
            _refuse_to_keep(self.session, self.groups)
            waiting = store.replicated.local_gradients(self.groups, store.parameter)
            facts["accumulating()"] = str(self.transport.accumulating)
            facts["gradients that wait for their exchange"] = str(waiting)
        here = Here(
            self.own_beside(),
            tuple(store.outdated(self.groups)),
            self._needed.digest,
            self._own.history,
            self.code.exact,
            self.code.kind,
        )
        said = begin_phase(self.transport, here, facts)
        store.replicated.current -= {index for one in said for index in one.outdated}
        self.step = self._agreed(said)
        return max(one.nbytes for one in said)

    def _agreed(self, said: Sequence[Here]) -> SizedStep:
        needs = tuple(one.needs for one in said)
        if len(set(needs)) == 1:
            self._with_one_history(self._own, [one.history for one in said])
            return self._own
        found = self._own.agreed.find(needs)
        histories = self._of_all(None if found is None else found.history)
        if found is None or None in histories:  # then on all ranks
            most = CallNeeds.most(self._of_all(self._needed))
            captured = replace(self._own.captured, at_least=most)
            found = self._own.agreed.keep(needs, SizedStep(Forms(captured)))
        self._with_one_history(found, histories)
        return found

    def _with_one_history(self, step: SizedStep, histories: Sequence[str | None]) -> None:
        """Where ranks' plans of a step have come about otherwise, as one has compiled it anew, all forget theirs."""
        if None in histories or len(set(histories)) > 1:
            self.transport.num_renewed += 1
            step.begin_anew(str(self.transport.num_renewed))

    def _of_all(self, value: T) -> list[T]:
        return together(self.transport, f"the sizes of {self.name}", lambda: value, DistributedError)


def whole_on_all(session: Session, layout: ChunkLayout, *, is_new: bool) -> frozenset[int]:
    """Of the groups that this rank would have whole by choice when a graph is compiled: those that all have so.

    Where the graph brings no parameters, another rank may not compile now. What stands is what it was then, and ranks
    let go of it together, when a phase begins.

    Raises:
        DistributedError: a rank is gone.
    """
    if not is_new or session.transport is None:
        return session.store.layout.replicated_by_choice
    of_all = together(session.transport, "compilation", lambda: layout.replicated_by_choice, DistributedError)
    return frozenset.intersection(*of_all)


def phase_of_all(
    session: Session,
    name: str,
    groups: Collection[int],
    code: Code | None,
    step: SizedStep,
    context: PhaseContext,
    beside: Callable[[], int],
) -> PhaseOfAll | None:
    """A phase at this rank's sizes, where ranks exchange something in it; None: it is this process's alone."""
    if session.transport is None or code is None or not groups:
        return None
    return PhaseOfAll(session, session.transport, name, groups, code, step, context, beside)


@contextmanager
def before_layers(session: Session, name: str, groups: Collection[int]) -> Iterator[None]:
    """Around the plan of a phase: where ranks compute layers together, all are ready for it when this ends.

    Those of a layer have plans of their own, and meet in the middle of the phase. So none begins it alone.

    Raises:
        DistributedError: ranks have come to other phases, or with other options, or one is gone or cannot go on.
    """
    transport = session.transport
    if transport is None or transport.world is transport or not groups:
        yield
        return
    try:
        yield
    except BudgetError as error:  # those that plan together all raise it, and tell the others
        refuse(transport.world, error)
        raise
    facts = {
        "the phase": name,
        OPTIMIZER_STEPS: transport.steps,
        "the options": repr(session.options.in_common.model_copy(update={"memory_budget": "auto"})),
    }
    agree(transport.world, facts)


def _refuse_to_keep(session: Session, groups: Collection[int]) -> None:
    """Where ranks keep whole gradients until a later backward, there is nothing yet that these are to be added to."""
    transport, store = session.transport, session.store
    if transport is None or not transport.accumulating:
        return
    for index in groups:
        group = store.layout.groups[index]
        names = [s.spec.name for s in group.slices] if len(group.replicated_kinds) > 1 else []
        for name in names:
            if gradient_of(store.parameter(name)) is not None:
                raise UnsupportedError(
                    f"{name} has a gradient, which ranks have exchanged already: call optimizer.zero_grad() before the "
                    "first backward inside `with optimizer.accumulating():`"
                )
