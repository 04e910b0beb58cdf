"""Render the answer to `--why` as tables: the choice, the events of the model's part, the costs of alternatives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from chunkc.explaining.formats.units import short_seconds
from chunkc.ir.explanation import Alternative, Happening, Why
from chunkc.ir.units import short_nbytes

MAX_HAPPENINGS = 40
"""The most events to show; JSON has all."""


def why_rows(why: Why, step_time_s: float, budget_nbytes: int) -> Iterator[tuple[str, Sequence[Sequence[str]]]]:
    """Yield titles, each with the rows below it.

    Args:
        step_time_s: of the planned step.
        budget_nbytes: of the planned step.
    """
    yield f"{why.name}: what the plan does with it", [(sentence,) for sentence in why.chosen]
    folded = _without_tiles(why.happenings)
    rows = [_row(happening, number) for happening, number in folded[:MAX_HAPPENINGS]]
    if len(folded) > len(rows):
        rows.append((f"{len(folded) - len(rows):,} more: --format json has them",))
    yield "what happens to it, in one step", rows or [("nothing: it is where it is all the time",)]
    if why.alternatives:
        planned = ("as it is planned", short_seconds(step_time_s), "")
        alternatives = [_alternative(alternative, step_time_s) for alternative in why.alternatives]
        yield f"with all else as it is, in {short_nbytes(budget_nbytes)}", [planned, *alternatives]


def _without_tiles(happenings: Sequence[Happening]) -> list[tuple[Happening, int]]:
    """Fold the tiles of an update: return happenings, each with the number that it stands for.

    For each phase, the tiles that are fetched, late, or copied home are one line each, at the time of the first.
    """
    folded: dict[object, tuple[Happening, int]] = {}
    for index, new in enumerate(happenings):
        if not new.item.endswith("]"):
            folded[index] = new, 1
        elif new.copy_s or new.stall_s:
            first, number = folded.get((new.phase, new.what), (replace(new, nbytes=0, copy_s=0.0, stall_s=0.0), 0))
            nbytes, copy_s, stall_s = first.nbytes + new.nbytes, first.copy_s + new.copy_s, first.stall_s + new.stall_s
            folded[new.phase, new.what] = replace(first, nbytes=nbytes, copy_s=copy_s, stall_s=stall_s), number + 1
    return list(folded.values())


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
