"""The updates in plain PyTorch: what every other kernel is tested against. Neither fast nor frugal."""

from __future__ import annotations

import torch
from torch import Tensor

from chunkc.kernels.hyper import AdamHyper, check_adam_run


@torch.no_grad()
def adam_update(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    master: Tensor | None,
    hyper: AdamHyper,
) -> None:
    """One Adam or AdamW update of `[n]` elements, in place, on any device.

    The operations are those of `torch.optim.adam._single_tensor_adam` (neither amsgrad nor capturable), in
    that order: fp32 parameters get the very bits of `torch.optim.Adam(foreach=False)`. With a master, the
    update is the master's, and `param` becomes its copy, rounded to nearest even. Gradients are widened to
    fp32 first. `grad` is left alone; it may share `param`'s memory.

    Args:
        param: `[n]`, fp32 (then `master` is None), bf16 or fp16.
        grad: `[n]`, fp32, bf16 or fp16.
        exp_avg, exp_avg_sq: `[n]`, fp32.
        master: `[n]`, fp32, or None.

    Raises:
        ValueError: see `check_adam_run`.
    """
    check_adam_run(param, grad, exp_avg, exp_avg_sq, master)
    target = param if master is None else master
    scalars = hyper.scalars()
    wide = grad.to(torch.float32, copy=True)
    if hyper.maximize:
        wide = -wide
    if hyper.weight_decay != 0:
        if hyper.decoupled:
            target.mul_(scalars.decay)
        else:
            wide = wide.add(target, alpha=hyper.weight_decay)
    exp_avg.lerp_(wide, scalars.lerp_weight)
    exp_avg_sq.mul_(hyper.beta2).addcmul_(wide, wide, value=scalars.one_minus_beta2)
    denom = (exp_avg_sq.sqrt() / scalars.bias_correction2_sqrt).add_(hyper.eps)
    target.addcdiv_(exp_avg, denom, value=scalars.neg_step_size)
    if master is not None:
        param.copy_(master)
