"""The suite `fits`: where all of it fits, what chunkc costs beside plain `torch.compile` with a fused AdamW.

Two sections: the time per step, in processes that live through all rounds and take turns; and cold compilation,
each sample a fresh process with an empty cache.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from context import Context, Progress
from gpt import GPTConfig
from metrics import Metric, Row, Section, flat, one, paired_ratios, setting_of
from specs import CHUNKC, PLAIN, SubjectSpec
from subject_process import REPLY_TIMEOUT_S, SubjectProcess, Timeout, Turn, interleave, rotated

HUGE_NBYTES = 2**40
"""A budget that everything fits."""

LOSS_TOLERANCE = 1e-2
"""Subjects whose losses differ by more do not train the same model: their times compare nothing."""


@dataclass(frozen=True)
class Size:
    """A model and how often it is measured; `num_steps` are those of one turn, `codegen` is everybody's."""

    model: GPTConfig
    batch_size: int
    num_repeats: int
    num_rounds: int
    num_steps: int
    codegen: str = "inductor"


FULL = Size(
    GPTConfig(num_layers=24, width=256, num_heads=4, length=128),
    batch_size=6,
    num_repeats=2,
    num_rounds=10,
    num_steps=5,
)
SMALL = Size(
    GPTConfig(num_layers=2, width=64, num_heads=2, length=32),
    batch_size=2,
    num_repeats=1,
    num_rounds=1,
    num_steps=3,
    codegen="eager",
)
GPU = Size(
    GPTConfig(num_layers=24, width=1024, num_heads=16, length=1024, vocabulary=50_304),
    batch_size=8,
    num_repeats=1,
    num_rounds=6,
    num_steps=5,
)
"""GPT-2 medium's shape, fp32 parameters, matrix products in TF32: the same arithmetic for all."""

NUM_COLD_STEPS = 6
"""Of a compilation's process: the first compiles, the second may still be slow, the others are steady."""

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
    specs = {name: _spec(size, options, context.device) for name, options in OPTIONS.items()}
    progress = Progress(context.show, len(specs) * (size.num_repeats + 1 + size.num_rounds))
    timeout_s = context.reply_timeout(REPLY_TIMEOUT_S)
    with context.code_cache() as cache:
        if context.wants_case("steps"):
            yield _steps(context, size, specs, cache, progress, timeout_s)
        if context.wants_case("compilation") and not context.is_out_of_time:
            yield _compilation(size, specs, cache if context.is_small else None, progress, timeout_s)


def _spec(size: Size, options: dict[str, Any] | None, device: str) -> SubjectSpec:
    if options is None:
        return SubjectSpec(size.model, size.batch_size, PLAIN, device=device, codegen=size.codegen)
    return SubjectSpec(size.model, size.batch_size, CHUNKC, options | {"codegen": size.codegen}, device=device)


def cold_times_s(turn: Turn) -> tuple[float, float]:
    """What the first step took longer than steady ones: forward and backward, and the optimizer."""
    return tuple(  # type: ignore[return-value]
        max(0.0, samples_s[0] - statistics.median(samples_s[2:]))
        for samples_s in (turn.forward_backward_s, turn.optimizer_s)
    )


def _compilation(
    size: Size, specs: Mapping[str, SubjectSpec], cache: Path | None, advance: Progress, timeout_s: Timeout
) -> Section:
    """Each sample by a fresh process; `cache` is None where nothing may be compiled yet."""
    compile_s: dict[str, list[float]] = {name: [] for name in specs}
    optimizer_s: dict[str, list[float]] = {name: [] for name in specs}
    for repeat in range(size.num_repeats):
        for name in rotated(list(specs), repeat):
            advance(f"cold compilation {repeat + 1}: {name}")
            with SubjectProcess(specs[name], cache, timeout_s=timeout_s) as subject:
                graph_s, update_s = cold_times_s(subject.step(NUM_COLD_STEPS))
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
    setting = setting_of(size.model, size.batch_size, num_repeats=size.num_repeats)
    return Section("Cold compilation of forward and backward", setting, rows)


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
        turns = interleave(
            subjects,
            num_rounds=size.num_rounds,
            num_steps=size.num_steps,
            on_turn=lambda name: advance(f"training: {name}"),
            is_over=lambda: context.is_out_of_time,
        )
        num_moments = {name: subject.report().get("num_moments") for name, subject in subjects.items()}
        ready = subjects[PLAIN].ready
    tokens = size.batch_size * size.model.length
    setting = setting_of(
        size.model,
        size.batch_size,
        num_parameters=ready["num_parameters"],
        num_threads=ready["num_threads"],
        num_rounds=size.num_rounds,
        num_steps_per_round=size.num_steps,
    )
    rows = [
        Row({"subject": name}, step_metrics(turns[name], turns[PLAIN], tokens, num_moments[name])) for name in specs
    ]
    return Section("Time per step", setting, rows)


def step_metrics(turns: list[Turn], base: list[Turn], tokens: int, num_moments: int | None) -> dict[str, Metric]:
    """A subject's times, and their ratios to the base's, round by round.

    Raises:
        ValueError: the losses differ by more than LOSS_TOLERANCE.
    """
    step_s = flat("s", [turn.step_s for turn in turns])
    difference = max_loss_difference(turns, base)
    if not difference <= LOSS_TOLERANCE:
        raise ValueError(f"losses differ by {difference}: the subjects do not train the same model")
    metrics = {
        "step": step_s,
        "to plain": paired_ratios([turn.step_s for turn in turns], [turn.step_s for turn in base]),
        "forward + backward": flat("s", [turn.forward_backward_s for turn in turns]),
        "f + b to plain": paired_ratios(
            [turn.forward_backward_s for turn in turns], [turn.forward_backward_s for turn in base]
        ),
        "optimizer": flat("s", [turn.optimizer_s for turn in turns]),
        "optimizer to plain": paired_ratios([turn.optimizer_s for turn in turns], [turn.optimizer_s for turn in base]),
        "tokens/s": Metric("per_s", tuple(tokens / sample for sample in step_s.samples)),
        "largest loss difference": one("number", difference),
    }
    if num_moments is not None:
        metrics["moments"] = one("number", num_moments)
    return metrics


def max_loss_difference(turns: list[Turn], base: list[Turn]) -> float:
    """Between equal steps; NaN where a loss is."""
    differences = [
        abs(a - b)
        for turn, other in zip(turns, base, strict=True)
        for a, b in zip(turn.losses, other.losses, strict=True)
    ]
    return float("nan") if any(d != d for d in differences) else max(differences)
