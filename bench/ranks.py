"""The suite `ranks`: several processes train one model together: plain DDP, FSDP2 and chunkc, each on gloo.

Every rank is a subject of its own; all of one system's take a step together, and systems take turns. chunkc trains
with room for all (parameters whole on every rank, as the plan chooses), in the memory that FSDP2 was measured to take,
and in the least there is. FSDP2 offloads nothing to the CPU here: all is on the CPU, and that would be the same memory.

A rank's memory is what torch's CPU allocator was asked for at the most, to the byte, and for chunkc its home as well,
which is a memory map. Bytes on the wire are those that TCP says were acknowledged, on all connections of a rank.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from context import Context, Progress
from gpt import GPTConfig
from metrics import Row, Section, one
from specs import CHUNKC_RANKS, DDP, FSDP2_RANKS, SubjectSpec
from subject_process import REPLY_TIMEOUT_S, SubjectProcess, Timeout, Turn
from timed_steps import HUGE_NBYTES, SMALL, Size, step_metrics

ROOMY, AS_FSDP2, LEAST = "chunkc, room for all", "chunkc, FSDP2's memory", "chunkc, least memory"


NUM_RANKS = 2

FULL = Size(
    GPTConfig(num_layers=8, width=256, num_heads=4, length=128),
    batch_size=2,
    num_rounds=8,
    num_steps=5,
    codegen="eager",
)
"""Few tokens: exchange and update are much of a step. All run ATen's kernels, which are not what is compared."""


class Ranks:
    """The processes of one system; each command goes to all of them at once."""

    def __init__(self, spec: SubjectSpec, cache: Path, stack: ExitStack, timeout_s: Timeout) -> None:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="chunkc-bench-ranks-"))
        self._pool = stack.enter_context(ThreadPoolExecutor(spec.num_ranks))
        specs = [replace(spec, rank=rank, store=f"{folder}/store") for rank in range(spec.num_ranks)]
        processes = [SubjectProcess(one, cache, timeout_s=timeout_s) for one in specs]
        for process in processes:
            process.start_in(stack)
        self._ranks = processes

    def start(self) -> None:
        """Wait until all are ready, and have compiled."""
        list(self._pool.map(SubjectProcess.__enter__, self._ranks))
        self.step(3)

    @property
    def ready(self) -> dict[str, Any]:
        return self._ranks[0].ready

    def step(self, num_steps: int) -> Turn:
        """Steps of all ranks, each as long as the slowest takes; losses are the means over ranks."""
        turns = list(self._pool.map(lambda rank: rank.step(num_steps), self._ranks))

        def slowest(name: str) -> tuple[float, ...]:
            return tuple(map(max, zip(*(getattr(turn, name) for turn in turns), strict=True)))

        losses = tuple(map(statistics.fmean, zip(*(turn.losses for turn in turns), strict=True)))
        names = ("forward_backward_s", "optimizer_s", "step_s")
        return Turn(*map(slowest, names), losses, {})

    def reports(self) -> list[dict[str, Any]]:
        """Of each rank."""
        return list(self._pool.map(SubjectProcess.report, self._ranks))


def run(context: Context) -> Iterator[Section]:
    """Measure, on the CPU.

    Raises:
        SubjectFailed: a subject's process failed.
        ValueError: the subjects' losses differ.
    """
    size = SMALL if context.is_small else FULL
    if not context.wants_case("steps"):
        return
    advance = Progress(context.show, 5 * (1 + size.num_rounds))
    with context.code_cache() as cache, ExitStack() as stack:
        yield _section(context, size, cache, stack, advance)


def _section(context: Context, size: Size, cache: Path, stack: ExitStack, advance: Progress) -> Section:
    timeout_s = context.reply_timeout(REPLY_TIMEOUT_S)
    subjects = _started((DDP, FSDP2_RANKS, ROOMY), size, {ROOMY: HUGE_NBYTES}, cache, stack, timeout_s, advance)
    (fsdp2, *_), roomy = (subjects[name].reports() for name in (FSDP2_RANKS, ROOMY))
    least_nbytes = max(report["minimum_budget_nbytes"] for report in roomy)
    beside_home_nbytes = memory_nbytes(fsdp2) - max(report["home_nbytes"] for report in roomy)
    budgets = {AS_FSDP2: max(least_nbytes, beside_home_nbytes), LEAST: least_nbytes}
    subjects |= _started((AS_FSDP2, LEAST), size, budgets, cache, stack, timeout_s, advance)
    before = {name: sum(r["acknowledged_nbytes"] for r in subject.reports()) for name, subject in subjects.items()}
    turns = size.take_turns(subjects, context, advance)
    rows = []
    for name, subject in subjects.items():
        reports = subject.reports()
        num_steps = sum(len(turn.losses) for turn in turns[name]) * NUM_RANKS
        wire_nbytes = (sum(r["acknowledged_nbytes"] for r in reports) - before[name]) / num_steps
        rows.append(_row(name, turns, reports, wire_nbytes))
    ready = subjects[DDP].ready
    setting = size.setting(
        len(turns[DDP]),
        num_ranks=NUM_RANKS,
        num_parameters=ready["num_parameters"],
        num_threads_per_rank=ready["num_threads"],
        codegen=size.codegen,
    )
    return Section("Several ranks on one host, gloo", setting, rows)


def _started(
    names: Sequence[str],
    size: Size,
    budgets: Mapping[str, int],
    cache: Path,
    stack: ExitStack,
    timeout_s: Timeout,
    advance: Progress,
) -> dict[str, Ranks]:
    """Subjects that have compiled; they do so at the same time."""
    advance(f"compiling: {', '.join(names)}", len(names))
    found = {name: Ranks(spec_of(name, size, budgets.get(name, 0)), cache, stack, timeout_s) for name in names}
    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(lambda ranks: ranks.start(), found.values()))
    return found


def spec_of(name: str, size: Size, budget_nbytes: int) -> SubjectSpec:
    """One of the subjects. chunkc updates at home, which is RAM here, as everybody else does."""
    system = name if name in (DDP, FSDP2_RANKS) else CHUNKC_RANKS
    options = {"memory_budget": budget_nbytes, "codegen": size.codegen} if system == CHUNKC_RANKS else None
    return SubjectSpec(
        size.model,
        size.batch_size,
        system,
        options,
        is_metered=True,
        codegen=size.codegen,
        num_ranks=NUM_RANKS,
    )


def memory_nbytes(report: dict[str, Any]) -> int:
    """What a rank takes at the most: the allocator's peak, and its home."""
    found: int = report["measured_peak_nbytes"] + report.get("home_nbytes", 0)
    return found


def _row(name: str, turns: dict[str, list[Turn]], reports: list[dict[str, Any]], wire_nbytes: float) -> Row:
    """A system's times, its ratios to FSDP2 and to DDP round by round, its memory and its messages."""
    bases = {system: turns[system] for system in (FSDP2_RANKS, DDP)}
    metrics = step_metrics(turns[name], bases, in_parts=False) | {
        "sent per rank and step": one("nbytes", wire_nbytes),
        "peak per rank": one("nbytes", max(report["measured_peak_nbytes"] for report in reports)),
        "with home": one("nbytes", max(map(memory_nbytes, reports))),
    }
    predicted = [report["predicted_peak_nbytes"] for report in reports if "predicted_peak_nbytes" in report]
    if predicted:
        metrics["predicted peak"] = one("nbytes", max(predicted))
    return Row({"subject": name}, metrics)
