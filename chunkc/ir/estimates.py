"""Operators in a step whose inner memory is a guess, for those who want to know."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from chunkc.ir.program import PhaseProgram, SegmentMemory


@dataclass(frozen=True)
class EstimatedOperator:
    """An operator ("aten::name") that chunkc has no rule for, or code of Inductor's (`unread_wrapper`).

    `module`: the user's module of its first call, or, where that is not known, of most of the segment. `nbytes`: the
    most that one of its calls is reckoned to take inside.
    """

    operator: str
    module: str
    nbytes: int


def unknown_operators(
    programs: Iterable[PhaseProgram], memories: Mapping[str, SegmentMemory]
) -> tuple[EstimatedOperator, ...]:
    """Every call whose scratch is a guess, in the order in which they run; bytes as the memories have them."""
    found = []
    for program in programs:
        for call in program.calls:
            for step in memories[call.segment].steps:
                if step.estimate is not None:
                    module = call.module if step.position is None else call.origin(step).module
                    found.append(EstimatedOperator(step.estimate.operator, module, step.estimate.nbytes))
    return tuple(found)


def largest_of_each(calls: Iterable[EstimatedOperator]) -> tuple[EstimatedOperator, ...]:
    """One for each operator: its first module, its largest bytes."""
    found: dict[str, EstimatedOperator] = {}
    for call in calls:
        first = found.get(call.operator, call)
        found[call.operator] = EstimatedOperator(first.operator, first.module, max(first.nbytes, call.nbytes))
    return tuple(found.values())


_UNREAD = "Inductor's code, which "


def unread_wrapper(reason: str) -> str:
    """What stands for an operator's name where it is code that Inductor generated whose memory cannot be read off.

    `reason`: what the code does that nobody knows, as in "uses new_helper".
    """
    return f"{_UNREAD}{reason}"


def not_known(operator: EstimatedOperator) -> str:
    """What is to be said of it."""
    where = f" (in {operator.module})" if operator.module else ""
    return f"chunkc does not know how much memory {operator.operator}{where} takes inside"


def reckoned_with(operator: EstimatedOperator) -> str:
    """What plans take for it."""
    if operator.operator.startswith(_UNREAD):
        return "all values of its graph at once"
    return "what it reads and returns once more"


def how_to_avoid(operator: EstimatedOperator) -> str:
    """What makes it no guess any more."""
    if operator.operator.startswith(_UNREAD):
        return 'compile with options={"codegen": "eager"}'
    return f'say it with chunkc.declare_scratch("{operator.operator}", function)'
