"""Models that offload or recompute saved values."""

from __future__ import annotations

import functools

from harness import TINY, compile_case, minimum_nbytes, refuse, session_of
from torch import nn
from zoo import LADDER

import chunkc


@functools.cache
def least_nbytes(name: str, activations: str, home: str = "cpu", codegen: str = "eager") -> int:
    """Return the smallest budget that `BudgetError` names for a model in one graph."""
    error = refuse(LADDER[name], memory_budget=TINY, home=home, codegen=codegen, activations=activations)
    return error.minimum_nbytes


def compiled_gpt(activations: str, budget_nbytes: int | None = None) -> tuple[nn.Module, nn.Module]:
    """Return the ladder's `short_gpt` and its compiled self, with room for two forwards."""
    nbytes = budget_nbytes or 2 * minimum_nbytes("short_gpt")
    return compile_case(LADDER["short_gpt"], memory_budget=nbytes, activations=activations, whole_graph="never")


def repeated(compiled: nn.Module) -> set[str]:
    """Return the calls that the latest backward has repeated."""
    return {label for label, *_ in chunkc.report(compiled).moments if "rerun" in label}


def ways_taken(model: nn.Module) -> set[str]:
    """Return the ways in which values were offloaded or recomputed."""
    gone_home = session_of(model).saved_room.nbytes > 0
    return {way for way, taken in (("offload", gone_home), ("rerun", repeated(model) != set())) if taken}
