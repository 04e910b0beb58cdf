"""Define LAMB's arithmetic, that of each stage (see `chunkc.kernels.lamb_formats`)."""

from __future__ import annotations

from typing import Any

from chunkc.kernels.adam import new_moments
from chunkc.kernels.arithmetic import Arithmetic, Value, sqrt
from chunkc.kernels.lamb_formats import LambScalars


def lamb_moments(grad: Value, target: Value, exp_avg: Value, exp_avg_sq: Value, s: Any) -> tuple[Value, ...]:
    """Compute the new moments, and the direction of the update."""
    new_avg, new_avg_sq = new_moments(grad * s.grad_sign, exp_avg, exp_avg_sq, s)
    return new_avg, new_avg_sq, _direction(target, new_avg, new_avg_sq, s)


def lamb_apply(target: Value, exp_avg: Value, exp_avg_sq: Value, trust_ratio: Value, s: Any) -> tuple[Value, ...]:
    """Compute the new parameter from the new moments."""
    return (target + s.neg_lr * trust_ratio * _direction(target, exp_avg, exp_avg_sq, s),)


def _direction(target: Value, exp_avg: Value, exp_avg_sq: Value, s: Any) -> Value:
    """Compute the update before the trust ratio and the learning rate."""
    denom = sqrt(exp_avg_sq) / s.bias_correction2_sqrt + s.eps
    direction: Value = exp_avg / s.bias_correction1 / denom + s.weight_decay * target
    return direction


LAMB_MOMENTS = Arithmetic(lamb_moments, LambScalars)
LAMB_APPLY = Arithmetic(lamb_apply, LambScalars)
