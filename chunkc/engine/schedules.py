"""DeepSpeed's learning-rate schedules, as pure functions and as a scheduler of `torch.optim.lr_scheduler`.

Values are those of the classes of the same names in DeepSpeed 0.19 (deepspeed/runtime/lr_schedules.py), at each step.
That DeepSpeed counts from -1 is kept: `WarmupLR` and `WarmupDecayLR` use the smallest rate for two steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

from pydantic import Field, PositiveInt, StrictBool
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from chunkc.engine.sections import Section, checked
from chunkc.ir.errors import OptionsError
from chunkc.ir.text import short

PerGroup = float | list[float]
"""A number for all parameter groups, or one for each."""

SECOND_BETA = 0.99
"""What `OneCycle` sets the other beta to."""


class Schedule(Section):
    """A schedule of hyper-parameters over steps.

    Attributes:
        last_batch_iteration: the step that training begins after; -1: at the beginning.
    """

    last_batch_iteration: int = Field(-1, ge=-1)

    def lr(self, at: int, group: int, base: float) -> float:
        """The learning rate of a parameter group.

        Args:
            at: the latest step's number, from 0; -1 before the first one.
            base: the rate with which the group was made.
        """
        raise AssertionError("a schedule has values")

    def momentum(self, at: int, group: int) -> float | None:
        """The first beta of a parameter group; None: it stays."""
        return None


def _of(value: PerGroup, group: int) -> float:
    return value[group] if isinstance(value, list) else value


class _Warmup(Schedule):
    warmup_num_steps: PositiveInt = 1000
    warmup_type: Literal["log", "linear"] = "log"

    @property
    def num_warm(self) -> int:
        return max(2, self.warmup_num_steps)

    def warmth(self, at: int) -> float:
        """From 0 to 1 during the first steps."""
        if self.warmup_type == "linear":
            return at / self.num_warm
        return 1.0 / math.log(self.num_warm) * math.log(at + 1)


class WarmupLR(_Warmup):
    """From one rate to another, which stays; by default to the optimizer's own."""

    warmup_min_lr: PerGroup = 0.0
    warmup_max_lr: PerGroup | None = None

    def lr(self, at: int, group: int, base: float) -> float:
        smallest = _of(self.warmup_min_lr, group)
        if at < 0:
            return smallest
        largest = base if self.warmup_max_lr is None else _of(self.warmup_max_lr, group)
        return smallest + (largest - smallest) * (self.warmth(at) if at < self.num_warm else self.after(at))

    def after(self, at: int) -> float:
        """The part of the way from the smallest to the largest rate, once it is warm."""
        return 1.0


class WarmupDecayLR(WarmupLR):
    """From one rate to another, and linearly back."""

    total_num_steps: PositiveInt
    warmup_max_lr: PerGroup | None = 0.001

    def after(self, at: int) -> float:
        return max(0.0, (self.total_num_steps - at) / max(1.0, self.total_num_steps - self.num_warm))


class WarmupCosineLR(_Warmup):
    """From a part of the optimizer's rate to all of it, and down again as half a cosine."""

    total_num_steps: PositiveInt
    warmup_min_ratio: float = 0.0
    cos_min_ratio: float = 0.0001

    def lr(self, at: int, group: int, base: float) -> float:
        return base * self.ratio(at)

    def ratio(self, at: int) -> float:
        if at < 0:
            return 0.0
        if at < self.num_warm:
            return self.warmup_min_ratio + self.warmth(at) * (1.0 - self.warmup_min_ratio)
        progress = min(1.0, (at - self.num_warm + 1) / max(1, self.total_num_steps - self.num_warm))
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * ((1 + math.cos(math.pi * progress)) / 2))


class LRRangeTest(Schedule):
    """A rate that grows and grows (Smith, arXiv:1803.09820)."""

    lr_range_test_min_lr: PerGroup = 1e-3
    lr_range_test_step_size: PositiveInt = 2000
    lr_range_test_step_rate: float = 1.0
    lr_range_test_staircase: StrictBool = False

    def lr(self, at: int, group: int, base: float) -> float:
        interval = (at + 1) / self.lr_range_test_step_size
        if self.lr_range_test_staircase:
            interval = math.floor(interval)
        return _of(self.lr_range_test_min_lr, group) * (1 + self.lr_range_test_step_rate * interval)


