"""The beginning of a phase of a model that is cut over ranks: all come to the same one, and plan it beside the same."""

from __future__ import annotations

from collections.abc import Callable, Collection

from chunkc.captured import Captured, profile
from chunkc.ir.errors import UnsupportedError
from chunkc.ir.program import BACKWARD
from chunkc.policy import Around
from chunkc.ranks import begin_phase
from chunkc.runtime.used_gradients import gradient_of
from chunkc.session import Session


def held_on_any_rank(
    session: Session,
    phase: str,
    groups: Collection[int],
    captured: Captured,
    beside: Callable[[], int],
    around: Around,
) -> Callable[[], int]:
    """What is held beside a phase on any rank: they plan alike, and none begins a phase that others do not.

    Each call of it is an agreement of all ranks; what stands outdated on any of them is gathered in the phase. Where
    one process trains the model it is `beside`.

    Args:
        phase: as messages name it; begins with the phase's name.
        groups: that the graph uses.

    Raises:
        UnsupportedError: somebody looks at gradients on their way; or ranks are to keep gradients that are to be added
            to others.
    """
    transport, store = session.transport, session.store
    if transport is None:
        return beside
    if around.hooked:
        raise UnsupportedError(
            f"somebody looks at the gradient of {min(around.hooked)} on its way (a hook, or a tensor that is kept "
            "of an earlier .grad), and this rank has a part of it only: remove hooks of distributed parameters, "
            "and read .grad after backward()"
        )
    needs = profile(captured, store.layout).passes
    facts = {
        "the phase": f"{phase}, {around.cold_backward}, {sorted(around.kept_inputs)}",
        "the sizes of its inputs": str(sum(position.non_model_nbytes for position in needs)),
    }
    if phase.startswith(BACKWARD):
        _refuse_to_keep(session, groups)
        facts["accumulating()"] = str(transport.accumulating)
        facts["gradients that wait for their exchange"] = str(store.standing.local_gradients(groups, store.parameter))

    def of_all() -> int:
        nbytes, outdated = begin_phase(transport, beside(), store.outdated(groups), facts)
        store.standing.current -= outdated
        return nbytes

    return of_all


def _refuse_to_keep(session: Session, groups: Collection[int]) -> None:
    """Where ranks keep whole gradients until a later backward, there is nothing yet that these are to be added to."""
    transport, store = session.transport, session.store
    if transport is None or not transport.accumulating:
        return
    for index in groups:
        group = store.layout.groups[index]
        names = [s.spec.name for s in group.slices] if len(group.standing_kinds) > 1 else []
        for name in names:
            if gradient_of(store.parameter(name)) is not None:
                raise UnsupportedError(
                    f"{name} has a gradient, which ranks have exchanged already: call optimizer.zero_grad() before the "
                    "first backward inside `with optimizer.accumulating():`"
                )
