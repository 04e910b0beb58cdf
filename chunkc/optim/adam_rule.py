"""Which Adam: in what form it keeps its states, how it rounds, and the launches that a run of elements takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from chunkc.ir.chunks import GRAD, PARAM
from chunkc.ir.errors import OptionsError
from chunkc.ir.states import (
    BFLOAT16,
    EXP_AVG,
    EXP_AVG_SCALE,
    EXP_AVG_SQ,
    EXP_AVG_SQ_SCALE,
    FLOAT32,
    INT8,
    MASTER,
    MASTER_LOW,
    NONE,
    SPLIT,
    StateFormat,
)
from chunkc.kernels.adam_cpu import adam_chunk_update
from chunkc.kernels.formats import AdamFormat, AdamSlots, GradScale, Moments, RoundingKey, Run, rounding_key
from chunkc.kernels.hyper import AdamHyper, scalar_table
from chunkc.optim.values import flag, shown

Runs = Sequence[tuple[int, int, AdamHyper]]
"""Elements `[begin, end)` of a group with their hyper-parameters, in order."""

MOMENTS: Mapping[torch.dtype | str, str] = {
    torch.float32: FLOAT32,
    torch.bfloat16: BFLOAT16,
    torch.int8: INT8,
    FLOAT32: FLOAT32,
    BFLOAT16: BFLOAT16,
    INT8: INT8,
}
"""What a user may call the moments' format."""


@dataclass(frozen=True)
class Place:
    """Which elements a flat tensor has, for the random bits of stochastic rounding: they depend on nothing else.

    Attributes:
        chunk: the index of the chunk group; for a parameter that is in none, -1 less its number in the optimizer.
        first_element: of the group.
    """

    chunk: int
    first_element: int


@dataclass(frozen=True)
class AdamRule:
    """An Adam's formats.

    Attributes:
        stochastic: round what is stored in bf16 (parameters without a master, moments) stochastically.
        seed: of those random bits.
    """

    states: StateFormat
    stochastic: bool
    seed: int

    @staticmethod
    def of(
        moments_dtype: torch.dtype | str,
        master_weights: bool | str | None,
        stochastic_rounding: bool,
        rounding_seed: int,
    ) -> AdamRule:
        """The rule that a user asks for.

        Raises:
            OptionsError: there is no such format of moments or masters, or not with the other options.
        """
        stochastic_rounding = flag({"stochastic_rounding": stochastic_rounding}, "stochastic_rounding")
        if isinstance(rounding_seed, bool) or not isinstance(rounding_seed, int):
            raise OptionsError(f"rounding_seed is {shown(rounding_seed)}; allowed: a whole number")
        if not isinstance(moments_dtype, str | torch.dtype) or moments_dtype not in MOMENTS:
            raise OptionsError(
                f'moments_dtype is {moments_dtype!r}; allowed: torch.float32, torch.bfloat16 and "int8" (blocks of 8 '
                "bits with a scale each)"
            )
        moments = MOMENTS[moments_dtype]
        if not (master_weights is None or isinstance(master_weights, bool) or master_weights in (SPLIT, FLOAT32)):
            raise OptionsError(f'master_weights is {master_weights!r}; allowed: True, False, "{SPLIT}" and "{FLOAT32}"')
        if master_weights == SPLIT and (stochastic_rounding or moments == INT8):
            raise OptionsError(
                f'master_weights="{SPLIT}" needs parameters rounded to nearest and fp32 or bf16 moments; use '
                f'master_weights="{FLOAT32}"'
            )
        if master_weights is None:
            master_weights = not stochastic_rounding
        if master_weights is True:
            master_weights = FLOAT32 if stochastic_rounding else SPLIT
        states = StateFormat(moments, master_weights or NONE)
        return AdamRule(states, stochastic_rounding, rounding_seed)

    def format(self, param_dtype: torch.dtype, grad_dtype: torch.dtype) -> AdamFormat:
        """What kernels update for parameters of a dtype.

        Raises:
            OptionsError: there is no such kernel; says what there is.
        """
        kinds = self.states.dtypes(param_dtype)
        in_bf16 = param_dtype == torch.bfloat16 or self.states.moments == BFLOAT16
        try:
            return AdamFormat(
                param_dtype,
                grad_dtype,
                moments=cast(Moments, self.states.moments),
                master=MASTER in kinds or MASTER_LOW in kinds,
                split=MASTER_LOW in kinds,
                rounding="stochastic" if self.stochastic and in_bf16 else "nearest",
            )
        except ValueError as error:
            text = str(error).replace("master=", "master_weights=").replace("rounding='stochastic'", _STOCHASTIC)
            raise OptionsError(text.replace("rounding='nearest'", "stochastic_rounding=False")) from error

    def launches(self, fmt: AdamFormat, runs: Runs, place: Place) -> Iterator[tuple[Runs, RoundingKey | None]]:
        """Runs that one launch may update; with stochastic rounding those of one step, which is part of the key."""
        if not fmt.stochastic:
            yield runs, None
            return
        for step in dict.fromkeys(hyper.step for _, _, hyper in runs):
            yield [run for run in runs if run[2].step == step], rounding_key(self.seed, step, place.chunk)


_STOCHASTIC = "stochastic_rounding=True"


def adam_slots(flat: Mapping[str, torch.Tensor]) -> AdamSlots:
    """The kernels' view of flat tensors by kind."""
    return AdamSlots(
        flat[PARAM],
        flat[GRAD],
        flat[EXP_AVG],
        flat[EXP_AVG_SQ],
        flat.get(MASTER, flat.get(MASTER_LOW)),
        flat.get(EXP_AVG_SCALE),
        flat.get(EXP_AVG_SQ_SCALE),
    )


def clipped(runs: Runs, at: int, until: int) -> Runs:
    """The part of the runs in the elements `[at, until)`, counted from `at`."""
    return [(max(b - at, 0), min(e, until) - at, hyper) for b, e, hyper in runs if e > at and b < until]


def update_on_cpu(rule: AdamRule, slots: AdamSlots, runs: Runs, scale: GradScale, place: Place) -> None:
    """Update runs of elements of flat tensors, on the CPU's threads."""
    fmt = rule.format(slots.param.dtype, slots.grad.dtype)
    for part, key in rule.launches(fmt, runs, place):
        hypers = list(dict.fromkeys(hyper for _, _, hyper in part))
        rows = {hyper: row for row, hyper in enumerate(hypers)}
        in_rows = [Run(begin, end, rows[hyper]) for begin, end, hyper in part]
        first_element = place.first_element if key is not None else 0
        adam_chunk_update(fmt, slots, in_rows, scalar_table(hypers), scale=scale, key=key, first_element=first_element)
