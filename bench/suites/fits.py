"""The suite `fits`: chunkc's cost where all of it fits, against plain `torch.compile` with a fused AdamW.

Cases: `steps`, the time per step, in processes that live through all rounds and take turns; `compilation`, a start with
an empty cache, each sample a fresh process; `deep-compilation`, the same with twice as many layers; and
`second-start`, with the cache that an earlier start of the same program left.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from measuring.context import Context, Progress
from measuring.metrics import Metric, Row, Section, one, paired_ratios, setting_of
from measuring.subject_process import REPLY_TIMEOUT_S, SubjectProcess, Timeout, Turn, rotated
from models.gpt import GPTConfig
from peers.specs import CHUNKC, PLAIN, SubjectSpec

from suites.timed_steps import HUGE_NBYTES, SMALL, Size, step_metrics, take_turns

FULL = Size(
    GPTConfig(num_layers=24, width=256, num_heads=4, length=128),
    batch_size=6,
    num_repeats=2,
    num_rounds=10,
    num_steps=5,
)
GPU = Size(
    GPTConfig(num_layers=24, width=1024, num_heads=16, length=1024, vocabulary=50_304),
    batch_size=8,
    num_rounds=6,
    num_steps=5,
)
"""GPT-2 medium's shape, fp32 parameters, matrix products in TF32: the same arithmetic for all."""

NUM_COLD_STEPS = 6
"""Of a compilation's process: the first compiles, the second may still be slow, the others are steady."""

CASES = ("steps", "compilation", "deep-compilation", "second-start")

COLD = "Cold compilation of forward and backward"

OPTIONS: dict[str, dict[str, Any] | None] = {
    PLAIN: None,
    "chunkc fast path": {"memory_budget": HUGE_NBYTES, "whole_graph": "auto"},
    "chunkc segmented": {"memory_budget": HUGE_NBYTES, "whole_graph": "never"},
}


def run(context: Context) -> Iterator[Section]:
    """Measure; yields each section as soon as it is there.

    Raises:
        SubjectFailed: a subject's process failed.
        ValueError: the subjects' losses differ.
    """
    size = SMALL if context.is_small else (GPU if context.device == "cuda" else FULL)
    deep = replace(size, model=replace(size.model, num_layers=2 * size.model.num_layers))
    timeout_s = context.reply_timeout(REPLY_TIMEOUT_S)
    num_parts = {"steps": 1 + size.num_rounds, "second-start": size.num_repeats + 1}
    cases = [case for case in CASES if context.wants_case(case)]
    progress = Progress(context.show, len(OPTIONS) * sum(num_parts.get(case, size.num_repeats) for case in cases))
    for case in cases:
        if case != "steps" and context.is_out_of_time:
            return
        of_case = deep if case == "deep-compilation" else size
        specs = {name: _spec(of_case, options, context.device) for name, options in OPTIONS.items()}
        with context.code_cache() as cache:
            if case == "steps":
                yield _steps(context, of_case, specs, cache, progress, timeout_s)
            elif case == "second-start":
                yield _second_starts(of_case, specs, cache, progress, timeout_s)
            else:
                caches = dict.fromkeys(specs, cache if context.is_small else None)
                title = f"{COLD}, {of_case.model.num_layers} layers"
                yield _starts(title, of_case, specs, caches, progress, timeout_s)


def _spec(size: Size, options: dict[str, Any] | None, device: str) -> SubjectSpec:
    if options is None:
        return SubjectSpec(size.model, size.batch_size, PLAIN, device=device, codegen=size.codegen)
    return SubjectSpec(size.model, size.batch_size, CHUNKC, options | {"codegen": size.codegen}, device=device)


def cold_times_s(turn: Turn) -> tuple[float, float]:
    """Extra seconds of the first step over steady ones: forward and backward, and the optimizer."""
    return tuple(  # type: ignore[return-value]
        max(0.0, samples_s[0] - statistics.median(samples_s[2:]))
        for samples_s in (turn.forward_backward_s, turn.optimizer_s)
    )


def _second_starts(
    size: Size, specs: Mapping[str, SubjectSpec], folder: Path, advance: Progress, timeout_s: Timeout
) -> Section:
    """Time second starts: each subject has a cache of its own in `folder`, which a first start fills."""
    caches = {name: folder / str(number) for number, name in enumerate(specs)}
    for name, spec in specs.items():
        advance(f"filling the cache: {name}")
        _start_s(spec, caches[name], timeout_s)
    return _starts("Second start: forward and backward", size, specs, caches, advance, timeout_s)


def _starts(
    title: str,
    size: Size,
    specs: Mapping[str, SubjectSpec],
    caches: Mapping[str, Path | None],
    advance: Progress,
    timeout_s: Timeout,
) -> Section:
    """Sample each start in a fresh process; a cache is None where nothing may be compiled yet."""
    compile_s: dict[str, list[float]] = {name: [] for name in specs}
    optimizer_s: dict[str, list[float]] = {name: [] for name in specs}
    for repeat in range(size.num_repeats):
        for name in rotated(list(specs), repeat):
            advance(f"{title.lower()}, {repeat + 1}: {name}")
            graph_s, update_s = _start_s(specs[name], caches[name], timeout_s)
            compile_s[name].append(graph_s)
            optimizer_s[name].append(update_s)
    base = [[sample] for sample in compile_s[PLAIN]]
    rows = [
        Row(
            {"subject": name},
            {
                "compilation": Metric("s", tuple(compile_s[name])),
                "to plain": paired_ratios([[sample] for sample in compile_s[name]], base),
                "optimizer's": Metric("s", tuple(optimizer_s[name])),
            },
        )
        for name in specs
    ]
    return Section(title, setting_of(size.model, size.batch_size, num_repeats=size.num_repeats), rows)


def _start_s(spec: SubjectSpec, cache: Path | None, timeout_s: Timeout) -> tuple[float, float]:
    with SubjectProcess(spec, cache, timeout_s=timeout_s) as subject:
        return cold_times_s(subject.step(NUM_COLD_STEPS))


def _steps(
    context: Context,
    size: Size,
    specs: Mapping[str, SubjectSpec],
    cache: Path,
    advance: Progress,
    timeout_s: Timeout,
) -> Section:
    with ExitStack() as stack:
        subjects: dict[str, SubjectProcess] = {}
        for name, spec in specs.items():
            advance(f"compiling: {name}")
            subjects[name] = stack.enter_context(SubjectProcess(spec, cache, timeout_s=timeout_s))
            subjects[name].step(2)
        turns = take_turns(subjects, size, context, advance)
        num_moments = {name: subject.report().get("num_moments") for name, subject in subjects.items()}
        ready = subjects[PLAIN].ready
    tokens = size.batch_size * size.model.length
    counts = {name: ready[name] for name in ("num_parameters", "num_threads")}
    setting = size.setting(len(turns[PLAIN]), **counts)
    rows = [Row({"subject": name}, metrics_of(turns[name], turns[PLAIN], tokens, num_moments[name])) for name in specs]
    return Section("Time per step", setting, rows)


def metrics_of(turns: list[Turn], base: list[Turn], tokens: int, num_moments: int | None) -> dict[str, Metric]:
    """A subject's row.

    Raises:
        ValueError: as `step_metrics`.
    """
    metrics = step_metrics(turns, {"plain": base}, in_parts=True)
    metrics["tokens/s"] = Metric("per_s", tuple(tokens / sample for sample in metrics["step"].samples))
    if num_moments is not None:
        metrics["moments"] = one("number", num_moments)
    return metrics
