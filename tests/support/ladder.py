"""Helpers of tests on the ladder of models: quick cases, batches of other sizes, wrong moments in words."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest
import torch
from memory_curves import Moment
from torch import Tensor
from zoo import Batch

from chunkc.passes.memory.scratch.operators import EXCEPTIONS


def rungs(names: Iterable[str], quick: Collection[str], second_tier: Collection[str] = ()) -> list[Any]:
    """Parameters of a test: the default run climbs `quick`, CI `second_tier` as well; the rest is slow."""

    def marks(name: str) -> Any:
        return pytest.mark.second_tier if name in second_tier else pytest.mark.slow

    return [name if name in quick else pytest.param(name, marks=marks(name)) for name in names]


def is_exception(moment: Moment) -> bool:
    """Whether the moment's operator has only a bound, no exact rule."""
    return moment.op.replace(".", "::", 1) in EXCEPTIONS


def inexact(moments: Iterable[Moment]) -> list[Moment]:
    """Moments predicted too small, or, but for exceptions, too large."""
    return [m for m in moments if m.excess_nbytes < 0 or (m.excess_nbytes > 0 and not is_exception(m))]


def describe(moments: Sequence[Moment]) -> str:
    return "\n".join(
        f"{m.call} {m.op} {m.module}: predicted {m.predicted_nbytes}, measured {m.measured_nbytes}"
        for m in moments[:20]
    )


def resized(batch: Batch, num_rows: int, length: int | None = None) -> Batch:
    """Return the batch with its rows repeated or left out, up to `num_rows`; of tokens also of another length."""
    found: Batch = {}
    for name, value in batch.items():
        if isinstance(value, Tensor):
            value = value[torch.arange(num_rows) % len(value)]
            if length is not None and value.dtype == torch.int64 and value.dim() == 2:
                value = value[:, torch.arange(length) % value.shape[1]]
        found[name] = value
    return found
