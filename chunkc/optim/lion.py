"""Update chunk by chunk by Lion."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from chunkc.ir.states import EXP_AVG
from chunkc.kernels.arithmetic import Arithmetic, Value, lerp, sign
from chunkc.kernels.formats import UpdateFormat
from chunkc.kernels.hyperparameters import Hyper, check_ranges
from chunkc.optim.elementwise import ElementwiseRule, formats_in, with_options
from chunkc.optim.optimizer import ChunkedOptimizer
from chunkc.optim.rule import MAXIMIZE, flag, number, pair

LionScalars = namedtuple("LionScalars", "grad_sign decay weight1 weight2 neg_lr")


def lion(grad: Value, target: Value, exp_avg: Value, s: Any) -> tuple[Value, ...]:
    """Compute the new parameter and moment."""
    grad = grad * s.grad_sign
    return target * s.decay + s.neg_lr * sign(lerp(exp_avg, grad, s.weight1)), lerp(exp_avg, grad, s.weight2)


class LionFormat(UpdateFormat):
    """Format of a Lion update."""

    arithmetic = Arithmetic(lion, LionScalars)


class LionRule(ElementwiseRule):
    """Lion's rule."""

    moments = (EXP_AVG,)
    format_class = LionFormat

    def hyper(self, group: Mapping[str, Any], step: int) -> Hyper:
        (beta1, beta2), lr, decay = pair(group, "betas"), number(group, "lr"), number(group, "weight_decay")
        check_ranges(step=step, beta1=beta1, beta2=beta2, lr=lr, weight_decay=decay)
        grad_sign = -1.0 if flag(group, MAXIMIZE) else 1.0
        return Hyper(step, LionScalars(grad_sign, 1 - lr * decay, 1 - beta1, 1 - beta2, -lr))


class Lion(ChunkedOptimizer):
    """Lion (Chen et al., arXiv:2302.06675): the sign of a mean of gradients, with AdamW's weight decay and options."""

    @with_options
    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        **options: Any,
    ) -> None:
        formats, rest = formats_in(options)
        super().__init__(params, LionRule(formats), {"lr": lr, "betas": betas, "weight_decay": weight_decay}, **rest)
