"""The suite `disk`: how fast a disk home is read, and the demonstration's GPT under smaller and smaller budgets.

The first section is of the reads (`disk_reads`), then comes one per home of the model data: RAM, disk. Budgets are
fractions of what plain `torch.compile` with a fused AdamW was measured to need; the allocator holds every chunkc
subject to its budget. All subjects of a section take turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from demo import SIZES
from measuring.context import Context, Progress
from measuring.metrics import Metric, Row, Section, flat, one, paired_ratios, setting_of
from measuring.subject_process import REPLY_TIMEOUT_S, DoesNotFit, SubjectProcess, Timeout, Turn
from peers.specs import CHUNKC, PLAIN, SubjectSpec

from suites import disk_reads
from suites.timed_steps import take_turns

HOMES = ("cpu", "disk")
FRACTIONS = {"100 %": Fraction(1), "60 %": Fraction(3, 5), "40 %": Fraction(2, 5), "33 %": Fraction(1, 3)}
MINIMUM = "minimum"


@dataclass(frozen=True)
class Size:
    """A size of the demonstration, and how often it is measured."""

    name: str
    num_rounds: int
    num_steps: int
    fractions: Mapping[str, Fraction]
    codegen: str = "inductor"


FULL = Size("small", num_rounds=8, num_steps=3, fractions=FRACTIONS)
SMALL = Size("tiny", num_rounds=1, num_steps=2, fractions={}, codegen="eager")


def run(context: Context) -> Iterator[Section]:
    """Measure, on the CPU; yields each section as soon as it is there.

    Raises:
        SubjectFailed: a subject's process failed.
    """
    size = SMALL if context.is_small else FULL
    num_subjects = len(size.fractions) + 2
    reads = disk_reads.SMALL if context.is_small else disk_reads.FULL
    num_parts = reads.num_rounds * len(disk_reads.STATES) + len(HOMES) * (num_subjects * (1 + size.num_rounds) + 1)
    progress = Progress(context.show, num_parts)
    if context.wants_case(disk_reads.CASE) and not context.is_out_of_time:
        yield disk_reads.section(context, progress)
    with context.code_cache() as cache:
        for home in HOMES:
            if context.wants_case(home) and not context.is_out_of_time:
                yield _section(context, size, home, cache, progress)


def budgets_nbytes(
    plain_peak_nbytes: int, minimum_nbytes: int, fractions: Mapping[str, Fraction] = FRACTIONS
) -> dict[str, int]:
    """Budgets by name, largest first: parts of plain's peak, then the minimum."""
    parts = {name: int(plain_peak_nbytes * part) for name, part in fractions.items()}
    return {**parts, MINIMUM: minimum_nbytes}


def _section(context: Context, size: Size, home: str, cache: Path, advance: Progress) -> Section:
    model, batch_size = SIZES[size.name]
    timeout_s = context.reply_timeout(REPLY_TIMEOUT_S)
    plain_spec = SubjectSpec(model, batch_size, is_metered=True, codegen=size.codegen)

    def spec(budget_nbytes: int, *, is_limited: bool = True) -> SubjectSpec:
        options = {"memory_budget": budget_nbytes, "home": home, "whole_graph": "never", "codegen": size.codegen}
        options["activations"] = "keep"
        limit_nbytes = budget_nbytes if is_limited else None
        return SubjectSpec(
            model, batch_size, CHUNKC, options, is_metered=True, is_placed=True, limit_nbytes=limit_nbytes
        )

    with ExitStack() as stack:
        advance(f"{home}: compiling {PLAIN}")
        subjects = {PLAIN: stack.enter_context(SubjectProcess(plain_spec, cache, timeout_s=timeout_s))}
        subjects[PLAIN].step(3)
        plain_peak_nbytes = subjects[PLAIN].report()["measured_peak_nbytes"]
        advance(f"{home}: asking for the minimum")
        minimum_nbytes = _minimum_nbytes(spec(1, is_limited=False), cache, timeout_s)
        budgets = budgets_nbytes(plain_peak_nbytes, minimum_nbytes, size.fractions)
        notes: dict[str, str] = {}
        for name, budget_nbytes in budgets.items():
            advance(f"{home}: compiling {name}")
            subject = stack.enter_context(SubjectProcess(spec(budget_nbytes), cache, timeout_s=timeout_s))
            try:
                subject.step(2)
            except DoesNotFit as error:
                notes[name] = str(error)
                continue
            subjects[name] = subject
        turns = take_turns(subjects, size, context, advance, f"{home}: training")
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


def _minimum_nbytes(spec: SubjectSpec, cache: Path, timeout_s: Timeout) -> int:
    """The smallest budget, as chunkc names it when asked for one that is too small."""
    with SubjectProcess(spec, cache, timeout_s=timeout_s) as subject:
        try:
            subject.step(1)
        except DoesNotFit as error:
            return error.minimum_nbytes
    raise AssertionError("a model trained in one byte")


def _metrics(turns: list[Turn], base: list[Turn], report: Mapping[str, Any]) -> dict[str, Metric]:
    """Metrics of one subject; traffic and waiting are per step."""
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
