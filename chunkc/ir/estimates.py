"""List the operators with an estimated inner memory in a step, and describe them in messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from chunkc.ir.program import PhaseProgram, SegmentMemory


@dataclass(frozen=True)
class EstimatedOperator:
    """An operator ("aten::name") that chunkc has no rule for, or generated code of Inductor (`unread_wrapper`).

    `module`: the user's module of its first call or, if that is not known, of most of the segment. `nbytes`: the most
    that is planned for the inside of one of its calls.
    """

    operator: str
    module: str
    nbytes: int


def unknown_operators(
    programs: Iterable[PhaseProgram], memories: Mapping[str, SegmentMemory]
) -> tuple[EstimatedOperator, ...]:
    """List every call with an estimated scratch, in the order in which they run, with the memories' bytes."""
    estimated = []
    for program in programs:
        for call in program.calls:
            for step in memories[call.segment].steps:
                if step.estimate is not None:
                    module = call.module if step.position is None else call.origin(step).module
                    estimated.append(EstimatedOperator(step.estimate.operator, module, step.estimate.nbytes))
    return tuple(estimated)


def largest_of_each(calls: Iterable[EstimatedOperator]) -> tuple[EstimatedOperator, ...]:
    """Merge the calls of each operator: its first module, its largest bytes."""
    largest: dict[str, EstimatedOperator] = {}
    for call in calls:
        first = largest.get(call.operator, call)
        largest[call.operator] = EstimatedOperator(first.operator, first.module, max(first.nbytes, call.nbytes))
    return tuple(largest.values())


_UNREAD = "Inductor's code, which "


def unread_wrapper(reason: str) -> str:
    """Return the stand-in for an operator's name for generated Inductor code of unknown memory.

    Args:
        reason: the unknown part of the code, as in "uses new_helper".
    """
    return f"{_UNREAD}{reason}"


def not_known(operator: EstimatedOperator) -> str:
    """Return the sentence that names the operator and its module."""
    where = f" (in {operator.module})" if operator.module else ""
    return f"chunkc does not know how much memory {operator.operator}{where} takes inside"


def reckoned_with(operator: EstimatedOperator) -> str:
    """Return the phrase for the bytes that plans count for it."""
    if operator.operator.startswith(_UNREAD):
        return "all values of its graph at once"
    return "what it reads and returns once more"


def how_to_avoid(operator: EstimatedOperator) -> str:
    """Return the advice that replaces the estimate by a known number."""
    if operator.operator.startswith(_UNREAD):
        return 'compile with options={"codegen": "eager"}'
    return f'say it with chunkc.declare_scratch("{operator.operator}", function)'
