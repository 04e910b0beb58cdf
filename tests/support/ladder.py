"""Helpers of tests on the ladder of models: quick cases, batches of other sizes, wrong moments in words."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest
import torch
from memory_curves import Moment
from torch import Tensor
from zoo import Batch


def rungs(names: Iterable[str], quick: Collection[str], second_tier: Collection[str] = ()) -> list[Any]:
    """Parameters of a test: the default run climbs `quick`, CI `second_tier` as well; the rest is slow."""

    def marks(name: str) -> Any:
        return pytest.mark.second_tier if name in second_tier else pytest.mark.slow

    return [name if name in quick else pytest.param(name, marks=marks(name)) for name in names]


BOUNDED = (
    "aten.convolution", "aten.convolution_backward", "aten._scaled_dot_product_flash_attention_for_cpu_backward",
    "aten.histc",
)  # fmt: skip
"""Operators of the ladder that are only bounded. All others have to agree to the byte, whatever their records say."""

BOUNDED_IN_LOW_PRECISION = (
    "aten.mm", "aten.addmm", "aten.bmm", "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._native_batch_norm_legit_functional",
)  # fmt: skip
"""Operators that are bounded, too, where models compute in bfloat16."""


def is_bounded(moment: Moment, dtype: torch.dtype = torch.float32) -> bool:
    """Whether the moment's operator has only a bound in a model that computes in `dtype`."""
    return moment.op in BOUNDED or (dtype != torch.float32 and moment.op in BOUNDED_IN_LOW_PRECISION)


def inexact(moments: Iterable[Moment], dtype: torch.dtype = torch.float32) -> list[Moment]:
    """Moments predicted too small, or, but for bounded operators, too large."""
    return [m for m in moments if m.excess_nbytes < 0 or (m.excess_nbytes > 0 and not is_bounded(m, dtype))]


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
