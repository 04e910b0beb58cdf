"""Define LAMB's hyper-parameters, and the arithmetic of its two stages.

LAMB (You et al., Large batch optimization for deep learning, arXiv:1904.00962, algorithm 2) scales each tensor's
update by a trust ratio, the norm of the parameter over that of the update. The first stage updates the moments, and
the squares of parameter and direction are added up, see `chunkc.kernels.summed_work`. The second one changes the
parameters, without their gradients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from chunkc.kernels.adam import new_moments
from chunkc.kernels.arithmetic import Arithmetic, Value, is_set, sqrt, where
from chunkc.kernels.formats import UpdateFormat
from chunkc.kernels.hyperparameters import check_ranges


class LambScalars(NamedTuple):
    """Scalars of the inner loop (see `chunkc.kernels.arithmetic.Arithmetic.scalars`), of one tensor."""

    grad_sign: float  # -1 to maximize, else 1
    weight_decay: float
    lerp_weight: float  # 1 - beta1
    beta2: float
    one_minus_beta2: float
    bias_correction1: float
    bias_correction2_sqrt: float
    eps: float
    neg_lr: float
    adapt: float  # 0 for a trust ratio of 1, else 1
    min_coeff: float  # limits of the trust ratio
    max_coeff: float
    target_squares: float  # total over the tensor, which the second stage reads
    direction_squares: float


@dataclass(frozen=True, slots=True)
class LambHyper:
    """Hyper-parameters of one LAMB update.

    Args:
        step: the number of this update, from 1.
        adapt: if false, the trust ratio is 1 (usual for biases and norms, which have no weight decay).
        min_coeff, max_coeff: limits of the trust ratio, in fp32. The paper's phi is the identity, which has none.

    Raises:
        ValueError: a value is out of range, or `step` is under 1.
    """

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-6
    weight_decay: float = 0.0
    step: int = 1
    adapt: bool = True
    maximize: bool = False
    min_coeff: float = 0.0
    max_coeff: float = math.inf

    def __post_init__(self) -> None:
        names = ("step", "beta1", "beta2", "lr", "eps", "weight_decay")
        check_ranges(**{name: getattr(self, name) for name in names})
        if not 0 <= self.min_coeff <= self.max_coeff:
            raise ValueError(f"min_coeff and max_coeff must be in order from 0, got {self.min_coeff}, {self.max_coeff}")

    def scalars(self) -> LambScalars:
        """Derive the scalars, in double precision."""
        return LambScalars(
            grad_sign=-1.0 if self.maximize else 1.0,
            weight_decay=self.weight_decay,
            lerp_weight=1 - self.beta1,
            beta2=self.beta2,
            one_minus_beta2=1 - self.beta2,
            bias_correction1=1 - self.beta1**self.step,
            bias_correction2_sqrt=(1 - self.beta2**self.step) ** 0.5,
            eps=self.eps,
            neg_lr=-self.lr,
            adapt=float(self.adapt),
            min_coeff=self.min_coeff,
            max_coeff=self.max_coeff,
            target_squares=0.0,
            direction_squares=0.0,
        )


def lamb_moments(grad: Value, target: Value, exp_avg: Value, exp_avg_sq: Value, s: Any) -> tuple[Value, ...]:
    """Compute the new moments, and the squares of parameter and direction, which are added up."""
    new_avg, new_avg_sq = new_moments(grad * s.grad_sign, exp_avg, exp_avg_sq, s)
    direction = _direction(target, new_avg, new_avg_sq, s)
    return target, new_avg, new_avg_sq, target * target, direction * direction


def lamb_apply(grad: Value, target: Value, exp_avg: Value, exp_avg_sq: Value, s: Any) -> tuple[Value, ...]:
    """Compute the new parameter from the new moments."""
    return target + s.neg_lr * _trust_ratio(s) * _direction(target, exp_avg, exp_avg_sq, s), exp_avg, exp_avg_sq


def _direction(target: Value, exp_avg: Value, exp_avg_sq: Value, s: Any) -> Value:
    """Compute the update before the trust ratio and the learning rate."""
    denom = sqrt(exp_avg_sq) / s.bias_correction2_sqrt + s.eps
    direction: Value = exp_avg / s.bias_correction1 / denom + s.weight_decay * target
    return direction


def _trust_ratio(s: Any) -> Value:
    """Compute norm(w) / norm(u) within its limits, or 1 where either norm is 0 or the tensor does not adapt.

    Without limits, this is the rule of apex' FusedLAMB with `use_nvlamb=True` and of torch_optimizer's Lamb, except
    that the latter limits norm(w) to 10 and by default leaves out the bias corrections, and apex limits the norm of all
    gradients (`GradScale.clip` here). DeepSpeed's FusedLamb has the limits.
    """
    ratio = sqrt(s.target_squares) / sqrt(s.direction_squares)
    ratio = where(ratio < s.min_coeff, s.min_coeff, ratio)
    ratio = where(ratio > s.max_coeff, s.max_coeff, ratio)
    for needed in (s.target_squares, s.direction_squares, s.adapt):
        ratio = where(is_set(needed), ratio, 1.0)
    return ratio


@dataclass(frozen=True, slots=True)
class LambApplyFormat(UpdateFormat):
    """Format of LAMB's second stage."""

    arithmetic = Arithmetic(lamb_apply, LambScalars)


@dataclass(frozen=True, slots=True)
class LambMomentsFormat(UpdateFormat):
    """Format of LAMB's first stage."""

    arithmetic = Arithmetic(lamb_moments, LambScalars)

    @property
    def second(self) -> LambApplyFormat:
        """Format of the second stage."""
        return LambApplyFormat(self.param_dtype, self.grad_dtype, master=self.master)
