"""The runs of a step's graphs, and what others hold meanwhile: as a session counts it when the model trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from chunkc.captured import Captured
from chunkc.explaining.offline import OfflineStep
from chunkc.explaining.offline_calls import PhaseCall
from chunkc.ir.program import BACKWARD, FORWARD
from chunkc.steps import Positions


@dataclass(frozen=True)
class Run:
    """One run of a graph's phase.

    Attributes:
        number: which of the forwards this is, or is the backward of.
        others_nbytes: what others hold meanwhile; below zero where values of its own are gone, by so many bytes.
        gone: storages that the backward's program has as held, and that are gone.
    """

    graph: int
    phase: str
    number: int
    others_nbytes: int = 0
    gone: frozenset[str] = frozenset()

    @property
    def held_nbytes(self) -> int:
        """What is planned for."""
        return max(0, self.others_nbytes)


def runs_of(step: OfflineStep, compiled: Callable[[int], Captured]) -> Iterator[Run]:
    """The runs of a step, in order. A single graph runs beside nothing.

    Args:
        compiled: what each of the step's graphs is compiled to; asked again after each of its runs.
    """
    if len(step.calls) == 1:
        yield from (Run(0, phase, 0) for phase in compiled(0).programs)
        return
    watched: dict[int, int] = {}  # storage -> bytes it stands for, as `session.LiveValues` has them
    pending: dict[int, list[tuple[int, PhaseCall]]] = {}
    num_forwards = 0
    for call in step.calls:
        own = compiled(call.graph)
        live = {storage: nbytes for storage, nbytes in watched.items() if storage in call.alive}
        if call.phase == FORWARD:
            yield Run(call.graph, FORWARD, num_forwards, _beside_forward(step, call, own, live))
            watched |= _values(step, call, compiled(call.graph))
            pending.setdefault(call.graph, []).append((num_forwards, call))
            num_forwards += 1
        else:
            number, forward = pending[call.graph].pop()
            gone = frozenset(
                storage
                for storage, at in _storages(forward, own).items()
                if own.backward is not None and storage in own.backward.held and at not in call.alive
            )
            yield Run(call.graph, BACKWARD, number, sum(live.values()) - own.between_nbytes, gone)
            watched |= {at: step.storage_nbytes[at] for at in call.arguments[-len(own.tangents) :] if at is not None}


def _beside_forward(step: OfflineStep, call: PhaseCall, own: Captured, live: Mapping[int, int]) -> int:
    """What others hold beside a forward, and its inputs' storages as far as the program has less of them."""
    arguments = (call.arguments[position] for position in Positions.of(own.forward).inputs)
    inputs = {storage for storage in arguments if storage is not None}
    others = sum(nbytes for storage, nbytes in live.items() if storage not in inputs)
    given = sum(step.storage_nbytes[storage] for storage in inputs)
    return own.held_beside_forward(others, given)


def update_held_nbytes(step: OfflineStep, captured: Sequence[Captured]) -> int:
    """What the caller still holds of the latest forward when the optimizer steps."""
    last = captured[next((call.graph for call in reversed(step.calls) if call.phase == FORWARD), 0)]
    return last.caller_nbytes


def _values(step: OfflineStep, forward: PhaseCall, own: Captured) -> dict[int, int]:
    """What a session watches of a forward: its inputs and outputs, and one saved value for all."""
    at = Positions.of(own.forward)
    values = [
        *(forward.arguments[position] for position in at.inputs),
        *(_output(forward, own, position) for position in at.user_outputs),
    ]
    found = {value: step.storage_nbytes[value] for value in values if value is not None}
    for position in at.saved:  # they live and die together: one stands for all
        if (first := _output(forward, own, position)) is not None:
            found[first] = own.saved_nbytes
            break
    return found


def _output(forward: PhaseCall, own: Captured, position: int) -> int | None:
    """The storage of a forward's output; None of a saved value that only the hardware's operators have.

    The step ran with the CPU's operators. What they return to the caller is the same on every device.
    """
    if position < own.forward.num_user_outputs:
        return forward.outputs[position]
    return dict(zip(forward.names, forward.outputs, strict=True)).get(own.forward.outputs[position])


def _storages(forward: PhaseCall, own: Captured) -> dict[str, int]:
    """The program's name of every storage that a forward takes or returns -> its number."""
    program, storage_of = own.forward, own.forward.value_storages()
    names = [
        *zip(program.inputs.values(), forward.arguments, strict=True),
        *((storage_of[v], _output(forward, own, i)) for i, v in enumerate(program.outputs) if v is not None),
    ]
    return {name: at for name, at in names if at is not None}
