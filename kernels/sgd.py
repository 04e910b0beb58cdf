"""Define SGD with and without momentum: hyper-parameters, arithmetic and formats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from chunkc.kernels.adam import with_l2
from chunkc.kernels.arithmetic import Arithmetic, Value, is_set, where
from chunkc.kernels.formats import UpdateFormat
from chunkc.kernels.hyperparameters import check_ranges


class SgdScalars(NamedTuple):
    """Scalars of the inner loop, each computed in double precision on the host."""

    grad_sign: float  # -1 to maximize, else 1
    l2: float  # the weight decay added to the gradient
    neg_lr: float
    keep: float  # factor of the buffer
    add: float  # factor of the gradient that is added to the buffer
    from_gradient: float  # factor of the gradient in the direction: 1 with Nesterov's momentum, else 0
    from_buffer: float  # factor of the new buffer in the direction; 0 without momentum, when the buffer is unchanged


@dataclass(frozen=True, slots=True)
class SgdHyper:
    """Hyper-parameters of one SGD update.

    Args:
        step: the number of this update, from 1. The first sets the buffer to the gradient, without `dampening`.

    Raises:
        ValueError: a value is outside the range that `torch.optim.SGD` accepts, or `step` is under 1.
    """

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    step: int = 1
    maximize: bool = False

    def __post_init__(self) -> None:
        check_ranges(step=self.step, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)
        if self.dampening != self.dampening:
            raise ValueError("dampening must be a number, got nan")
        if self.nesterov and (self.momentum <= 0 or self.dampening != 0):
            raise ValueError("nesterov needs a momentum above 0, and dampening 0")

    def scalars(self) -> SgdScalars:
        """Derive the scalars, in double precision."""
        is_first = self.step == 1
        return SgdScalars(
            grad_sign=-1.0 if self.maximize else 1.0,
            l2=self.weight_decay,
            neg_lr=-self.lr,
            keep=0.0 if is_first else self.momentum,
            add=1.0 if is_first else 1 - self.dampening,
            from_gradient=1.0 if self.nesterov else 0.0,
            from_buffer=self.momentum if self.nesterov else float(self.momentum != 0),
        )


def sgd(grad: Value, target: Value, s: Any) -> tuple[Value, ...]:
    """Compute the new parameter without momentum."""
    return (target + s.neg_lr * with_l2(grad * s.grad_sign, target, s),)


def momentum(grad: Value, target: Value, momentum_buffer: Value, s: Any) -> tuple[Value, ...]:
    """Compute the new parameter and buffer, in groups that have momentum and in others."""
    grad, has_momentum = with_l2(grad * s.grad_sign, target, s), is_set(s.from_buffer)
    with_new = momentum_buffer * s.keep + grad * s.add
    direction = where(has_momentum, grad * s.from_gradient + with_new * s.from_buffer, grad)
    return target + s.neg_lr * direction, where(has_momentum, with_new, momentum_buffer)


@dataclass(frozen=True, slots=True)
class SgdFormat(UpdateFormat):
    """Format of an SGD update without momentum."""

    arithmetic = Arithmetic(sgd, SgdScalars)


@dataclass(frozen=True, slots=True)
class MomentumFormat(UpdateFormat):
    """Format of an SGD update with momentum, in spans that have momentum and in others."""

    arithmetic = Arithmetic(momentum, SgdScalars)
