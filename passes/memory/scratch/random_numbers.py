"""Bound the scratch bytes of operators that draw random numbers on the CPU."""

from __future__ import annotations

import math

from torch import Tensor

from chunkc.passes.memory.scratch.copies import contiguous_copy_nbytes, nbytes_of
from chunkc.passes.memory.scratch.rules import Call


def multinomial(call: Call) -> int:
    """Bound one row's cumulative sums, with replacement; without, an exponential variable for every outcome.

    Before it, rows are checked: that none sums to 0.
    """
    source, wanted = call["self"], call["num_samples"]
    if call["replacement"] and wanted > 1:
        return source.shape[-1] * max(4, source.itemsize)
    num_rows = math.prod(source.shape[:-1])
    return nbytes_of(source) + num_rows * (wanted + 1) * source.itemsize + num_rows + 64


def permutation(call: Call) -> int:
    """Count a seed."""
    return 8


def normal(call: Call) -> int:
    """Bound means in the result's shape, and the check of the deviations, which reads contiguous memory."""
    mean, deviation = call["mean"], call["std"]
    if not isinstance(deviation, Tensor):
        return nbytes_of(call.outputs[0]) if isinstance(mean, Tensor) else 0
    return contiguous_copy_nbytes(deviation) + 2 * deviation.itemsize + 9


def randomised_relu(call: Call) -> int:
    """Bound contiguous copies of operand and noise, or of the result, and what a leaky ReLU takes."""
    return 2 * contiguous_copy_nbytes(call["self"], call["noise"]) + 48
