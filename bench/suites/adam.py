"""The suite `adam`: bytes per second of Adam updates against what the memory can do, measured in the same rounds.

A section per device that updates and per precision. Every candidate is a process of its own; all take turns, and every
ratio is taken within a round. The bound of a round is the best of several plain loops over a working set as large:
copies, additions, and a compiled loop with the update's own reads and writes and next to no arithmetic.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from measuring.context import Context, Progress
from measuring.metrics import Metric, Row, Section, one
from measuring.subject_process import OutOfMemory, Process, SubjectFailed, TimedOut, Unavailable, first_line, rotated

from suites.adam_spec import (
    BF16,
    BOUNDS,
    CANDIDATES,
    CHUNKC,
    CHUNKC_SPLIT,
    FP32,
    NBYTES_PER_ELEMENT,
    NOTES,
    PACKAGES,
    AdamSpec,
)

PARAMETER_TOLERANCE = 1e-6
"""How far the subject's parameters may be from `torch.optim.AdamW`'s after a few updates."""


@dataclass(frozen=True)
class Size:
    """Parameters in the working set, and how often it is swept; `num_passes` are those of one turn."""

    num_elements: int
    num_rounds: int
    num_passes: int


SIZES = {
    # 1.1 and 1.8 GB, several times what caches hold
    "cpu": Size(64 * 2**20, num_rounds=7, num_passes=7),
    "cuda": Size(256 * 2**20, num_rounds=5, num_passes=20),
}
SMALL = Size(1 << 18, num_rounds=2, num_passes=3)

REPLY_TIMEOUT_S = 300.0


def run(context: Context) -> Iterator[Section]:
    """Measure; yields each section as soon as it is there. With a GPU, its updates first and then the CPU's."""
    devices = ("cuda", "cpu") if context.device == "cuda" else ("cpu",)
    cases = [(device, precision) for device in devices for precision in (FP32, BF16)]
    cases = [case for case in cases if context.wants_case(f"{case[0]} {case[1]}")]
    num_parts = sum(
        (2 + (SMALL if context.is_small else SIZES[device]).num_rounds) * len(CANDIDATES[precision])
        for device, precision in cases
    )
    progress = Progress(context.show, max(1, num_parts))
    with context.code_cache() as cache:
        for device, precision in cases:
            if context.is_out_of_time:
                return
            size = SMALL if context.is_small else SIZES[device]
            yield _section(context, size, device, precision, cache, progress)


def _section(context: Context, size: Size, device: str, precision: str, cache: Path, progress: Progress) -> Section:
    notes: dict[str, str] = {}
    failed: set[str] = set()
    processes: dict[str, Process] = {}
    differences: dict[str, float | None] = {}
    rounds: list[dict[str, tuple[list[float], int]]] = []
    where = f"{device}, {precision}"
    with ExitStack() as stack:

        def attempt(name: str, ask: str) -> dict[str, Any]:
            """The answer, or {} and a note."""
            if context.is_out_of_time and not processes[name].ready:
                notes[name] = "the time was up"
                return {}
            try:
                if not processes[name].ready:
                    processes[name].__enter__()
                return processes[name].ask(ask)
            except (Unavailable, OutOfMemory) as error:
                notes[name] = first_line(error)
            except TimedOut as error:
                notes[name] = "the time was up" if context.is_out_of_time else first_line(error)
                if context.is_out_of_time:
                    return {}
            except SubjectFailed as error:
                notes[name] = f"failed: {first_line(error)}"
            if name in (CHUNKC, CHUNKC_SPLIT):
                failed.add(name)
            return {}

        names = [name for name in CANDIDATES[precision] if context.wants_system(name) or name in BOUNDS]
        for name in names:
            package = PACKAGES.get(name)
            if package is not None and find_spec(package) is None:
                notes[name] = f"{package} is not installed"
                continue
            spec = AdamSpec(name, precision, size.num_elements, device)
            timeout_s = context.reply_timeout(REPLY_TIMEOUT_S)
            processes[name] = Process(spec, cache, timeout_s=timeout_s).start_in(stack)
        for name in processes:
            progress(f"{where}: checking {name}")
            if answer := attempt(name, "check"):
                differences[name] = answer["difference"]
        live = [name for name in names if name not in notes]
        for name in list(live):
            progress(f"{where}: warming {name}")
            if not attempt(name, "time 1"):
                live.remove(name)
        for round_index in range(size.num_rounds):
            if context.is_out_of_time and rounds:
                break
            measured: dict[str, tuple[list[float], int]] = {}
            for name in rotated(live, round_index):
                progress(f"{where}: {name}")
                if answer := attempt(name, f"time {size.num_passes}"):
                    measured[name] = (answer["times_s"], answer["nbytes"])
            live = [name for name in live if name in measured]
            rounds.append(measured)
    replicated = NOTES if precision == BF16 else {}
    rows = [
        _row(name, rounds, differences.get(name), notes.get(name, replicated.get(name, "")), is_failure=name in failed)
        for name in names
    ]
    setting = {
        "num_parameters": size.num_elements,
        "num_bytes_per_parameter": NBYTES_PER_ELEMENT,
        "num_rounds": len(rounds),
        "num_passes_per_round": size.num_passes,
        "bound": "the best loop of each round",
    }
    return Section(f"Adam on {device.upper()}, {precision}", setting, rows)


def bytes_per_s(times_s: list[float], nbytes: int) -> float:
    """Bandwidth of the median pass."""
    return nbytes / statistics.median(times_s)


def bound_of(measured: Mapping[str, tuple[list[float], int]]) -> float | None:
    """The best loop's bytes per second in one round; None where no loop ran."""
    return max((bytes_per_s(*measured[name]) for name in BOUNDS if name in measured), default=None)


def _row(
    name: str,
    rounds: list[dict[str, tuple[list[float], int]]],
    difference: float | None,
    note: str,
    *,
    is_failure: bool,
) -> Row:
    metrics: dict[str, Metric] = {}
    mine = [measured for measured in rounds if name in measured]
    if mine:
        metrics["pass"] = Metric("s", tuple(sample for measured in mine for sample in measured[name][0]))
        metrics["throughput"] = Metric("nbytes_per_s", tuple(bytes_per_s(*measured[name]) for measured in mine))
        shares = [bytes_per_s(*measured[name]) / bound for measured in mine if (bound := bound_of(measured))]
        if shares:
            metrics["of bound"] = Metric("ratio", tuple(shares))
        times = [
            statistics.median(measured[name][0]) / statistics.median(measured[CHUNKC][0])
            for measured in mine
            if CHUNKC in measured
        ]
        if times and name not in BOUNDS:
            metrics["time to chunkc's"] = Metric("ratio", tuple(times))
    if difference is not None:
        metrics["difference from torch"] = one("number", difference)
        if name in (CHUNKC, CHUNKC_SPLIT) and not difference <= PARAMETER_TOLERANCE:
            note, is_failure = f"parameters differ by {difference:.2g} from torch.optim.AdamW's", True
    return Row({"update": name}, metrics, note, is_failure=is_failure)
