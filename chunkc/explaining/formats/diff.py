"""Compare two explanations: their numbers, the chunks that move, and the plans' texts."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator

from chunkc.explaining.formats.fold import fold_names
from chunkc.explaining.formats.units import share, short_seconds
from chunkc.ir.explanation import Explanation
from chunkc.ir.units import short_nbytes

_COPIES = ("prefetch", "write_back")

_NBYTES: tuple[tuple[str, Callable[[Explanation], int]], ...] = (
    ("budget", lambda e: e.memory_budget_nbytes),
    ("smallest budget", lambda e: e.minimum_budget_nbytes),
    ("predicted peak", lambda e: e.predicted_peak_nbytes),
    ("activations, temporaries", lambda e: e.non_model_peak_nbytes),
    ("overhead, apart", lambda e: e.overhead_nbytes),
    ("at home", lambda e: e.home_nbytes),
    ("of these on disk", lambda e: e.disk_nbytes),
    ("chunk", lambda e: e.chunks.size_nbytes),
    ("to the device, a step", lambda e: e.traffic_nbytes.to_device),
    ("to home, a step", lambda e: e.traffic_nbytes.to_home),
)
_COUNTS: tuple[tuple[str, Callable[[Explanation], int]], ...] = (
    ("parameters", lambda e: e.num_parameters),
    ("ranks", lambda e: 1 if e.ranks is None else e.ranks.num_ranks),
    ("chunks", lambda e: e.chunks.count),
    ("resident chunks", lambda e: e.chunks.resident),
    ("calls", lambda e: len({moment.call for moment in e.moments})),
    ("operations", lambda e: len(e.moments)),
    ("events", lambda e: len(e.events)),
    ("operators guessed at", lambda e: len(e.estimates)),
)
_SECONDS: tuple[tuple[str, Callable[[Explanation], float]], ...] = (
    ("step", lambda e: e.step_time_s.total),
    ("forward and backward", lambda e: e.step_time_s.compute),
    ("optimizer", lambda e: e.step_time_s.optimizer),
    ("stall", lambda e: e.step_time_s.stall),
    ("link to the device", lambda e: e.step_time_s.to_device),
    ("link to home", lambda e: e.step_time_s.to_home),
)
_WORDS: tuple[tuple[str, Callable[[Explanation], str]], ...] = (
    ("model", lambda e: e.model),
    ("hardware", lambda e: e.hardware),
    ("codegen", lambda e: e.codegen),
    ("fits", lambda e: _yes(e.fits)),
    ("home fits the host", lambda e: _yes(e.host_fits)),
    ("peak at", lambda e: " ".join(filter(None, (e.peak.moment, e.peak.op, e.peak.module)))),
)


def diff(before: Explanation, after: Explanation) -> str:
    """Return numbers with their change, chunks that move in only one of them, and a unified diff of the plans, as text.

    Equal values have no line. Equal explanations give a single line that says so.
    """
    if before == after:
        return "the two explanations are equal\n"
    parts = ["\n".join(_summary(before, after)), "\n".join(_residency(before, after)), _plans(before, after)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _summary(before: Explanation, after: Explanation) -> Iterator[str]:
    rows = list(_rows(before, after))
    if not rows:
        yield "all numbers of the summary are the same"
        return
    titles = ("", "before", "after", "change")
    widths = [max(len(row[column]) for row in [titles, *rows]) for column in range(3)]
    for row in [titles, *rows]:
        yield f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]}".rstrip()


def _rows(before: Explanation, after: Explanation) -> Iterator[tuple[str, str, str, str]]:
    for label, word in _WORDS:
        if word(before) != word(after):
            yield label, word(before), word(after), ""
    for label, nbytes in _NBYTES:
        old, new = nbytes(before), nbytes(after)
        if old != new:
            yield label, short_nbytes(old), short_nbytes(new), f"{new - old:+,} bytes{_relative(old, new)}"
    for label, count in _COUNTS:
        old, new = count(before), count(after)
        if old != new:
            yield label, f"{old:,}", f"{new:,}", f"{new - old:+,}"
    for label, seconds in _SECONDS:
        old_s, new_s = seconds(before), seconds(after)
        if old_s != new_s:
            change = f"{'+' if new_s > old_s else '-'}{short_seconds(abs(new_s - old_s))}"
            yield label, short_seconds(old_s), short_seconds(new_s), f"{change}{_relative(old_s, new_s)}"


def _residency(before: Explanation, after: Explanation) -> Iterator[str]:
    """Yield chunks that begin or cease to move, and chunks that move another number of times."""
    old, new = _moves(before), _moves(after)
    moved_no_more, moved_now = old.keys() - new.keys(), new.keys() - old.keys()
    otherwise = {chunk for chunk in old.keys() & new.keys() if old[chunk] != new[chunk]}
    for chunks, what in (
        (moved_no_more, "moved before, not after"),
        (moved_now, "moved after, not before"),
        (otherwise, "moved more or less often"),
    ):
        if chunks:
            yield f"{what}: {fold_names(chunks)}"


def _moves(explanation: Explanation) -> dict[str, int]:
    """Return the number of copies of each chunk in one step."""
    counts: dict[str, int] = {}
    for event in explanation.events:
        if event.kind in _COPIES:
            counts[event.name] = counts.get(event.name, 0) + 1
    return counts


def _plans(before: Explanation, after: Explanation) -> str:
    if before.plan_text == after.plan_text:
        return "the plans are the same"
    lines = difflib.unified_diff(
        before.plan_text.splitlines(), after.plan_text.splitlines(), "before", "after", lineterm="", n=2
    )
    return "\n".join(line.rstrip() for line in lines)


def _relative(old: float, new: float) -> str:
    return f", {'+' if new > old else '-'}{share(abs(new - old), abs(old))}" if old else ""


def _yes(value: bool) -> str:
    return "yes" if value else "no"
