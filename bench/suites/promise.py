"""The suite `promise`: the largest model that this machine can hold trains under 6 GB, within a given time.

A section per attempt: its first steps, which compile, then turns of two steps while time allows; in the end two steps
with the allocator's limit lifted, which tell its retries from slow links. The section is given out anew after each, so
that a run cut short keeps what it had. Where an attempt fails, the next one is simpler (`next_attempt`).

What the machine can hold, its free RAM and the seconds that pinning takes say; the latter are in the facts that
`bench/gpu_facts.py` has found (`--facts`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from measuring.context import Context, Progress
from measuring.machine import available_ram_nbytes
from measuring.metrics import Metric, Row, Section, flat, one, setting_of
from measuring.subject_process import OutOfMemory, SubjectFailed, SubjectProcess, Turn
from models.families import sizes
from peers.specs import CHUNKC

from suites import budget
from suites.budget import Case, Guard, Outcome

NUM_STEPS = 2
"""Of a turn."""
MAX_TURNS = 10
LIFTED_S = 30.0
"""Left at the end for the steps without a limit."""
SOON_S = 150.0
"""What fails within this many seconds is tried once more, in eager code."""
RESERVED_S = 120.0
"""Kept for the smallest model until a larger one has trained its first steps."""
MAX_PIN_S = 84.0
"""What pinning the home may take: at 0.8 s/GiB, for 8 billion parameters."""
ASSUMED_S_PER_GIB = 1.0
"""Where no facts say how long pinning takes."""

_GIB = 2**30


def cases(context: Context) -> tuple[Case, ...]:
    """The largest first."""
    if context.is_small:
        return budget.small(context.device).cases
    names = ("llama3-8b", 2048, 1), ("gpt-4b", 1024, 4), ("gpt-1b", 1024, 4)
    return tuple(case for name in names for case in budget.cases(*name, 6))


@dataclass(frozen=True)
class Attempt:
    """A model, how its segments are compiled, and whether torch's allocator is held to the budget."""

    case: Case
    codegen: str
    is_limited: bool = True

    @property
    def title(self) -> str:
        return f"{self.case.name}, {self.codegen}{'' if self.is_limited else ', no limit'}"


def run(context: Context) -> Iterator[Section]:
    """Measure, until an attempt has succeeded or there is none left."""
    in_order = cases(context)
    progress = Progress(context.show, 2 + MAX_TURNS)
    case, reason = choose(in_order, pinning_s_per_gib(context.facts), available_ram_nbytes())
    attempt: Attempt | None = Attempt(case, "eager" if context.is_small else "inductor")
    with context.code_cache() as cache:
        while attempt is not None and not context.is_out_of_time:
            begin_s = time.monotonic()
            run = Run(attempt, Outcome(CHUNKC))
            for _ in run.train(context, in_order[-1], cache, progress):
                yield run.section(reason)
            if run.error is None or context.is_out_of_time:
                return
            attempt = next_attempt(attempt, run.error, time.monotonic() - begin_s, in_order[-1])
            reason = f"after {run.attempt.title}: {run.outcome.note}"


def choose(cases: Sequence[Case], s_per_gib: float | None, available_nbytes: int) -> tuple[Case, str]:
    """Choose the first case with a home that fits into free RAM and is soon pinned, else the last, and say why."""
    rate, reasons = s_per_gib or ASSUMED_S_PER_GIB, []
    for case in cases[:-1]:
        home_nbytes = budget.HOST_NBYTES_PER_PARAMETER[CHUNKC] * sizes(case.model).num_parameters
        pin_s = rate * home_nbytes / _GIB
        if home_nbytes > budget.HOST_PART * available_nbytes:
            reasons.append(f"{case.model.name}: {home_nbytes / 1e9:.0f} GB, {available_nbytes / 1e9:.0f} GB are free")
        elif pin_s > MAX_PIN_S:
            assumed = " (assumed)" if s_per_gib is None else ""
            reasons.append(f"{case.model.name}: pinning takes {pin_s:.0f} s, {rate:.2g} s/GiB{assumed}")
        else:
            return case, "; ".join(reasons) or "the largest"
    return cases[-1], "; ".join(reasons) or "the only one"


def pinning_s_per_gib(path: Path | None) -> float | None:
    """Seconds per GiB to pin the largest region of the facts; None where they have none."""
    if path is None or not path.is_file():
        return None
    figures = [fact["figures"] for fact in json.loads(path.read_text())["facts"] if fact["status"] != "FAIL"]
    pinned = [(of["nbytes"], of["s_per_gib"]) for of in figures if {"nbytes", "s_per_gib"} <= of.keys()]
    return max(pinned)[1] if pinned else None


def next_attempt(attempt: Attempt, error: BaseException, seconds: float, smallest: Case) -> Attempt | None:
    """Choose what to try after a failure; None if nothing is left.

    If the limit was hit: no limit. If the failure came soon: eager code. Else: the smallest model.
    """
    if isinstance(error, OutOfMemory):
        if attempt.is_limited:
            return replace(attempt, is_limited=False)
    elif isinstance(error, SubjectFailed) and seconds < SOON_S and attempt.codegen == "inductor":
        return replace(attempt, codegen="eager")
    return None if attempt.case == smallest else Attempt(smallest, "inductor")


