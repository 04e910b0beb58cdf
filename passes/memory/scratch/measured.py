"""Look up scratch measured by `chunkc calibrate --operators` where no rule is exact; record calls to measure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from chunkc.machines.operators import OperatorCall, measured_nbytes, operator_call
from chunkc.passes.memory.scratch.copies import LOW_PRECISION
from chunkc.passes.memory.scratch.operators import find

_BY_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""Tags of operators with results, and scratch, of sizes that depend on values."""

_recorded: ContextVar[list[OperatorCall] | None] = ContextVar("recorded calls", default=None)


def _is_low(args: tuple) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.dtype in LOW_PRECISION for leaf in tree_leaves(args))


@contextmanager
def record_calls() -> Iterator[list[OperatorCall]]:
    """Record each call on the CPU that could be measured; `looked_up` returns None for these meanwhile."""
    calls: list[OperatorCall] = []
    token = _recorded.set(calls)
    try:
        yield calls
    finally:
        _recorded.reset(token)


def is_recording() -> bool:
    """Whether calls are recorded by `record_calls`."""
    return _recorded.get() is not None


def looked_up(
    target: torch._ops.OpOverload, args: tuple, kwargs: Mapping[str, Any], num_threads: int, *, has_rule: bool
) -> int | None:
    """Look up the measured bytes of a call; None if it was not measured, or its rule is exact.

    Operators with scratch that depends on values are never looked up: a measurement would not bound other values.
    """
    inexact = find(target).inexact
    if not _BY_VALUES.isdisjoint(target.tags):
        return None
    if has_rule and (inexact is None or not inexact.measurable):
        return None
    if has_rule and inexact is not None and inexact.only_low_precision and not _is_low(args):
        return None
    call = operator_call(target, args, kwargs, num_threads)
    if call is None:
        return None
    if (calls := _recorded.get()) is not None:
        calls.append(call)
        return None
    return measured_nbytes(call)
