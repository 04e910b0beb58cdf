"""The suite `checkpoint`: the cost of saving every 50 steps, against the same training without.

The demonstration's GPT, under a third of plain PyTorch's memory with model data on disk, and with all of it resident.
Of each, two processes take turns. A turn has as many steps as lie between two checkpoints, and one is saved in the
midst of it: the steps that go on while it is written are all in that turn. So the ratio is of whole turns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from demo import SIZES
from measuring.context import Context, Progress
from measuring.metrics import Metric, Row, Section, one, setting_of
from measuring.subject_process import NUM_SETTLING_STEPS, REPLY_TIMEOUT_S, SubjectProcess, Turn
from peers.specs import CHUNKC, SubjectSpec

from suites.timed_steps import take_turns

NOT_SAVING, SAVING = "no checkpoints", "a checkpoint in each turn"
TOLERANCE = 1.05
"""A turn with a checkpoint takes at most so many times what it takes without."""


@dataclass(frozen=True)
class Size:
    """A size of the demonstration, its budget on disk, and how often it is measured."""

    name: str
    budget_nbytes: int
    num_rounds: int
    num_steps: int
    codegen: str = "inductor"


FULL = Size("small", budget_nbytes=122_242_513, num_rounds=8, num_steps=50)
SMALL = Size("tiny", budget_nbytes=2**21, num_rounds=1, num_steps=4, codegen="eager")

CASES = {"a third of the memory, on disk": "disk", "everything fits": None}
"""Case -> its home; None: everything stays on the compute tier."""


def run(context: Context) -> Iterator[Section]:
    """Measure, on the CPU; yields each case's section as soon as it is there.

    Raises:
        SubjectFailed: a subject's process failed.
        ValueError: losses differ between saving and not saving.
    """
    size = SMALL if context.is_small else FULL
    cases = {case: home for case, home in CASES.items() if home or not context.is_small}
    progress = Progress(context.show, len(cases) * 2 * (1 + size.num_rounds))
    with context.code_cache() as cache:
        for case, home in cases.items():
            if context.wants_case(case) and not context.is_out_of_time:
                yield _section(context, size, case, home, cache, progress)


def _section(context: Context, size: Size, case: str, home: str | None, cache: Path, advance: Progress) -> Section:
    model, batch_size = SIZES[size.name]
    options: dict[str, Any] = {"whole_graph": "never", "codegen": size.codegen, "activations": "keep"}
    options["memory_budget"] = 2**40
    if home is not None:
        options |= {"memory_budget": size.budget_nbytes, "home": home}
    spec = SubjectSpec(model, batch_size, CHUNKC, options, is_placed=home is not None)
    specs = {NOT_SAVING: spec, SAVING: replace(spec, save_every=NUM_SETTLING_STEPS + size.num_steps)}
    timeout_s = context.reply_timeout(REPLY_TIMEOUT_S)
    with ExitStack() as stack:
        subjects = {}
        for name, of_name in specs.items():
            advance(f"{case}: compiling, {name}")
            subjects[name] = stack.enter_context(SubjectProcess(of_name, cache, timeout_s=timeout_s))
            subjects[name].step(NUM_SETTLING_STEPS + size.num_steps)
        turns = take_turns(subjects, size, context, advance, f"{case}: training")
        ready = subjects[SAVING].ready
    base = turns[NOT_SAVING]
    if any(turn.losses != other.losses for turn, other in zip(turns[SAVING], base, strict=True)):
        raise ValueError("the losses are others where checkpoints are saved")
    rows = [_row(name, turns[name], base, context.is_small) for name in specs]
    setting = setting_of(
        model,
        batch_size,
        num_parameters=ready["num_parameters"],
        num_threads=ready["num_threads"],
        num_rounds=size.num_rounds,
        num_steps_per_checkpoint=size.num_steps,
    )
    return Section(f"Saving, {case}", setting, rows)


def _row(name: str, turns: list[Turn], base: list[Turn], is_small: bool) -> Row:
    """Whole turns compared round by round; the step that saves and the longest other one say where the time goes."""
    ratios = Metric("ratio", tuple(sum(a.step_s) / sum(b.step_s) for a, b in zip(turns, base, strict=True)))
    metrics = {
        "turn": Metric("s", tuple(sum(turn.step_s) for turn in turns)),
        "to no saving": ratios,
        "longest step": Metric("s", tuple(max(turn.step_s) for turn in turns)),
        "rounds": one("number", len(turns)),
    }
    is_dear = not is_small and ratios.median > TOLERANCE
    return Row({"subject": name}, metrics, "saving takes more than 5 %" if is_dear else "", is_failure=is_dear)
