"""The suite `ranks`: several processes train one model together, by plain DDP, by FSDP2 and by chunkc.

On CPUs they use gloo; on a machine with GPUs one process for each GPU uses NCCL. Every rank is a subject of its own;
all of one system's take a step together, and systems take turns. chunkc trains in three budgets: with room for all, so
that its plan keeps parameters whole on every rank; in the memory that FSDP2 was measured to take, with updates in the
backward; and, with smaller chunks, in its smallest budget. FSDP2 offloads nothing to the CPU here: on CPUs that would
be the same memory.

A rank's memory is the peak of the bytes requested from torch's allocator. On CPUs, for chunkc, the bytes in use at its
home at that time are added, which is a memory map. Bytes on the wire are those that TCP acknowledged on all connections
of a rank; for NCCL they are unknown.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from measuring.context import Context, Progress
from measuring.metrics import Row, Section, one
from measuring.subject_process import REPLY_TIMEOUT_S, DoesNotFit, SubjectProcess, Timeout, Turn
from models.gpt import GPTConfig
from peers.specs import CHUNKC_RANKS, DDP, FSDP2_RANKS, SubjectSpec

from suites.timed_steps import HUGE_NBYTES, SMALL, Size, step_metrics, take_turns

ROOMY, AS_FSDP2, LEAST = "chunkc, room for all", "chunkc, FSDP2's memory", "chunkc, least memory"


NUM_RANKS = 2
"""On CPUs."""

FULL = Size(
    GPTConfig(num_layers=8, width=256, num_heads=4, length=128),
    batch_size=2,
    num_rounds=8,
    num_steps=5,
    codegen="eager",
)
"""Few tokens: exchange and update are much of a step. All run ATen's kernels, which are not what is compared."""

CHUNK_NBYTES_PER_WIDTH = 25
"""Times the width squared, for the least memory: a block's attention is a chunk, and each of the other two matrices.
What comes and goes takes less room, then, than whole blocks, as FSDP2 and chunkc's own choice have it."""


@dataclass(frozen=True)
class Place:
    """Device and number of the ranks."""

    device: str
    num_ranks: int

    @staticmethod
    def of(context: Context) -> Place:
        """GPUs have one rank each."""
        return Place(context.device, torch.cuda.device_count() if context.device == "cuda" else NUM_RANKS)

    def memory_nbytes(self, report: dict[str, Any]) -> int:
        """Peak bytes of a rank: the allocator's peak, with its home where that is the same memory."""
        found: int = report["measured_peak_nbytes"]
        return report.get("with_home_nbytes", found) if self.device == "cpu" else found


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
        """Reports of all ranks."""
        return list(self._pool.map(SubjectProcess.report, self._ranks))


