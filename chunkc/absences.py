"""What of the values that a forward saves is absent until its backward: the choices that there are, for the policy."""

from __future__ import annotations

from collections.abc import Iterator

from chunkc.captured import Captured, profile
from chunkc.ir.chunks import ChunkLayout
from chunkc.ir.hardware import Hardware
from chunkc.ir.items import ALL_PRESENT, Absence
from chunkc.ir.program import BACKWARD, FORWARD
from chunkc.ir.simulate import simulate, step_time
from chunkc.options import Activations
from chunkc.passes.planning import choose_leaving, fixed_nbytes, needed_nbytes, plan_phases
from chunkc.passes.rerun_choice import leanest_cuts, up_to


def leanest_absence(captured: Captured, activations: Activations, layout: ChunkLayout) -> Absence:
    """What is absent where a graph needs the least."""
    match activations:
        case "keep":
            return ALL_PRESENT
        case "offload":
            return _all_copied(captured)
        case "rerun":
            return Absence(rerun=up_to(captured.repeatable, _cuts(captured, layout)))
    ways = (_all_copied(captured), Absence(rerun=up_to(captured.repeatable, _cuts(captured, layout))))
    return min(ways, key=lambda absence: _needed_nbytes(captured, absence, layout))


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
        kept, leaving = profile(seen, layout), profile(captured.without(_all_copied(captured)), layout)
        yield Absence(home=choose_leaving(captured.may_leave, kept, leaving, layout, budget_nbytes))
        yield Absence(rerun=_as_needed(captured, layout, budget_nbytes))
    if least:
        yield least


def step_s(
    seen: Captured, layout: ChunkLayout, resident: frozenset[int], hardware: Hardware, budget_nbytes: int
) -> float:
    """Seconds that forward and backward of a graph take by the plan that they would get.

    Args:
        budget_nbytes: less what others hold.

    Raises:
        BudgetError: there is none.
    """
    needs = profile(seen, layout)
    plan = plan_phases(
        [(FORWARD, needs.forward), (BACKWARD, needs.backward)],
        layout,
        budget_nbytes=budget_nbytes,
        resident=resident,
        hardware=hardware,
        boundary_nbytes=needs.boundary_nbytes,
        saved=seen.absent,
    )
    costs_s = {call.name: call.cost_s for program in seen.programs.values() for call in program.calls}
    return step_time(simulate(plan.phases, costs_s, hardware)).total


def _all_copied(captured: Captured) -> Absence:
    return Absence(home=frozenset(one.storage for one in captured.may_leave))


def _needed_nbytes(captured: Captured, absence: Absence, layout: ChunkLayout) -> int:
    return needed_nbytes(profile(captured.without(absence), layout).passes, layout)


def _cuts(captured: Captured, layout: ChunkLayout) -> tuple[int, ...]:
    """Where the forward is cut into stretches that run again, so that the graph needs the least."""
    known: tuple[ChunkLayout, tuple[int, ...]] | None = captured.__dict__.get("_cuts")
    if known is None or known[0] is not layout:
        cuts = leanest_cuts(captured.repeatable, lambda gone: _needed_nbytes(captured, Absence(rerun=gone), layout))
        known = captured.__dict__["_cuts"] = layout, cuts
    return known[1]


def _as_needed(captured: Captured, layout: ChunkLayout, budget_nbytes: int) -> frozenset[str]:
    """The first stretches that run again so that the graph fits, where every chunk moves.

    Of like stretches the first are away for longest: they take the fewest seconds for each byte and moment.
    """
    cuts, room_nbytes = _cuts(captured, layout), budget_nbytes - fixed_nbytes(layout, frozenset())
    fewest, most = 1, len(cuts)
    while fewest < most:
        middle = (fewest + most) // 2
        gone = Absence(rerun=up_to(captured.repeatable, cuts, middle))
        fewest, most = (fewest, middle) if _needed_nbytes(captured, gone, layout) <= room_nbytes else (middle + 1, most)
    return up_to(captured.repeatable, cuts, most)
