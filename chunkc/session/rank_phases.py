"""Begin a phase on all ranks of a sharded model: they agree on the phase, and plan for the same external bytes.

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
from chunkc.passes.planning.step_profile import CallNeeds
from chunkc.policy.captured_step import profile
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
class PhaseOfRanks:
    """A phase in which ranks exchange data, and that all of them are about to begin.

    Attributes:
        name: the phase's, as messages show it.
        groups: that the graph uses.
        step: at this rank's sizes; once `max_external_nbytes` was called, the step that all ranks plan.
    """

    session: Session
    transport: Transport
    name: str
    groups: Collection[int]
    code: Code
    step: SizedStep
    context: PhaseContext
    own_external: Callable[[], int]

    def __post_init__(self) -> None:
        self._own = self.step
        self._needed = profile(self.context.applied_to(self._own.captured), self.session.store.layout).call_needs

    def max_external_nbytes(self) -> int:
        """Return the most external bytes of any rank.

        Each call is an agreement of all ranks: none begins a phase that others do not, and replicated buffers that are
        outdated on any rank are gathered in it.

        Raises:
            UnsupportedError: a hook or a kept tensor reads gradients on their way; or ranks are to keep gradients that
                are to be added to others.
            DistributedError: ranks have come to other phases or programs, or one is gone.
        """
        store = self.session.store
        if self.context.hooked:
            raise UnsupportedError(
                f"the gradient of {min(self.context.hooked)} is looked at on its way (a hook, or a tensor that is "
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
            waiting = store.replicated.local_gradients(self.groups, store.views.parameter)
            facts["accumulating()"] = str(self.transport.accumulating)
            facts["gradients that wait for their exchange"] = str(waiting)
        here = Here(
            self.own_external(),
            tuple(store.outdated(self.groups)),
            self._needed.digest,
            self._own.history,
            self.code.exact,
            self.code.kind,
        )
        ranks = begin_phase(self.transport, here, facts)
        store.replicated.current -= {index for rank in ranks for index in rank.outdated}
        self.step = self._agreed(ranks)
        return max(rank.nbytes for rank in ranks)

    def _agreed(self, ranks: Sequence[Here]) -> SizedStep:
        needs = tuple(rank.needs for rank in ranks)
        if len(set(needs)) == 1:
            self._with_one_history(self._own, [rank.history for rank in ranks])
            return self._own
        step = self._own.agreed.find(needs)
        histories = self._collect(None if step is None else step.history)
        if step is None or None in histories:  # then on all ranks
            most = CallNeeds.most(self._collect(self._needed))
            captured = replace(self._own.captured, at_least=most)
            step = self._own.agreed.keep(needs, SizedStep(Forms(captured)))
        self._with_one_history(step, histories)
        return step

    def _with_one_history(self, step: SizedStep, histories: Sequence[str | None]) -> None:
        """Forget the step's plans if ranks made theirs in different ways, as after one compiled it anew."""
        if None in histories or len(set(histories)) > 1:
            self.transport.num_renewed += 1
            step.begin_anew(str(self.transport.num_renewed))

    def _collect(self, value: T) -> list[T]:
        return together(self.transport, f"the sizes of {self.name}", lambda: value, DistributedError)


def whole_on_all(session: Session, layout: ChunkLayout, *, is_new: bool) -> frozenset[int]:
    """Return the groups that all ranks choose to replicate when a graph is compiled.

    A graph without new parameters may not be compiled on other ranks now. Then the replicated groups stay as they are,
    and ranks release them together, when a phase begins.

    Raises:
        DistributedError: a rank is gone.
    """
    if not is_new or session.transport is None:
        return session.store.layout.replicated_by_choice
    chosen = together(session.transport, "compilation", lambda: layout.replicated_by_choice, DistributedError)
    return frozenset.intersection(*chosen)


@contextmanager
def before_layers(session: Session, name: str, groups: Collection[int]) -> Iterator[None]:
    """Wait, once a phase is planned inside, until all ranks that compute layers together are ready for it.

    Ranks of a layer have plans of their own, and exchange data within the phase. So none begins it alone.

    Raises:
        DistributedError: ranks have come to other phases, or with other options, or one is gone or cannot go on.
    """
    transport = session.transport
    if transport is None or transport.world is transport or not groups:
        yield
        return
    try:
        yield
    except BudgetError as error:  # all that plan together raise it, and tell the other ranks
        refuse(transport.world, error)
        raise
    facts = {
        "the phase": name,
        OPTIMIZER_STEPS: transport.steps,
        "the options": repr(session.options.in_common.model_copy(update={"memory_budget": "auto"})),
    }
    agree(transport.world, facts)


def _refuse_to_keep(session: Session, groups: Collection[int]) -> None:
    """Refuse to accumulate replicated gradients onto gradients that ranks have exchanged already."""
    transport, store = session.transport, session.store
    if transport is None or not transport.accumulating:
        return
    for index in groups:
        group = store.layout.groups[index]
        names = [s.spec.name for s in group.slices] if len(group.replicated_kinds) > 1 else []
        for name in names:
            if gradient_of(store.views.parameter(name)) is not None:
                raise UnsupportedError(
                    f"{name} has a gradient, which ranks have exchanged already: call optimizer.zero_grad() before the "
                    "first backward inside `with optimizer.accumulating():`"
                )
