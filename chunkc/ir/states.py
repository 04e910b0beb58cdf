"""Describe the states that an optimizer keeps for its parameters, and their dtypes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

MASTER, EXP_AVG, EXP_AVG_SQ, MAX_EXP_AVG_SQ = "master", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"
MASTER_LOW = "master_low"
"""Lower 16 bits of an fp32 master; the bf16 parameter holds the upper ones."""

MOMENTS = (EXP_AVG, EXP_AVG_SQ)
"""States of Adam and LAMB; with `amsgrad` Adam also keeps the largest `EXP_AVG_SQ` so far."""

MOMENTUM_BUFFER = "momentum_buffer"
"""State of SGD with momentum."""

UNSIGNED = (EXP_AVG_SQ, MAX_EXP_AVG_SQ)
"""Moments without negative elements."""

ELEMENTS_PER_SCALE = 256
"""Number of elements that share one scale in 8-bit moments."""

FLOAT32, BFLOAT16, INT8, NONE, SPLIT = "float32", "bfloat16", "int8", "none", "split"

MOMENT_DTYPES = {FLOAT32: torch.float32, BFLOAT16: torch.bfloat16, INT8: torch.uint8}
"""Storage dtypes of the moments of a format."""


def scale_of(moment: str) -> str:
    """Return the kind of data with one entry for each `ELEMENTS_PER_SCALE` elements of an 8-bit moment."""
    return moment + _SCALE


def is_scale(kind: str) -> bool:
    """Whether a kind of data is the scales of an 8-bit moment."""
    return kind.endswith(_SCALE)


_SCALE = "_scale"


@dataclass(frozen=True)
class StateFormat:
    """Format of an optimizer's states.

    Attributes:
        moments: "float32", "bfloat16", or "int8": codes of one byte, and an fp32 scale for each block of elements.
        master: of 16-bit parameters; other parameters are their own master. "float32"; "none"; or "split": of bf16
            parameters the lower bits, unless moments are 8-bit (no kernel does both); else as "float32".
        kinds: the moments. Without any, `moments` is "float32".
    """

    moments: str = FLOAT32
    master: str = SPLIT
    kinds: tuple[str, ...] = MOMENTS

    def dtypes(self, param_dtype: torch.dtype) -> dict[str, torch.dtype]:
        """Return the dtype of each kind of state of such a parameter, in the order in which they are printed."""
        return _dtypes(self, param_dtype)

    def seen_by(self, param_dtype: torch.dtype) -> StateFormat:
        """Return the canonical format for such parameters: equal for all formats with equal dtypes.

        Parameters in fp32, for example, have no masters to tell formats apart.
        """
        default = replace(self, master=SPLIT)
        return default if default.dtypes(param_dtype) == self.dtypes(param_dtype) else self

    @property
    def alignment(self) -> int:
        """Alignment of a tensor in its chunk, in elements."""
        return ELEMENTS_PER_SCALE if self.moments == INT8 else 1

    def __str__(self) -> str:
        moments = f"{self.moments} {'moments' if self.kinds == MOMENTS else ', '.join(self.kinds)}"
        return (moments if self.kinds else "no moments") + ("" if self.master == SPLIT else f", master: {self.master}")


@cache
def _dtypes(states: StateFormat, param_dtype: torch.dtype) -> dict[str, torch.dtype]:
    moment = param_dtype if param_dtype.itemsize > 4 else MOMENT_DTYPES[states.moments]
    dtypes: dict[str, torch.dtype] = {}
    if states.master == SPLIT and param_dtype == torch.bfloat16 and states.moments != INT8:
        dtypes = {MASTER_LOW: torch.int16}
    elif states.master != NONE and param_dtype.itemsize < 4:
        dtypes = {MASTER: torch.float32}
    dtypes |= dict.fromkeys(states.kinds, moment)
    return dtypes | (dict.fromkeys(map(scale_of, states.kinds), torch.float32) if moment == torch.uint8 else {})


def num_entries(kind: str, num_elements: int) -> int:
    """Return the number of entries of a kind of data for so many elements."""
    return -(-num_elements // ELEMENTS_PER_SCALE) if is_scale(kind) else num_elements


DEFAULT_STATES = StateFormat()
