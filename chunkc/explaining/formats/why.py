"""The answer to `--why`, as tables: what was chosen, what happens to the part, what the alternatives cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from chunkc.explaining.formats.units import short_nbytes, short_seconds
from chunkc.ir.explanation import Alternative, Happening, Why

MAX_HAPPENINGS = 40
"""That are shown; JSON has all."""


def why_rows(why: Why, step_time_s: float, budget_nbytes: int) -> Iterator[tuple[str, Sequence[Sequence[str]]]]:
    """Titles, each with the rows below it.

    Args:
        step_time_s: of the step as it is planned.
        budget_nbytes: that it is planned for.
    """
    yield f"{why.name}: what the plan does with it", [(sentence,) for sentence in why.chosen]
    folded = _without_tiles(why.happenings)
    rows = [_row(*one) for one in folded[:MAX_HAPPENINGS]]
    if len(folded) > len(rows):
        rows.append((f"{len(folded) - len(rows):,} more: --format json has them",))
    yield "what happens to it, in one step", rows or [("nothing: it is where it is all the time",)]
    if why.alternatives:
        planned = ("as it is planned", short_seconds(step_time_s), "")
        others = [_alternative(one, step_time_s) for one in why.alternatives]
        yield f"with all else as it is, in {short_nbytes(budget_nbytes)}", [planned, *others]


def _without_tiles(happenings: Sequence[Happening]) -> list[tuple[Happening, int]]:
    """Each with how many it stands for. An update goes over its chunks part by part: of each phase, the parts that are
    fetched, late, or copied home are one line, where the first begins."""
    found: dict[object, tuple[Happening, int]] = {}
    for index, one in enumerate(happenings):
        if not one.item.endswith("]"):
            found[index] = one, 1
        elif one.copy_s or one.stall_s:
            first, number = found.get((one.phase, one.what), (replace(one, nbytes=0, copy_s=0.0, stall_s=0.0), 0))
            nbytes, copy_s, stall_s = first.nbytes + one.nbytes, first.copy_s + one.copy_s, first.stall_s + one.stall_s
            found[one.phase, one.what] = replace(first, nbytes=nbytes, copy_s=copy_s, stall_s=stall_s), number + 1
    return list(found.values())


def _row(one: Happening, number: int) -> tuple[str, ...]:
    took = f"in {short_seconds(one.copy_s)}" if one.copy_s else ""
    took = f"{short_seconds(one.stall_s)} late" if one.stall_s else took
    before = " of ".join(filter(None, (one.before, one.module)))
    when = f"before {before}" if before else "at the end"
    item = one.item
    if one.item.endswith("]"):
        item, when = f"{number:,} part{'s' * (number > 1)} of chunks", "in an update"
    return short_seconds(one.at_s), one.phase, item, one.what, short_nbytes(one.nbytes), took, when


def _alternative(one: Alternative, step_time_s: float) -> tuple[str, ...]:
    if one.step_time_s is None:
        return one.what, "", f"needs a budget of {short_nbytes(one.minimum_nbytes or 0)}"
    difference = one.step_time_s - step_time_s
    if abs(difference) < 1e-9:
        return one.what, short_seconds(one.step_time_s), "as fast"
    return (
        one.what,
        short_seconds(one.step_time_s),
        f"{short_seconds(abs(difference))} {'slower' if difference > 0 else 'faster'}",
    )
