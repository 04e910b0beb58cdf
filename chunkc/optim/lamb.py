"""LAMB, chunk by chunk."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from chunkc.ir.states import FLOAT32, StateFormat
from chunkc.kernels.lamb_formats import LambHyper
from chunkc.optim.hyperparameters import flag, number
from chunkc.optim.lamb_groups import LambUpdater
from chunkc.optim.optimizer import ChunkedOptimizer
from chunkc.optim.overlap_mode import NONE
from chunkc.optim.rule import Groups, Rule, adam_hyper
from chunkc.optim.update_on import DEVICE


@dataclass(frozen=True)
class LambRule(Rule):
    """LAMB's."""

    num_stages = 2
    optional = (*Rule.optional, "min_coeff", "max_coeff")

    def states(self, groups: Groups) -> StateFormat:
        return StateFormat(master=FLOAT32)

    def hyper(self, group: Mapping[str, Any], step: int) -> LambHyper:
        adapt = number(group, "weight_decay") != 0 or flag(group, "always_adapt")
        limits: dict[str, Any] = {name: number(group, name) for name in ("min_coeff", "max_coeff") if name in group}
        return LambHyper(**adam_hyper(group, step), **limits, adapt=adapt)

    def updater(self, device: torch.device, *, by_triton: bool) -> LambUpdater:
        return LambUpdater(device, by_triton=by_triton)


class LAMB(ChunkedOptimizer):
    """LAMB (You et al., arXiv:1904.00962): Adam's direction, scaled tensor by tensor by norm(parameter) / norm(update).

    Args:
        params: parameters, or groups of them with their own values of all that follows but the last two.
        weight_decay: decoupled: it joins the direction before its norm is taken.
        always_adapt: also scale where `weight_decay` is 0, as the paper does (NVIDIA's "nvlamb"). By default groups
            without weight decay (biases, norms) have a ratio of 1, as in apex and timm.
        min_coeff, max_coeff: limits of the ratio, as in DeepSpeed, whose defaults are 0.01 and 10. The paper has none.
        update_on, overlap: as for `AdamW`. Norms are summed up in fp32: on another device their last bits may differ.

    A parameter in bf16 or fp16 has an fp32 master. Gradients are not clipped: see `torch.nn.utils.clip_grad_norm_`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        always_adapt: bool = False,
        min_coeff: float = 0.0,
        max_coeff: float = math.inf,
        maximize: bool = False,
        update_on: str = DEVICE,
        overlap: str = NONE,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "always_adapt": always_adapt}
        defaults |= {"min_coeff": min_coeff, "max_coeff": max_coeff}
        super().__init__(params, LambRule(), defaults, maximize=maximize, update_on=update_on, overlap=overlap)
