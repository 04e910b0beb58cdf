"""The suite `scale`: the largest model that trains under a budget, by bisection over PatrickStar's family.

A section per budget. A model trains if two steps end within the budget, in a fresh process that is held to it. Models
that would need more RAM than there is are not begun; the row says so. All systems run blocks again in the backward
(activation checkpointing), as the systems do that these are compared with, but for plain training.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from measuring.context import Context, Progress
from measuring.machine import available_ram_nbytes, gpu_nbytes
from measuring.metrics import Metric, Row, Section, one
from measuring.subject_process import SubjectProcess
from models.families import TINY, ModelChoice, is_patrickstar, sizes
from peers.specs import CHECKPOINTING, CHUNKC, PLAIN

from chunkc.models import MODELS
from suites import budget
from suites.least_budget import least_budget_nbytes

SYSTEMS = (CHUNKC, CHECKPOINTING, PLAIN)
NUM_STEPS = 2
WHOLE_PART = 0.95
"""Of the whole card: the rest is the driver's."""
PROBE_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Size:
    """Budgets in bytes by name, the family from small to large, a batch, and the systems."""

    budgets: dict[str, int]
    family: tuple[ModelChoice, ...]
    batch_size: int
    codegen: str
    systems: tuple[str, ...] = SYSTEMS


@dataclass(frozen=True)
class Probe:
    """Result of a model: whether it trains, else why not."""

    fits: bool
    reason: str = ""
    step_s: float | None = None
    peak_nbytes: int | None = None
    is_failure: bool = False


def run(context: Context) -> Iterator[Section]:
    """Measure; yields each budget's section as soon as it is there."""
    size = _size(context)
    systems = [name for name in size.systems if context.wants_system(name)]
    budgets = {name: nbytes for name, nbytes in size.budgets.items() if context.wants_case(name)}
    num_probes = len(size.family).bit_length()
    progress = Progress(context.show, max(1, len(budgets) * len(systems) * num_probes))
    with context.code_cache() as cache:
        for name, nbytes in budgets.items():
            rows = []
            for system in systems:
                if context.is_out_of_time:
                    break
                rows.append(_row(context, size, system, nbytes, cache, progress))
            if rows:
                setting = {
                    "budget_nbytes": nbytes,
                    "batch_size": size.batch_size,
                    "length": size.family[0].length,
                    "dtype": size.family[0].dtype,
                    "num_models": len(size.family),
                }
                yield Section(f"The largest model under {name}", setting, rows)


def _size(context: Context) -> Size:
    if context.is_small:
        family = tuple(ModelChoice(name, 32, "float32") for name in list(TINY)[:3])
        least_nbytes = least_budget_nbytes(family[-1], 1, context.device, "eager")
        limit_nbytes = budget.limit_for(context.device, least_nbytes + budget.MIB)
        budgets = {f"{limit_nbytes / budget.MIB:.1f} MiB": limit_nbytes}
        return Size(budgets, family, batch_size=1, codegen="eager", systems=(CHUNKC, PLAIN))
    total = gpu_nbytes() if context.device == "cuda" else available_ram_nbytes()
    assert total is not None, "a CUDA device has a size"
    budgets = {f"{number} GB": number * budget.GB for number in (6, 24, 32)}
    whole = int(WHOLE_PART * total)
    budgets = {name: nbytes for name, nbytes in budgets.items() if nbytes < whole} | {"the whole device": whole}
    names = sorted(filter(is_patrickstar, MODELS), key=lambda name: sizes(ModelChoice(name, 1024)).num_parameters)
    return Size(budgets, tuple(ModelChoice(name, 1024) for name in names), batch_size=4, codegen="inductor")


def _row(context: Context, size: Size, system: str, budget_nbytes: int, cache: Path, progress: Progress) -> Row:
    probes: dict[int, Probe] = {}

    def fits(index: int) -> bool:
        progress(f"{budget_nbytes / 1e6:,.0f} MB, {system}: {size.family[index].name}")
        probes[index] = _probe(context, size, system, size.family[index], budget_nbytes, cache)
        return probes[index].fits

    best = bisect.bisect(range(len(size.family)), False, key=lambda index: not fits(index)) - 1
    failed = [f"{size.family[i].name}: {probe.reason}" for i, probe in probes.items() if probe.is_failure]
    return scale_row(size.family, system, best, probes, failed)


def scale_row(
    family: Sequence[ModelChoice], system: str, best: int, probes: dict[int, Probe], failed: Sequence[str]
) -> Row:
    """The largest that trains, and what stopped the next one."""
    metrics: dict[str, Metric] = {}
    if best >= 0:
        metrics["parameters"] = one("number", sizes(family[best]).num_parameters)
        if probes[best].step_s is not None:
            metrics["second step"] = one("s", probes[best].step_s)  # type: ignore[arg-type]
        if probes[best].peak_nbytes is not None:
            metrics["measured peak"] = one("nbytes", probes[best].peak_nbytes)  # type: ignore[arg-type]
    if failed:
        note = "; ".join(failed)
    elif best + 1 < len(family):
        note = f"{family[best + 1].name}: {probes[best + 1].reason}"
    else:
        note = "the largest of the family"
    largest = family[best].name if best >= 0 else "none"
    return Row({"system": system, "largest": largest}, metrics, note, is_failure=bool(failed))


def _probe(context: Context, size: Size, system: str, model: ModelChoice, budget_nbytes: int, cache: Path) -> Probe:
    """Two steps. Of chunkc, anything but the honest answer that it does not fit is a failure."""
    too_large = budget.host_forecast(system, sizes(model).num_parameters)
    if too_large:
        return Probe(False, too_large)
    if context.is_out_of_time:
        return Probe(False, "not tried: out of time")
    spec = budget.spec_of(context.device, model, size.batch_size, system, budget_nbytes, size.codegen)
    try:
        with SubjectProcess(spec, cache, timeout_s=context.reply_timeout(PROBE_TIMEOUT_S)) as subject:
            turn = subject.step(NUM_STEPS)
            return Probe(True, step_s=turn.step_s[-1], peak_nbytes=subject.report()["measured_peak_nbytes"])
    except budget.NO_ANSWER as error:
        reason, is_failure = budget.judged(error, system, context)
        return Probe(False, reason, is_failure=is_failure)