class OneCycle(Schedule):
    """A rate that grows, falls and decays, and a momentum that goes the other way (Smith, arXiv:1803.09820)."""

    cycle_min_lr: PerGroup
    cycle_max_lr: PerGroup
    decay_lr_rate: float = 0.0
    cycle_first_step_size: float = Field(2000, gt=0)
    cycle_second_step_size: float | None = Field(None, ge=0)
    cycle_first_stair_count: int = Field(0, ge=0)
    cycle_second_stair_count: int | None = Field(None, ge=0)
    decay_step_size: float = Field(0, ge=0)
    cycle_momentum: StrictBool = True
    cycle_min_mom: PerGroup = 0.8
    cycle_max_mom: PerGroup = 0.9
    decay_mom_rate: float = 0.0

    @property
    def second_step_size(self) -> float:
        return self.cycle_first_step_size if self.cycle_second_step_size is None else self.cycle_second_step_size

    @property
    def num_steps(self) -> float:
        return self.cycle_first_step_size + self.second_step_size

    def height(self, at: int) -> float:
        """The position of the cycle between its bounds, from 0 to 1."""
        step, first, second = at + 1, self.cycle_first_step_size, self.second_step_size
        ratio = first / self.num_steps
        x = 1.0 + step / self.num_steps - math.floor(1 + step / self.num_steps)
        rises = x <= ratio
        stairs = self.cycle_first_stair_count
        if not rises and self.cycle_second_stair_count is not None:
            stairs = self.cycle_second_stair_count
        if stairs == 0:
            return x / ratio if rises else (x - 1) / (ratio - 1)
        inside = step % self.num_steps
        position = inside * stairs / first if inside <= first else (self.num_steps - inside) * stairs / second
        return math.floor(position) / stairs

    def decay(self, at: int, rate: float) -> float:
        """The amount that the decay after the cycle has added to 1."""
        return rate * ((at - self.num_steps + 1) / self.decay_step_size) if self.decay_step_size and rate else 0.0

    def lr(self, at: int, group: int, base: float) -> float:
        smallest, largest = _of(self.cycle_min_lr, group), _of(self.cycle_max_lr, group)
        if at < 0:
            return smallest
        if at < self.num_steps:
            return smallest + (largest - smallest) * self.height(at)
        return smallest / (1 + self.decay(at, self.decay_lr_rate))

    def momentum(self, at: int, group: int) -> float | None:
        if not self.cycle_momentum:
            return None
        smallest, largest = _of(self.cycle_min_mom, group), _of(self.cycle_max_mom, group)
        if at < 0:
            return smallest
        if at < self.num_steps:
            return largest - (largest - smallest) * self.height(at)
        return largest * (1 + self.decay(at, self.decay_mom_rate))


SCHEDULES: Mapping[str, type[Schedule]] = {
    kind.__name__: kind for kind in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}


class ScheduledLR(LRScheduler):
    """A `torch.optim` scheduler of a schedule: values are set, not multiplied, and depend on the number of steps alone.

    `state_dict` has only numbers, and `last_epoch` counts steps.
    """

    def __init__(self, optimizer: Optimizer, schedule: Schedule) -> None:
        self.schedule = schedule
        self._sets_momentum = schedule.momentum(0, 0) is not None and "betas" in optimizer.defaults
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Any]:
        """The learning rates after `last_epoch` steps."""
        begun_at = self.schedule.last_batch_iteration
        if self.last_epoch == 0 and begun_at >= 0:
            return list(self.base_lrs)
        at = self.last_epoch + begun_at
        if self._sets_momentum:
            for index, group in enumerate(self.optimizer.param_groups):
                group["betas"] = (cast(float, self.schedule.momentum(at, index)), SECOND_BETA)
        return [self.schedule.lr(at, index, float(base)) for index, base in enumerate(self.base_lrs)]

    def state_dict(self) -> dict[str, Any]:
        """Without the schedule, which the configuration has."""
        return {key: value for key, value in super().state_dict().items() if not key.startswith(("schedule", "_sets"))}


def make_schedule(kind: str, params: Mapping[str, Any], num_groups: int) -> Schedule:
    """The schedule of a configuration's `scheduler` section.

    Raises:
        OptionsError: there is no such type; a parameter is unknown, missing or makes no sense.
    """
    if kind not in SCHEDULES:
        raise OptionsError(f"scheduler.type is {short(kind)}; allowed: {', '.join(SCHEDULES)}")
    schedule = checked(SCHEDULES[kind], params, "scheduler.params")
    for name, value in schedule:
        if isinstance(value, Sequence) and not isinstance(value, str) and len(value) != num_groups:
            raise OptionsError(
                f"scheduler.params.{name} has {len(value)} values; the optimizer has {num_groups} parameter groups"
            )
    return schedule
