"""Which states an optimizer keeps for its parameters, and in which dtypes: what layouts and plans reckon with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

MASTER, EXP_AVG, EXP_AVG_SQ, MAX_EXP_AVG_SQ = "master", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"
MASTER_LOW = "master_low"
"""The lower 16 bits of an fp32 master, whose upper ones are those of the bf16 parameter."""

MOMENTS = (EXP_AVG, EXP_AVG_SQ)
"""What Adam and LAMB keep of past gradients; with `amsgrad` Adam also keeps the largest `EXP_AVG_SQ` so far."""

MOMENTUM_BUFFER = "momentum_buffer"
"""What SGD with momentum keeps of them."""

UNSIGNED = (EXP_AVG_SQ, MAX_EXP_AVG_SQ)
"""Moments of which no element is negative."""

ELEMENTS_PER_SCALE = 256
"""Elements that share one scale in 8-bit moments."""

FLOAT32, BFLOAT16, INT8, NONE, SPLIT = "float32", "bfloat16", "int8", "none", "split"

MOMENT_DTYPES = {FLOAT32: torch.float32, BFLOAT16: torch.bfloat16, INT8: torch.uint8}
"""How the moments of a format are stored."""


def scale_of(moment: str) -> str:
    """The kind of data with one entry for each `ELEMENTS_PER_SCALE` elements of an 8-bit moment."""
    return moment + _SCALE


def is_scale(kind: str) -> bool:
    """Whether a kind of data is the scales of an 8-bit moment."""
    return kind.endswith(_SCALE)


_SCALE = "_scale"


@dataclass(frozen=True)
class StateFormat:
    """In what form states are kept.

    Attributes:
        moments: "float32", "bfloat16", or "int8": codes of one byte, and an fp32 scale for each block of elements.
        master: of 16-bit parameters; others are their own master. "float32"; "none"; or "split": of bf16 parameters the
            lower bits, unless moments are 8-bit (no kernel does both); else as "float32".
        kinds: the moments. Without any, `moments` is "float32".
    """

    moments: str = FLOAT32
    master: str = SPLIT
    kinds: tuple[str, ...] = MOMENTS

    def dtypes(self, param_dtype: torch.dtype) -> dict[str, torch.dtype]:
        """The dtype of each kind of state of such a parameter, in the order in which they are printed."""
        return _dtypes(self, param_dtype)

    def seen_by(self, param_dtype: torch.dtype) -> StateFormat:
        """The same for such parameters, and equal where nothing differs: fp32 parameters know no kinds of masters."""
        default = replace(self, master=SPLIT)
        return default if default.dtypes(param_dtype) == self.dtypes(param_dtype) else self

    @property
    def alignment(self) -> int:
        """Elements that a tensor must begin at a multiple of in its chunk."""
        return ELEMENTS_PER_SCALE if self.moments == INT8 else 1

    def __str__(self) -> str:
        moments = f"{self.moments} {'moments' if self.kinds == MOMENTS else ', '.join(self.kinds)}"
        return (moments if self.kinds else "no moments") + ("" if self.master == SPLIT else f", master: {self.master}")


@cache
def _dtypes(states: StateFormat, param_dtype: torch.dtype) -> dict[str, torch.dtype]:
    moment = param_dtype if param_dtype.itemsize > 4 else MOMENT_DTYPES[states.moments]
    found: dict[str, torch.dtype] = {}
    if states.master == SPLIT and param_dtype == torch.bfloat16 and states.moments != INT8:
        found = {MASTER_LOW: torch.int16}
    elif states.master != NONE and param_dtype.itemsize < 4:
        found = {MASTER: torch.float32}
    found |= dict.fromkeys(states.kinds, moment)
    return found | (dict.fromkeys(map(scale_of, states.kinds), torch.float32) if moment == torch.uint8 else {})


def num_entries(kind: str, num_elements: int) -> int:
    """How many entries of a kind of data so many elements have."""
    return -(-num_elements // ELEMENTS_PER_SCALE) if is_scale(kind) else num_elements


DEFAULT_STATES = StateFormat()
