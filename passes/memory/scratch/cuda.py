"""Bound the bytes that an ATen operator allocates inside on a CUDA device, beyond its outputs, from metadata alone.

cuBLAS works in a workspace that torch keeps (`passes.graphs.cuda_memory`), so matrix products take only copies of
operands. Views take nothing, nor do elementwise operators: on CUDA devices `TensorIterator.cpp` casts while it loads.
The others have rules in `scratch.operators`, read off ATen's CUDA sources. As on the CPU, the bytes of an operator
without a rule (`is_known_on_cuda`) are a guess. A user's declaration (`scratch.declared.declare_scratch`) overrides a
rule or a guess.
"""

from __future__ import annotations

from typing import Any

import torch

from chunkc.passes.graphs.cuda_memory import rounded_nbytes
from chunkc.passes.memory.scratch.declared import declared_nbytes, guessed_nbytes, is_declared
from chunkc.passes.memory.scratch.operators import find
from chunkc.passes.memory.scratch.rules import Rule, bound_call, is_elementwise, is_view, nothing, resolved_nbytes


def cuda_scratch_nbytes(
    target: torch._ops.OpOverload,
    args: tuple,
    kwargs: dict[str, Any],
    outputs: object,
    num_threads: int = 1,
) -> int:
    """Bound the bytes that `target` holds inside while it runs on a CUDA device, beyond its outputs.

    Args:
        args, kwargs, outputs: what the operator takes and returns. Tensors may be fake: only metadata is read.
        num_threads: passed to declared functions.
    """
    declared = declared_nbytes(target, args, kwargs, outputs, num_threads)
    if declared is not None:
        return sum(map(rounded_nbytes, [declared, *resolved_nbytes(target, args, kwargs)]))
    rule = _rule(target)
    if rule is None:
        return sum(map(rounded_nbytes, guessed_nbytes(args, kwargs, outputs)))
    taken = rule(bound_call(target, args, kwargs, outputs, on_cuda=True))
    parts = taken if isinstance(taken, list) else [taken]
    return sum(map(rounded_nbytes, [*parts, *resolved_nbytes(target, args, kwargs)]))


def cuda_output_nbytes(
    target: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any], outputs: object
) -> dict[int, int]:
    """Return, by position, the storage bytes of returned tensors that differ on a CUDA device from the fake tensors'.

    Tensors on the CPU take 0.
    """
    corrected = find(target).cuda_outputs
    found = {} if corrected is None else corrected(bound_call(target, args, kwargs, outputs, on_cuda=True))
    return {position: rounded_nbytes(nbytes) for position, nbytes in found.items()}


def corrects_cuda_outputs(target: torch._ops.OpOverload) -> bool:
    """Whether `cuda_output_nbytes` may be other than empty for `target`."""
    return find(target).cuda_outputs is not None


def is_known_on_cuda(target: torch._ops.OpOverload) -> bool:
    """Whether a rule or a declaration covers `target`; else `cuda_scratch_nbytes` is a guess."""
    return is_declared(target) or _rule(target) is not None


def _rule(target: torch._ops.OpOverload) -> Rule | None:
    if (known := find(target).cuda) is not None:
        return known
    if is_view(target) or target.namespace == "prims" or is_elementwise(target):
        return nothing
    return None