class Run:
    """An attempt while it runs: what was measured so far, and the error that ended it.

    Attributes:
        lifted: the turn that was trained without the limit, with its report.
    """

    def __init__(self, attempt: Attempt, outcome: Outcome) -> None:
        self.attempt, self.outcome, self.lifted = attempt, outcome, Outcome(CHUNKC)
        self.error: BaseException | None = None
        self._begin_s = time.monotonic()
        self._metrics: dict[str, Metric] = {}

    def train(self, context: Context, smallest: Case, cache: Path, progress: Progress) -> Iterator[None]:
        """Train; yields whenever there is news."""
        case, outcome = self.attempt.case, self.outcome
        early = context
        if context.deadline_s is not None and case != smallest:
            reserved_s = min(RESERVED_S, context.left_s(float("inf")) / 3)
            early = replace(context, deadline_s=context.deadline_s - reserved_s)

        def timeout_s() -> float:
            return (context if outcome.report else early).reply_timeout(budget.REPLY_TIMEOUT_S)()

        process = SubjectProcess(self._spec(context), cache, timeout_s=timeout_s)
        guard = _Kept(outcome, context, self)
        with process.ended():
            with guard:
                progress(f"{self.attempt.title}: building and compiling")
                process.__enter__()
                self._metrics["until ready"] = one("s", time.monotonic() - self._begin_s)
                warm = budget.warm_up(process, outcome)
                self._metrics["first steps"] = Metric("s", warm.step_s)
                longest_s = warm.step_s[-1]
            yield
            while self.error is None and len(outcome.turns) < MAX_TURNS:
                if outcome.turns and context.left_s(1e9) < LIFTED_S + 1.2 * NUM_STEPS * longest_s:
                    break
                with guard:
                    progress(f"{self.attempt.title}: training")
                    budget.train_turn(process, outcome, 0, NUM_STEPS)
                    longest_s = max(outcome.turns[-1].step_s)
                yield
            if self.error is None and self.attempt.is_limited and context.left_s(LIFTED_S) > NUM_STEPS * longest_s:
                with _Kept(self.lifted, context, None):
                    progress(f"{self.attempt.title}: training without a limit")
                    process.ask("lift")
                    budget.train_turn(process, self.lifted, 0, NUM_STEPS)
                yield
        if process.exit_note:
            outcome.note = "; ".join(filter(None, (outcome.note, process.exit_note)))
            yield

    def _spec(self, context: Context) -> Any:
        case = self.attempt.case
        of = context.device, case.model, case.batch_size, CHUNKC, case.budget_nbytes, self.attempt.codegen
        spec = budget.spec_of(*of, is_checkpointed=case.is_checkpointed)
        return spec if self.attempt.is_limited else replace(spec, limit_nbytes=None)

    def section(self, reason: str) -> Section:
        """Rows measured so far."""
        case = self.attempt.case
        counts = sizes(case.model)
        (outcome,) = budget.compared([self.outcome], 0.0, case.budget_nbytes)
        limit = "held to the budget" if self.attempt.is_limited else "no limit"
        rows = [self._row(limit, outcome, self._metrics)]
        if self.lifted.turns or self.lifted.note:
            rows.append(self._row("limit lifted", self.lifted, {}))
        setting = setting_of(
            case.model,
            case.batch_size,
            num_parameters=counts.num_parameters,
            budget_nbytes=case.budget_nbytes,
            codegen=self.attempt.codegen,
            chosen=reason,
            FLOPs_per_step=f"{counts.flops_per_step(case.batch_size, case.model.length):.4g}",
        )
        return Section(self.attempt.title, setting, rows)

    def _row(self, limit: str, outcome: Outcome, more: dict[str, Metric]) -> Row:
        counts = sizes(self.attempt.case.model)
        metrics = budget.own_metrics(outcome, self.attempt.case, counts) | _moved(outcome.turns) | more
        if "num_allocator_retries" in outcome.report:
            metrics["allocator's retries"] = one("number", outcome.report["num_allocator_retries"])
        return Row({"allocator": limit}, metrics, outcome.note, outcome.is_failure)


class _Kept(Guard):
    """Keeps the error itself, too, on which the next attempt depends."""

    def __init__(self, outcome: Outcome, context: Context, run: Run | None) -> None:
        super().__init__(outcome, context)
        self._run = run

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        is_noted = super().__exit__(kind, error, trace)
        if is_noted and self._run is not None:
            self._run.error = error
        return is_noted


def _moved(turns: Sequence[Turn]) -> dict[str, Metric]:
    """Bytes each way per step, those of both ways per second, and what the host does and waits, per step."""
    if not turns:
        return {}
    means_s = [sum(turn.step_s) / len(turn.step_s) for turn in turns]
    into, out = ([turn.counters[name] for turn in turns] for name in ("to_device_nbytes", "to_home_nbytes"))
    both = [(a + b) / mean_s for a, b, mean_s in zip(into, out, means_s, strict=True)]
    return {
        "forward + backward": flat("s", [turn.forward_backward_s for turn in turns]),
        "moved in": Metric("nbytes", tuple(into)),
        "moved out": Metric("nbytes", tuple(out)),
        "both ways": Metric("nbytes_per_s", tuple(both)),
        "waits": Metric("s", tuple(turn.counters["wait_s"] for turn in turns)),
        "host": Metric("s", tuple(turn.counters["host_s"] for turn in turns)),
    }
