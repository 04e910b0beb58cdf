"""Predict an operator's scratch on the CPU: the bytes that it allocates inside, beyond its outputs.

Operators take temporary memory from torch's allocator while they run: a cast of an operand, a contiguous copy, an
attention kernel's per-thread buffers, a matrix product's packed operands. It is freed when they return, so no graph
shows it, but it counts towards a memory limit. `scratch_nbytes` predicts it from sizes, strides and dtypes alone.

The first of these that applies is taken:

1. the user's declaration (`scratch.declared.declare_scratch`);
2. what `chunkc calibrate --operators` measured on this machine, if the rule is an upper bound, or there is no rule
   (`scratch.measured`);
3. the rule in `scratch.operators`, read off ATen's CPU kernels and checked by measuring: exact to the byte, unless its
   record calls it an upper bound and says why;
4. nothing for views; for elementwise operators (torch tags them), casts to the common dtype and 0-dim tensors made of
   Python numbers;
5. a guess: the bytes of all operands and results.
"""

from __future__ import annotations

from functools import cache

import torch

from chunkc.passes.memory.scratch.declared import declared_nbytes, guessed_nbytes, is_declared
from chunkc.passes.memory.scratch.measured import looked_up
from chunkc.passes.memory.scratch.operators import find
from chunkc.passes.memory.scratch.rules import (
    Rule,
    bound_call,
    is_elementwise,
    is_view,
    nothing,
    pointwise,
    resolved_nbytes,
)


def scratch_nbytes(target: torch._ops.OpOverload, args: tuple, kwargs: dict, outputs: object, num_threads: int) -> int:
    """Predict the bytes that `target` holds inside while it runs on the CPU, beyond its outputs.

    Args:
        args, kwargs, outputs: what the operator takes and returns. Tensors may be fake: only sizes, strides and dtypes
            are read.
        num_threads: `torch.get_num_threads()` in the process that will run it.
    """
    declared = declared_nbytes(target, args, kwargs, outputs, num_threads)
    if declared is not None:
        return declared + sum(resolved_nbytes(target, args, kwargs))
    rule = _rule(target)
    measured = looked_up(target, args, kwargs, num_threads, has_rule=rule is not None)
    if measured is not None:
        return measured
    if rule is None:
        return sum(guessed_nbytes(args, kwargs, outputs))
    nbytes = rule(bound_call(target, args, kwargs, outputs, num_threads=num_threads))
    return (sum(nbytes) if isinstance(nbytes, list) else nbytes) + sum(resolved_nbytes(target, args, kwargs))


def is_known(target: torch._ops.OpOverload) -> bool:
    """Whether a rule or a declaration covers `target`; else `scratch_nbytes` is a guess."""
    return is_declared(target) or _rule(target) is not None


def is_measured(target: torch._ops.OpOverload, args: tuple, kwargs: dict, num_threads: int) -> bool:
    """Whether this call was measured, of a `target` with neither rule nor declaration."""
    return not is_known(target) and looked_up(target, args, kwargs, num_threads, has_rule=False) is not None


def output_nbytes(target: torch._ops.OpOverload, args: tuple, kwargs: dict, outputs: object) -> dict[int, int]:
    """Map positions of returned tensors to bytes of their storages, where these differ from the fake tensors'."""
    corrected = find(target).outputs
    return {} if corrected is None else corrected(bound_call(target, args, kwargs, outputs))


def corrects_outputs(target: torch._ops.OpOverload) -> bool:
    """Whether `output_nbytes` may be other than empty for `target`."""
    return find(target).outputs is not None


def takes_nothing(target: torch._ops.OpOverload) -> bool:
    """Whether `target` takes no scratch, for any arguments."""
    return not is_declared(target) and _rule(target) is nothing


@cache
def _rule(target: torch._ops.OpOverload) -> Rule | None:
    if (known := find(target).cpu) is not None:
        return known
    if is_view(target):
        return nothing
    return pointwise if is_elementwise(target) else None
