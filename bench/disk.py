"""The suite `disk`: the demonstration's GPT under smaller and smaller budgets, model data in RAM or on disk.

A section per home. Budgets are parts of what plain `torch.compile` with a fused AdamW was measured to need;
the allocator holds every chunkc subject to its budget. All subjects of a section take turns.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from demo import SIZES
from driving import DoesNotFit, SubjectProcess, Turn, interleave
from metrics import Metric, Row, Section, flat, one, paired_ratios, setting_of
from subject import SubjectSpec

HOMES = ("cpu", "disk")
FRACTIONS = {"100 %": Fraction(1), "60 %": Fraction(3, 5), "40 %": Fraction(2, 5), "33 %": Fraction(1, 3)}
PLAIN = "plain"
MINIMUM = "minimum"

Show = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Size:
    """A size of the demonstration, and how often it is measured."""

    name: str
    num_rounds: int
    num_steps: int


FULL = Size("small", num_rounds=8, num_steps=3)
SMALL = Size("tiny", num_rounds=1, num_steps=2)


def run(*, is_small: bool, show: Show) -> Iterator[Section]:
    """Measure; yields each home's section as soon as it is there.

    Raises:
        SubjectFailed: a subject's process failed.
    """
    size = SMALL if is_small else FULL
    num_subjects = len(FRACTIONS) + 2
    num_parts = len(HOMES) * (num_subjects * (1 + size.num_rounds) + 1)
    num_done = 0

    def advance(what: str) -> None:
        nonlocal num_done
        show(what, num_done, num_parts)
        num_done += 1

    with TemporaryDirectory(prefix="chunkc-bench-") as cache:
        for home in HOMES:
            yield _section(size, home, Path(cache), advance)


def budgets_nbytes(plain_peak_nbytes: int, minimum_nbytes: int) -> dict[str, int]:
    """Budgets by name, largest first: parts of plain's peak, then the minimum."""
    parts = {name: int(plain_peak_nbytes * part) for name, part in FRACTIONS.items()}
    return {**parts, MINIMUM: minimum_nbytes}


def _section(size: Size, home: str, cache: Path, advance: Callable[[str], None]) -> Section:
    model, batch_size = SIZES[size.name]
    plain_spec = SubjectSpec(model, batch_size, is_metered=True)

    def spec(budget_nbytes: int, *, is_limited: bool = True) -> SubjectSpec:
        options = {"memory_budget": budget_nbytes, "home": home, "whole_graph": "never"}
        return SubjectSpec(model, batch_size, options, is_metered=True, is_placed=True, is_limited=is_limited)

    with ExitStack() as stack:
        advance(f"{home}: compiling {PLAIN}")
        subjects = {PLAIN: stack.enter_context(SubjectProcess(plain_spec, cache))}
        subjects[PLAIN].step(3)
        plain_peak_nbytes = subjects[PLAIN].report()["measured_peak_nbytes"]
        advance(f"{home}: asking for the minimum")
        budgets = budgets_nbytes(plain_peak_nbytes, _minimum_nbytes(spec(1, is_limited=False), cache))
        notes: dict[str, str] = {}
        for name, budget_nbytes in budgets.items():
            advance(f"{home}: compiling {name}")
            subject = stack.enter_context(SubjectProcess(spec(budget_nbytes), cache))
            try:
                subject.step(2)
            except DoesNotFit as error:
                notes[name] = f"does not fit: needs {error.minimum_nbytes / 2**20:.1f} MiB"
                continue
            subjects[name] = subject
        turns = interleave(
            subjects,
            num_rounds=size.num_rounds,
            num_steps=size.num_steps,
            on_turn=lambda name: advance(f"{home}: training, {name}"),
        )
        reports = {name: subject.report() for name, subject in subjects.items()}
        ready = subjects[PLAIN].ready
    rows = [Row({"budget": "none (plain)"}, _metrics(turns[PLAIN], turns[PLAIN], reports[PLAIN]))]
    for name, budget_nbytes in budgets.items():
        metrics = {"bytes": one("nbytes", budget_nbytes)}
        if name in turns:
            metrics |= _metrics(turns[name], turns[PLAIN], reports[name])
        rows.append(Row({"budget": name}, metrics, notes.get(name, "")))
    setting = setting_of(
        model,
        batch_size,
        home=home,
        num_parameters=ready["num_parameters"],
        num_threads=ready["num_threads"],
        num_rounds=size.num_rounds,
        num_steps_per_round=size.num_steps,
    )
    return Section(f"Under a budget, home {home}", setting, rows)


def _minimum_nbytes(spec: SubjectSpec, cache: Path) -> int:
    """The smallest budget, as chunkc names it when asked for one that is too small."""
    with SubjectProcess(spec, cache) as subject:
        try:
            subject.step(1)
        except DoesNotFit as error:
            return error.minimum_nbytes
    raise AssertionError("a model trained in one byte")


def _metrics(turns: list[Turn], base: list[Turn], report: Mapping[str, Any]) -> dict[str, Metric]:
    """Of one subject; traffic and waiting are per step."""
    metrics = {}
    for name, key in (("predicted peak", "predicted_peak_nbytes"), ("measured peak", "measured_peak_nbytes")):
        if key in report:
            metrics[name] = one("nbytes", report[key])
    metrics["step"] = flat("s", [turn.step_s for turn in turns])
    metrics["to plain"] = paired_ratios([turn.step_s for turn in turns], [turn.step_s for turn in base])
    if turns[0].counters:
        metrics["moved in"] = Metric("nbytes", tuple(turn.counters["to_device_nbytes"] for turn in turns))
        metrics["moved out"] = Metric("nbytes", tuple(turn.counters["to_home_nbytes"] for turn in turns))
        metrics["waited"] = Metric("s", tuple(turn.counters["wait_s"] for turn in turns))
    return metrics
