"""The suite `prediction`: bytes per phase, as planned from CPU fakes, as planned from CUDA fakes, and as measured.

A section per model, budget and way of compiling; a row per phase of the step. CPU fakes are what `chunkc explain` sees
for a CPU, CUDA fakes what it sees for a GPU, on any machine (`passes.retarget_cuda`). The plan is the one that the
training ran by: made from fake tensors of the device where it ran, a CPU in a small run. What was measured is the
allocator's count of that very run. Bytes that libraries keep on a GPU are left out of all of them, and stated apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from measuring.context import Context, Progress
from measuring.metrics import Metric, Row, Section, one, setting_of
from measuring.subject_process import SubjectProcess, first_line
from models.families import ModelChoice, construct
from peers.specs import CHUNKC

import chunkc
from chunkc.explaining.cuda_offline import overhead_on
from chunkc.ir.errors import ChunkcError
from chunkc.ir.hardware import Hardware
from chunkc.machines.presets import load_hardware
from suites import budget
from suites.least_budget import hardware_here

PHASES = ("forward", "backward", "update")
STAND_IN = "h200"
"""The GPU that is planned for where there is none."""

NUM_STEPS = 3


@dataclass(frozen=True)
class Case:
    """A model, its budget and its code generator."""

    model: ModelChoice
    batch_size: int
    budget_nbytes: int
    codegen: str

    @property
    def name(self) -> str:
        """`gpt-1b, inductor`."""
        return f"{self.model.name}, {self.codegen}"


FULL = tuple(
    Case(ModelChoice(name, length), batch_size, number * budget.GB, codegen)
    for codegen in ("eager", "inductor")
    for name, length, batch_size, number in (("gpt-1b", 1024, 4, 12), ("llama3-1b", 2048, 1, 6))
)


def small(device: str) -> tuple[Case, ...]:
    """Cases of small runs: those of the suite `budget`."""
    return tuple(Case(of.model, of.batch_size, of.budget_nbytes, "eager") for of in budget.small(device).cases)


def run(context: Context) -> Iterator[Section]:
    """Measure; yields each case's section as soon as it is there."""
    cases = [case for case in (small(context.device) if context.is_small else FULL) if context.wants_case(case.name)]
    progress = Progress(context.show, max(1, 3 * len(cases)))
    with context.code_cache() as cache:
        for case in cases:
            if context.is_out_of_time:
                return
            yield _section(context, case, cache, progress)


def _section(context: Context, case: Case, cache: Path, progress: Progress) -> Section:
    is_cuda = context.device == "cuda"
    gpu = hardware_here("cuda") if is_cuda else load_hardware(STAND_IN)
    libraries = overhead_on(gpu)
    # The GPU's plans get room for its libraries on top, so that all plans have the same bytes for the model.
    progress(f"{case.name}: planning from CPU fakes")
    planned_nbytes = budget.plan_budget(context.device, case.budget_nbytes)
    bare = planned_nbytes - (libraries if is_cuda else 0)
    on_cpu, cpu_note = _explained(case, load_hardware("cpu"), bare, 0)
    progress(f"{case.name}: planning from CUDA fakes")
    on_gpu, gpu_note = _explained(case, gpu, bare + libraries, libraries)
    progress(f"{case.name}: training")
    phases, buffers_nbytes, note = _trained(context, case, cache)
    own = libraries if is_cuda else 0
    rows = []
    over = []
    for phase in PHASES:
        planned, measured = phases.get(phase, (None, None))
        mine = [None if nbytes is None else nbytes - own for nbytes in (planned, measured)]
        rows.append(Row({"phase": phase}, metrics_of(on_cpu.get(phase), on_gpu.get(phase), *mine)))
        if planned is not None and measured is not None and measured > planned + buffers_nbytes:
            over.append(phase)
    notes = [text for text in (cpu_note, gpu_note, note) if text]
    notes += [f"measured beyond the plan: {', '.join(over)}"] if over else []
    rows[0] = replace(rows[0], note="; ".join(notes), is_failure=bool(notes))
    setting = setting_of(
        case.model,
        case.batch_size,
        codegen=case.codegen,
        budget_nbytes=case.budget_nbytes,
        planned_for=gpu.name,
        libraries_nbytes=libraries,
    )
    return Section(case.name, setting, rows)


def metrics_of(on_cpu: int | None, on_gpu: int | None, planned: int | None, measured: int | None) -> dict[str, Metric]:
    """Peaks in bytes, and ratios where both sides are there."""
    peaks = {"CPU fakes": on_cpu, "CUDA fakes": on_gpu, "plan": planned, "measured": measured}
    metrics = {name: one("nbytes", nbytes) for name, nbytes in peaks.items() if nbytes is not None}
    for name, part, whole in (("measured to plan", measured, planned), ("CPU to CUDA fakes", on_cpu, on_gpu)):
        if part is not None and whole:
            metrics[name] = one("ratio", part / whole)
    return metrics


def _explained(case: Case, hardware: Hardware, budget_nbytes: int, libraries: int) -> tuple[dict[str, int], str]:
    """Phase -> predicted peak without libraries, and why there is none."""
    with torch.device("meta"):
        model = construct(case.model, is_checkpointed=True)
        x = torch.zeros(case.batch_size, case.model.length, dtype=torch.int64)
    try:
        found = chunkc.explain(
            model,
            x,
            x,
            memory_budget=budget_nbytes,
            hardware=hardware,
            codegen=case.codegen,
            whole_graph="never",
            activations="keep",
        )
    except ChunkcError as error:
        return {}, f"{hardware.name}: {first_line(error)}"
    peaks: dict[str, int] = {}
    for moment in found.moments:
        peaks[moment.phase] = max(peaks.get(moment.phase, 0), moment.nbytes - libraries)
    return peaks, ""


def _trained(context: Context, case: Case, cache: Path) -> tuple[dict[str, Any], int, str]:
    """Phase -> (planned, measured); bytes of the model's buffers; and why there is nothing.

    Buffers that no graph reads are the model's own, like all else that a program holds: measured, and not planned.
    """
    of = context.device, case.model, case.batch_size, CHUNKC, case.budget_nbytes, case.codegen
    spec = budget.spec_of(*of, whole_graph="never")
    try:
        with SubjectProcess(spec, cache, timeout_s=context.reply_timeout(budget.REPLY_TIMEOUT_S)) as subject:
            subject.step(NUM_STEPS)
            report = subject.report()
    except budget.NO_ANSWER as error:
        return {}, 0, first_line(error)
    return report["phases"], report["buffers_nbytes"], ""
