"""Adam's arithmetic: in plain PyTorch, which Inductor compiles too, and in C++.

Each operation is one fp32 operation, rounded by itself, in the same order in all of them and in Triton
(`chunkc.kernels.adam_triton_kernel`), so their bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

LOOP = (
    """
  const float coefficient = lerp_weight < 0.5f ? lerp_weight : lerp_weight - 1.0f;
  const uint32_t near = lerp_weight < 0.5f ? 0xFFFFFFFFu : 0u;  // bits, since of a flag gcc makes no vector
""",
    """
    const float base = as_float((as_bits(old_exp_avg) & near) | (as_bits(wide) & ~near));
    const float new_exp_avg = base + coefficient * (wide - old_exp_avg);
    const float new_exp_avg_sq = old_exp_avg_sq * beta2 + one_minus_beta2 * wide * wide;
    const float denom = std::sqrt(new_exp_avg_sq) / bias_correction2_sqrt + eps;
    const float new_target = target * decay + neg_step_size * new_exp_avg / denom;
""",
)
"""C++ before the loop over elements, and in it."""

AMSGRAD_LOOP = (
    LOOP[0],
    LOOP[1]
    .replace("std::sqrt(new_exp_avg_sq)", "std::sqrt(largest)")
    .replace(
        "    const float denom",
        """    const bool stays = old_max_exp_avg_sq >= new_exp_avg_sq || old_max_exp_avg_sq != old_max_exp_avg_sq;
    const float reached = stays ? old_max_exp_avg_sq : new_exp_avg_sq;
    const float largest = amsgrad != 0.0f ? reached : new_exp_avg_sq;
    const float new_max_exp_avg_sq = amsgrad != 0.0f ? reached : old_max_exp_avg_sq;
    const float denom""",
    ),
)
"""C++ as `LOOP`, with the largest second moment so far."""


def new_values(
    wide: Tensor,
    target: Tensor,
    moments: Sequence[Tensor],
    scalars: Any,
    *,
    l2: bool,
    root: Callable[[Tensor], Tensor],
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Compute Adam's new parameter and moments, see `chunkc.kernels.formats.UpdateFormat.new_values`."""
    wide = wide * scalars.grad_sign
    if l2:
        wide = wide + target * scalars.l2
    decayed = target * scalars.decay
    new_avg, new_avg_sq = new_moments(wide, moments[0], moments[1], scalars)
    denom = root(new_avg_sq) / scalars.bias_correction2_sqrt + scalars.eps
    return decayed + scalars.neg_step_size * new_avg / denom, (new_avg, new_avg_sq)


def new_values_amsgrad(
    wide: Tensor,
    target: Tensor,
    moments: Sequence[Tensor],
    scalars: Any,
    *,
    l2: bool,
    root: Callable[[Tensor], Tensor],
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Compute as `new_values`, with the largest second moment so far in spans that use it (AMSGrad), not in others."""
    exp_avg, exp_avg_sq, largest = moments
    reached: list[Tensor] = []
    uses_it = torch.as_tensor(scalars.amsgrad != 0, device=wide.device)

    def root_of_largest(new_avg_sq: Tensor) -> Tensor:
        reached.append(torch.maximum(largest, new_avg_sq))
        return root(torch.where(uses_it, reached[0], new_avg_sq))

    new_target, (new_avg, new_avg_sq) = new_values(
        wide, target, (exp_avg, exp_avg_sq), scalars, l2=l2, root=root_of_largest
    )
    return new_target, (new_avg, new_avg_sq, torch.where(uses_it, reached[0], largest))


def new_moments(wide: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, scalars: Any) -> tuple[Tensor, Tensor]:
    """Compute the new moments of Adam and of LAMB from an fp32 gradient (scaled, with its sign applied)."""
    # Tensor.lerp_: from the nearer end, so that a weight of 1 gives the gradient itself.
    near = torch.as_tensor(scalars.lerp_weight < 0.5, device=wide.device)
    base = torch.where(near, exp_avg, wide)
    coefficient = torch.where(near, scalars.lerp_weight, scalars.lerp_weight - 1)
    new_avg = base + coefficient * (wide - exp_avg)
    return new_avg, exp_avg_sq * scalars.beta2 + scalars.one_minus_beta2 * wide * wide


def exact_root(values: Tensor) -> Tensor:
    """Compute square roots to nearest; torch's on the CPU, MKL's, are not always. Roots of fp32 are taken in fp64."""
    if values.dtype == torch.float64 and values.is_cpu:
        return torch.from_numpy(np.sqrt(values.numpy()))
    return values.to(torch.float64).sqrt().to(values.dtype)
