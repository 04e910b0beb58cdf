"""Count the scratch bytes of operators that draw random numbers on the CPU.

Sources: ATen's `DistributionTemplates.h`, `Distributions.cpp`, `Dropout.cpp`, `Activation.cpp`; checked by measuring.
"""

from __future__ import annotations

import math

from chunkc.passes.memory.scratch.copies import contiguous_copy_nbytes, nbytes_of
from chunkc.passes.memory.scratch.rules import Call


def multinomial_rule(call: Call) -> int:
    """Count one row's cumulative sums, with replacement; without, an exponential variable for every outcome."""
    source, wanted = call["self"], call["num_samples"]
    if call["replacement"] and wanted > 1:
        return source.shape[-1] * max(4, source.itemsize)
    num_rows = math.prod(source.shape[:-1])
    best = num_rows * wanted * source.itemsize if wanted > 1 else 0
    checked = num_rows * (source.itemsize + 1) + source.itemsize + 17  # whether a row's sum is 0
    return max(nbytes_of(source) + best + 2 * source.itemsize + 2, checked)


def permutation_rule(call: Call) -> int:
    """Count a seed."""
    return 8


def normal_rule(call: Call) -> int:
    """Count a copy of a tensor of means, if the deviation is a number; else the check of the deviations' minimum.

    The minimum reads contiguous memory.
    """
    deviation = call.arguments["std"]
    if isinstance(deviation, float):
        return 0 if isinstance(call.arguments["mean"], float) else nbytes_of(call.outputs[0])
    check = 2 * deviation.itemsize + 9
    if deviation.is_contiguous():
        return check
    return max(check, contiguous_copy_nbytes(deviation) + deviation.itemsize)


def randomised_relu_rule(call: Call) -> int:
    """Count, in training, a contiguous copy of an operand that is not contiguous; else what a leaky ReLU takes."""
    return contiguous_copy_nbytes(call["self"]) if call["training"] else 48


def functional_randomised_relu_rule(call: Call) -> int:
    """Count, in training, a contiguous copy of a result that is not contiguous; else what a leaky ReLU takes."""
    result = call.outputs[0]
    if not call["training"]:
        return 48
    return 0 if result.is_contiguous() else nbytes_of(result) + contiguous_copy_nbytes(result)


def uniform_outputs(call: Call) -> dict[int, int]:
    """Correct the result's bytes: it is dense, though its fake tensor has the strides of the argument."""
    return {0: nbytes_of(call.outputs[0])}
