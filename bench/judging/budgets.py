"""Compile a model with chunkc for a budget, and find the smallest one by training."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

import torch
import torch._dynamo
from torch import nn

import chunkc

AMPLE_NBYTES = 1 << 33

MAX_MINIMA = 6
"""How often a model of several graphs may name a larger smallest budget."""

Compile = Callable[[nn.Module], nn.Module]

Result = TypeVar("Result")


class Differs(Exception):
    """Raised where a run ended with wrong numbers."""


def fresh() -> None:
    """Forget what was compiled."""
    torch._dynamo.reset()
    gc.collect()


def compiled_for(budget_nbytes: int, codegen: str) -> Compile:
    options = {"memory_budget": budget_nbytes, "codegen": codegen, "whole_graph": "never", "activations": "keep"}
    return lambda model: torch.compile(model, backend="chunkc", options=options)  # type: ignore[return-value]


def in_the_smallest(train: Callable[[int], Result], minimum_nbytes: int = 1) -> Result:
    """Train in the smallest budget that `chunkc.BudgetError` names.

    Raises:
        Differs: it was not enough.
    """
    for _ in range(MAX_MINIMA):
        try:
            return train(minimum_nbytes)
        except chunkc.BudgetError as error:
            if error.minimum_nbytes <= minimum_nbytes:
                text = f"{minimum_nbytes:,} bytes are too few, and were named as enough: {error}"
                raise Differs(text) from None
            minimum_nbytes = error.minimum_nbytes
    raise Differs(f"{MAX_MINIMA} times in a row the smallest budget was not enough")
