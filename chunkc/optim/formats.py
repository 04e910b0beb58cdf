"""In what form an elementwise rule keeps states and rounds, as its user asks for it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, TypeVar, cast

import torch

from chunkc.ir.errors import OptionsError
from chunkc.ir.states import BFLOAT16, FLOAT32, INT8, MASTER, MASTER_LOW, NONE, SPLIT, StateFormat
from chunkc.kernels.formats import MomentsFormat, UpdateFormat
from chunkc.optim.hyperparameters import flag, shown
from chunkc.optim.overlap_mode import NONE as NO_OVERLAP
from chunkc.optim.update_on import DEVICE


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the constructors of elementwise rules take by keyword, see `AdamW`."""

    maximize: bool = False
    update_on: str = DEVICE
    overlap: str = NO_OVERLAP
    undoable: bool = False
    moments_dtype: torch.dtype | str = torch.float32
    master_weights: bool | str | None = None
    stochastic_rounding: bool = False
    rounding_seed: int = 0
    foreach: bool | None = None
    fused: bool | None = None
    differentiable: bool = False


Init = TypeVar("Init", bound=Callable[..., None])


def with_options(init: Init) -> Init:
    """A constructor whose `**options` are `Options`: `help` and `inspect.signature` name each of them."""
    signature = inspect.signature(init)
    named = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    keywords = inspect.signature(Options).parameters.values()
    init.__signature__ = signature.replace(parameters=[*named, *keywords])  # type: ignore[attr-defined]
    return init


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
class Formats:
    """How states are kept and values rounded.

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
    ) -> Formats:
        """The formats that a user asks for.

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
        return Formats(states, stochastic_rounding, rounding_seed)

    @cache  # noqa: B019
    def of_kernel(
        self, kernel: type[UpdateFormat], param_dtype: torch.dtype, grad_dtype: torch.dtype, kinds: tuple[str, ...]
    ) -> UpdateFormat:
        """What a kernel updates for parameters of a dtype that have these kinds of states.

        Raises:
            OptionsError: there is no such kernel; says what there is.
        """
        has_moments = set(kinds) - {MASTER, MASTER_LOW} and param_dtype != torch.float64
        moments = self.states.moments if has_moments else FLOAT32
        in_bf16 = param_dtype == torch.bfloat16 or moments == BFLOAT16
        try:
            return kernel(
                param_dtype,
                grad_dtype,
                moments=cast(MomentsFormat, moments),
                master=MASTER in kinds or MASTER_LOW in kinds,
                split=MASTER_LOW in kinds,
                rounding="stochastic" if self.stochastic and in_bf16 else "nearest",
            )
        except ValueError as error:
            text = str(error).replace("master=", "master_weights=").replace("rounding='stochastic'", _STOCHASTIC)
            raise OptionsError(text.replace("rounding='nearest'", "stochastic_rounding=False")) from error


def formats_in(options: Mapping[str, Any]) -> tuple[Formats, dict[str, Any]]:
    """The formats that a constructor's `Options` ask for, and the others of them.

    Raises:
        OptionsError: there is no such format (see `Formats.of`).
    """
    rest = asdict(Options(**options))
    names = ("moments_dtype", "master_weights", "stochastic_rounding", "rounding_seed")
    return Formats.of(*[rest.pop(name) for name in names]), rest


_STOCHASTIC = "stochastic_rounding=True"
