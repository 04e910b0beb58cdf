"""Compute DeepSpeed's learning-rate schedules: pure functions, and a scheduler of `torch.optim.lr_scheduler`.

Values at each step are those of the classes of the same names in DeepSpeed 0.19 (deepspeed/runtime/lr_schedules.py).
Steps count from -1, as there: so `WarmupLR` and `WarmupDecayLR` use the smallest rate for two steps.
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
"""One number for all parameter groups, or one number for each."""

SECOND_BETA = 0.99
"""Second beta that `OneCycle` sets; its momentum is the first."""


class Schedule(Section):
    """A schedule of hyperparameters over steps.

    Attributes:
        last_batch_iteration: index of the last step before training begins; -1: none.
    """

    last_batch_iteration: int = Field(-1, ge=-1)

    def lr(self, at: int, group: int, base: float) -> float:
        """Return the learning rate of a parameter group.

        Args:
            at: index of the latest step, from 0; -1 before the first one.
            group: index of the parameter group.
            base: learning rate that the group was made with.
        """
        raise AssertionError("a schedule has values")

    def momentum(self, at: int, group: int) -> float | None:
        """Return the first beta of a parameter group; None: it does not change."""
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
        """Return the fraction of the warmup that is done, from 0 to 1; only for `0 <= at < num_warm`."""
        if self.warmup_type == "linear":
            return at / self.num_warm
        return 1.0 / math.log(self.num_warm) * math.log(at + 1)


class WarmupLR(_Warmup):
    """A rate that rises from one value to another and stays there; by default at the optimizer's own."""

    warmup_min_lr: PerGroup = 0.0
    warmup_max_lr: PerGroup | None = None

    def lr(self, at: int, group: int, base: float) -> float:
        smallest = _of(self.warmup_min_lr, group)
        if at < 0:
            return smallest
        largest = base if self.warmup_max_lr is None else _of(self.warmup_max_lr, group)
        return smallest + (largest - smallest) * (self.warmth(at) if at < self.num_warm else self.after(at))

    def after(self, at: int) -> float:
        """Return the rate after the warmup, from 0 (the smallest) to 1 (the largest)."""
        return 1.0


class WarmupDecayLR(WarmupLR):
    """A rate that rises from one value to another, then falls linearly back."""

    total_num_steps: PositiveInt
    warmup_max_lr: PerGroup | None = 0.001

    def after(self, at: int) -> float:
        return max(0.0, (self.total_num_steps - at) / max(1.0, self.total_num_steps - self.num_warm))


class WarmupCosineLR(_Warmup):
    """A rate that rises from a fraction of the optimizer's rate to all of it, then falls as half a cosine."""

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
    """A rate that grows linearly or in stairs, without limit (Smith, arXiv:1803.09820)."""

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
    """A rate that rises, falls and decays, and a momentum that moves the other way (Smith, arXiv:1803.09820)."""

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
        """Return the position between the cycle's bounds, from 0 to 1."""
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
        """Return `x` of the decay's factor `1 + x` after the cycle; 0 without a decay."""
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
    """A `torch.optim` scheduler that sets the values of a schedule, which depend only on the number of steps.

    `last_epoch` counts steps. The schedule itself is not in `state_dict`.
    """

    def __init__(self, optimizer: Optimizer, schedule: Schedule) -> None:
        self.schedule = schedule
        self._sets_momentum = schedule.momentum(0, 0) is not None and "betas" in optimizer.defaults
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Any]:
        """Return the learning rates after `last_epoch` steps, and set betas if the schedule has a momentum."""
        begun_at = self.schedule.last_batch_iteration
        if self.last_epoch == 0 and begun_at >= 0:
            return list(self.base_lrs)
        at = self.last_epoch + begun_at
        if self._sets_momentum:
            for index, group in enumerate(self.optimizer.param_groups):
                group["betas"] = (cast(float, self.schedule.momentum(at, index)), SECOND_BETA)
        return [self.schedule.lr(at, index, float(base)) for index, base in enumerate(self.base_lrs)]

    def state_dict(self) -> dict[str, Any]:
        """Return the state without the schedule, which the configuration has."""
        return {key: value for key, value in super().state_dict().items() if not key.startswith(("schedule", "_sets"))}


def make_schedule(kind: str, params: Mapping[str, Any], num_groups: int) -> Schedule:
    """Make the schedule of a configuration's `scheduler` section.

    Raises:
        OptionsError: there is no such type; a parameter is unknown, missing or invalid; a list has not one value for
            each parameter group.
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
