"""Time steps of subjects that take turns: sizes, turns, and a row's metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from measuring.context import Context, Progress
from measuring.metrics import Metric, flat, largest_difference, one, paired_ratios, setting_of
from measuring.subject_process import Steps, Turn, interleave
from models.gpt import GPTConfig


class Counts(Protocol):
    """Numbers of turns of each subject, and of steps in one."""

    @property
    def num_rounds(self) -> int: ...

    @property
    def num_steps(self) -> int: ...


def take_turns(
    subjects: Mapping[str, Steps], size: Counts, context: Context, advance: Progress, case: str = "training"
) -> dict[str, list[Turn]]:
    """Run each subject's turns, as long as there is time."""
    return interleave(
        subjects,
        num_rounds=size.num_rounds,
        num_steps=size.num_steps,
        on_turn=lambda name: advance(f"{case}: {name}"),
        is_over=lambda: context.is_out_of_time,
    )


HUGE_NBYTES = 2**40
"""A budget that everything fits."""

LOSS_TOLERANCE = 1e-2
"""Subjects with losses that differ by more do not train the same model: their times compare nothing."""


@dataclass(frozen=True)
class Size:
    """A model and how often it is measured.

    Attributes:
        batch_size: of one process.
        num_rounds, num_steps: turns of each subject, and the steps of one.
        num_repeats: of what is measured in fresh processes.
        codegen: everybody's.
    """

    model: GPTConfig
    batch_size: int
    num_rounds: int
    num_steps: int
    num_repeats: int = 1
    codegen: str = "inductor"

    def setting(self, num_rounds: int, **more: Any) -> dict[str, Any]:
        """Setting that all rows share; `num_rounds` were measured."""
        counts = {"num_rounds": num_rounds, "num_steps_per_round": self.num_steps}
        return setting_of(self.model, self.batch_size, **more, **counts)


SMALL = Size(
    GPTConfig(num_layers=2, width=64, num_heads=2, length=32), batch_size=2, num_rounds=1, num_steps=3, codegen="eager"
)
"""Size of small runs."""


def step_metrics(turns: Sequence[Turn], bases: Mapping[str, Sequence[Turn]], *, in_parts: bool) -> dict[str, Metric]:
    """A subject's times, and their ratios to those of others, by name, round by round.

    Args:
        in_parts: ratios of both parts of a step, too.

    Raises:
        ValueError: the losses differ by more than LOSS_TOLERANCE.
    """
    differences = [largest_difference(_losses(turns), _losses(base)) for base in bases.values()]
    if not all(difference <= LOSS_TOLERANCE for difference in differences):
        raise ValueError(f"losses differ by {max(differences)}: the subjects do not train the same model")
    metrics: dict[str, Metric] = {}
    for field, name, short in (
        ("step_s", "step", ""),
        ("forward_backward_s", "forward + backward", "f + b "),
        ("optimizer_s", "optimizer", "optimizer "),
    ):
        own = [getattr(turn, field) for turn in turns]
        metrics[name] = flat("s", own)
        if in_parts or not short:
            for base_name, base in bases.items():
                ratios = paired_ratios(own, [getattr(turn, field) for turn in base])
                metrics[f"{short}to {base_name}"] = ratios
    return metrics | {"largest loss difference": one("number", max(differences))}


def _losses(turns: Sequence[Turn]) -> list[float]:
    return [loss for turn in turns for loss in turn.losses]
