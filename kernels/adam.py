"""Define Adam's arithmetic, with and without the largest second moment so far."""

from __future__ import annotations

from typing import Any

from chunkc.kernels.arithmetic import Arithmetic, Value, is_set, lerp, maximum, sqrt, where
from chunkc.kernels.hyperparameters import AdamScalars


def adam(grad: Value, target: Value, exp_avg: Value, exp_avg_sq: Value, s: Any) -> tuple[Value, ...]:
    """Compute Adam's new parameter and moments."""
    grad = with_l2(grad * s.grad_sign, target, s)
    new_avg, new_avg_sq = new_moments(grad, exp_avg, exp_avg_sq, s)
    return _new_target(target, new_avg, new_avg_sq, s), new_avg, new_avg_sq


def amsgrad(
    grad: Value, target: Value, exp_avg: Value, exp_avg_sq: Value, max_exp_avg_sq: Value, s: Any
) -> tuple[Value, ...]:
    """Compute as `adam`, with the largest second moment so far in groups that use it (AMSGrad), not in others."""
    grad = with_l2(grad * s.grad_sign, target, s)
    new_avg, new_avg_sq = new_moments(grad, exp_avg, exp_avg_sq, s)
    reached, uses_it = maximum(max_exp_avg_sq, new_avg_sq), is_set(s.amsgrad)
    new_target = _new_target(target, new_avg, where(uses_it, reached, new_avg_sq), s)
    return new_target, new_avg, new_avg_sq, where(uses_it, reached, max_exp_avg_sq)


def with_l2(grad: Value, target: Value, s: Any) -> Value:
    """Add weight decay to the gradient, in groups that have any."""
    decayed: Value = where(is_set(s.l2), grad + target * s.l2, grad)
    return decayed


def new_moments(grad: Value, exp_avg: Value, exp_avg_sq: Value, s: Any) -> tuple[Value, Value]:
    """Compute the new moments of Adam and of LAMB from a gradient with its sign applied."""
    return lerp(exp_avg, grad, s.lerp_weight), exp_avg_sq * s.beta2 + s.one_minus_beta2 * grad * grad


def _new_target(target: Value, new_avg: Value, second_moment: Value, s: Any) -> Value:
    denom = sqrt(second_moment) / s.bias_correction2_sqrt + s.eps
    step: Value = s.neg_step_size * new_avg / denom
    return target * s.decay + step


ADAM = Arithmetic(adam, AdamScalars)
AMSGRAD = Arithmetic(amsgrad, AdamScalars)
