"""What of the values that a forward saves is absent until its backward: the choices that there are, for the policy."""

from __future__ import annotations

from collections.abc import Iterator

from chunkc.captured import Captured, profile
from chunkc.ir.chunks import ChunkLayout
from chunkc.ir.items import ALL_PRESENT, Absence
from chunkc.options import Activations
from chunkc.passes.planning import choose_leaving, needed_nbytes
from chunkc.passes.rerun_choice import leanest


def leanest_absence(captured: Captured, activations: Activations, layout: ChunkLayout) -> Absence:
    """What is absent where a graph needs the least."""
    match activations:
        case "keep":
            return ALL_PRESENT
        case "rerun":
            return Absence(rerun=_all_rerun(captured, layout))
        case _:
            return Absence(home=frozenset(one.storage for one in captured.may_leave))


def leanest_form(captured: Captured, activations: Activations, layout: ChunkLayout) -> Captured:
    """The same graph where it needs the least."""
    return captured.without(leanest_absence(captured, activations, layout))


def absences(
    captured: Captured, seen: Captured, activations: Activations, layout: ChunkLayout, budget_nbytes: int
) -> Iterator[Absence]:
    """What may be absent, in the order in which it is tried.

    Args:
        seen: the graph as its surroundings are, with nothing absent.
        budget_nbytes: less what others hold.
    """
    least = leanest_absence(captured, activations, layout)
    if activations in ("keep", "auto") or not least:
        yield ALL_PRESENT
    if activations == "auto" and least:
        kept, leaving = profile(seen, layout), profile(captured.without(least), layout)
        yield Absence(home=choose_leaving(captured.may_leave, kept, leaving, layout, budget_nbytes))
    if least:
        yield least


def _all_rerun(captured: Captured, layout: ChunkLayout) -> frozenset[str]:
    """The storages to make again so that the graph needs the least."""
    known: tuple[ChunkLayout, frozenset[str]] | None = captured.__dict__.get("_all_rerun")
    if known is None or known[0] is not layout:
        repeatable = captured.repeatable

        def needs(gone: frozenset[str]) -> int:
            return needed_nbytes(profile(captured.without(Absence(rerun=gone)), layout).passes, layout)

        found = frozenset[str]() if repeatable is None else leanest(repeatable, needs)
        known = captured.__dict__["_all_rerun"] = layout, found
    return known[1]
