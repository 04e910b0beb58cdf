"""In which stages an optimizer updates a chunk group, and which kinds of data each stage reads and writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chunkc.ir.chunks import GRAD, PARAM
from chunkc.ir.states import EXP_AVG, EXP_AVG_SQ, MASTER


@dataclass(frozen=True)
class UpdateStage:
    """Kinds of data that one stage needs in slots: those it only reads, and those it (also) writes."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]

    @property
    def kinds(self) -> tuple[str, ...]:
        return (*self.reads, *self.writes)


def update_stages(kinds: Sequence[str], num_stages: int) -> tuple[UpdateStage, ...]:
    """The stages of an update of a group that has these kinds of data.

    One stage: an elementwise rule, such as Adam's. Two: one that scales each tensor's update by its norm, such as
    LAMB's. The first makes the moments and sums up squares; once all of a tensor had it, the second makes the
    parameters from the moments, without the gradients.
    """
    if num_stages == 1:
        return (UpdateStage((GRAD,), tuple(kind for kind in kinds if kind != GRAD)),)
    assert num_stages == 2, num_stages
    moments = (EXP_AVG, EXP_AVG_SQ)
    target = tuple(kind for kind in kinds if kind in (PARAM, MASTER))
    return (UpdateStage((GRAD, MASTER if MASTER in kinds else PARAM), moments), UpdateStage(moments, target))