def run(context: Context) -> Iterator[Section]:
    """Measure, on CPUs or on all GPUs.

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
    timeout_s, place = context.reply_timeout(REPLY_TIMEOUT_S), Place.of(context)
    roomy_options = {ROOMY: {"memory_budget": HUGE_NBYTES}}
    subjects = _started((DDP, FSDP2_RANKS, ROOMY), size, roomy_options, place, cache, stack, timeout_s, advance)
    (fsdp2, *_), roomy = (subjects[name].reports() for name in (FSDP2_RANKS, ROOMY))
    small_chunks = {"chunk_size": CHUNK_NBYTES_PER_WIDTH * size.model.width**2}
    least = {"memory_budget": _least_nbytes(size, place, small_chunks, cache, timeout_s), **small_chunks}
    room_nbytes = place.memory_nbytes(fsdp2)
    if place.device == "cpu":  # at home, when activations are at their most: all but the gradients of a chunk or two
        room_nbytes -= max(report["home_nbytes"] for report in roomy) * 3 // 4
    minimum_nbytes = max(report["minimum_budget_nbytes"] for report in roomy)
    small_nbytes = room_nbytes - small_chunks["chunk_size"]
    as_fsdp2 = {"memory_budget": max(least["memory_budget"], small_nbytes), **small_chunks}
    if minimum_nbytes <= room_nbytes:  # with chunks as chunkc chooses them
        chunk_nbytes = max(report["chunk_size_nbytes"] for report in roomy)
        as_fsdp2 = {"memory_budget": max(minimum_nbytes, room_nbytes - chunk_nbytes)}
    options = {AS_FSDP2: as_fsdp2, LEAST: least}
    subjects |= _started((AS_FSDP2, LEAST), size, options, place, cache, stack, timeout_s, advance)
    before = {name: _wire_nbytes(subject.reports()) for name, subject in subjects.items()}
    turns = take_turns(subjects, size, context, advance)
    rows = []
    for name, subject in subjects.items():
        reports = subject.reports()
        num_steps = sum(len(turn.losses) for turn in turns[name]) * place.num_ranks
        rows.append(_row(name, turns, reports, (_wire_nbytes(reports) - before[name]) / num_steps, place))
    ready = subjects[DDP].ready
    setting = size.setting(
        len(turns[DDP]),
        num_ranks=place.num_ranks,
        num_parameters=ready["num_parameters"],
        num_threads_per_rank=ready["num_threads"],
        codegen=size.codegen,
    )
    return Section(f"Several ranks on one host, {'gloo' if place.device == 'cpu' else 'NCCL'}", setting, rows)


def _least_nbytes(size: Size, place: Place, options: Mapping[str, int], cache: Path, timeout_s: Timeout) -> int:
    """The least budget of chunkc with these options."""
    with ExitStack() as stack:
        try:
            Ranks(spec_of(LEAST, size, {"memory_budget": 1, **options}, place), cache, stack, timeout_s).start()
        except DoesNotFit as error:
            return error.minimum_nbytes
    raise AssertionError("nothing fits in a byte")


def _wire_nbytes(reports: Sequence[dict[str, Any]]) -> int:
    return sum(report.get("acknowledged_nbytes", 0) for report in reports)


def _started(
    names: Sequence[str],
    size: Size,
    options: Mapping[str, Mapping[str, int]],
    place: Place,
    cache: Path,
    stack: ExitStack,
    timeout_s: Timeout,
    advance: Progress,
) -> dict[str, Ranks]:
    """Subjects that have compiled; they do so at the same time."""
    advance(f"compiling: {', '.join(names)}", len(names))
    found = {name: Ranks(spec_of(name, size, options.get(name, {}), place), cache, stack, timeout_s) for name in names}
    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(lambda ranks: ranks.start(), found.values()))
    return found


def spec_of(name: str, size: Size, options: Mapping[str, int], place: Place) -> SubjectSpec:
    """Spec of a subject; `options` are chunkc's."""
    system = name if name in (DDP, FSDP2_RANKS) else CHUNKC_RANKS
    return SubjectSpec(
        size.model,
        size.batch_size,
        system,
        {**options, "codegen": size.codegen} if system == CHUNKC_RANKS else None,
        device=place.device,
        is_metered=True,
        codegen=size.codegen,
        overlap="backward" if name == AS_FSDP2 else "none",
        num_ranks=place.num_ranks,
    )


def _row(
    name: str, turns: dict[str, list[Turn]], reports: list[dict[str, Any]], wire_nbytes: float, place: Place
) -> Row:
    """A system's times, its ratios to FSDP2 and to DDP round by round, its memory and its messages."""
    bases = {system: turns[system] for system in (FSDP2_RANKS, DDP)}
    metrics = step_metrics(turns[name], bases, in_parts=False)
    metrics["peak per rank"] = one("nbytes", max(report["measured_peak_nbytes"] for report in reports))
    if place.device == "cpu":
        metrics["sent per rank and step"] = one("nbytes", wire_nbytes)
        metrics["with home"] = one("nbytes", max(map(place.memory_nbytes, reports)))
    predicted = [report["predicted_peak_nbytes"] for report in reports if "predicted_peak_nbytes" in report]
    if predicted:
        metrics["predicted peak"] = one("nbytes", max(predicted))
    return Row({"subject": name}, metrics)
