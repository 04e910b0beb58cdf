"""Update chunk by chunk by Adam and AdamW."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from chunkc.ir.states import MAX_EXP_AVG_SQ, MOMENTS, StateFormat, scale_of
from chunkc.kernels.formats import AdamFormat, AmsgradFormat, UpdateFormat
from chunkc.kernels.hyperparameters import AdamHyper
from chunkc.optim.elementwise import ElementwiseRule, formats_in, with_options
from chunkc.optim.optimizer import ChunkedOptimizer
from chunkc.optim.rule import DIFFERENTIABLE, MAXIMIZE, WITHOUT_EFFECT, Groups, adam_hyper, flag

AMSGRAD = "amsgrad"
DECOUPLED = "decoupled_weight_decay"


@dataclass(frozen=True)
class AdamRule(ElementwiseRule):
    """The rule of Adam.

    If any parameter group has `amsgrad`, the chunks of all have room for the largest second moments; else none has.
    """

    moments = (*MOMENTS, MAX_EXP_AVG_SQ)
    optional = (MAXIMIZE, AMSGRAD, DECOUPLED, DIFFERENTIABLE, *WITHOUT_EFFECT)

    def states(self, groups: Groups) -> StateFormat:
        kinds = self.moments if any(flag(group, AMSGRAD) for group in groups) else MOMENTS
        return replace(self.formats.states, kinds=kinds)

    def idle(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return () if flag(group, AMSGRAD) else (MAX_EXP_AVG_SQ, scale_of(MAX_EXP_AVG_SQ))

    def kernel(self, kinds: Iterable[str]) -> type[UpdateFormat]:
        return AmsgradFormat if MAX_EXP_AVG_SQ in kinds else AdamFormat

    def hyper(self, group: Mapping[str, Any], step: int) -> AdamHyper:
        flags = {"decoupled": flag(group, DECOUPLED), "amsgrad": flag(group, AMSGRAD)}
        return AdamHyper(**adam_hyper(group, step), **flags)

    def gradient_apart(self, gradient: torch.Tensor, hyper: AdamHyper) -> torch.Tensor:
        # Decay changes the parameter first; `maximize` has negated the gradient before that.
        return gradient if hyper.maximize else gradient.mul_(hyper.scalars().decay)


class Adam(ChunkedOptimizer):
    """Adam (Kingma and Ba, arXiv:1412.6980) with `torch.optim.Adam`'s semantics: weight decay joins the gradient.

    Its arguments are those of `AdamW`, and `decoupled_weight_decay`: True makes it `AdamW`.
    """

    @with_options
    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        capturable: bool = False,
        decoupled_weight_decay: bool = False,
        **options: Any,
    ) -> None:
        formats, rest = formats_in(options)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, AMSGRAD: amsgrad}
        defaults |= {"capturable": capturable, DECOUPLED: decoupled_weight_decay}
        super().__init__(params, AdamRule(formats), defaults, **rest)


class AdamW(Adam):
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101) with `torch.optim.AdamW`'s semantics.

    Args:
        params: parameters, or groups of them with their own `lr`, `betas`, `eps`, `weight_decay`, `maximize`.
        update_on: where parameters at home are updated: `"device"`: in slots on the compute tier; `"cpu"`: at home, by
            the CPU, so that states never cross the link (only with `home="cpu"`); `"auto"`: on a CUDA device divided
            between both such that all is done the soonest, on the CPU in slots. The two kernels may differ in the
            last bit, so with `"auto"` results may depend on the budget.
        overlap: during which other work updates run, too; the bits are the same.
            `"auto"`: the backward, with `undoable=True`, for models where that loses nothing, on a GPU; else none.
            `"none"`: none; `step()` returns when everything is updated.
            `"forward"`: the next forward. `step()` returns at once, and the compiled model waits for each chunk when it
            needs it. Until then, any other code that reads or writes parameters or gradients must call `synchronize()`
            first; the model's `state_dict` waits by itself, and so do the optimizer's own `state`, `state_dict`,
            `load_state_dict` and `zero_grad`.
            `"backward"`: a chunk's update begins when the backward has made its gradients; from the second step on.
            `step()` waits for the rest, so afterwards everything is ordinary again, but between `backward()` and
            `step()` nothing may change gradients, parameters or hyperparameters, or read parameters: no clipping, no
            GradScaler. Each `backward()` is followed by `step()`, except those inside `with
            optimizer.accumulating():`. A change that is made all the same raises, at the latest in `step()`.
            `"both"`: both, with the rules of both.

        moments_dtype: how `state[p]["exp_avg"]` and `["exp_avg_sq"]` are stored: `torch.float32`, `torch.bfloat16`, or
            `"int8"`: a code of one byte per element, with `["exp_avg_scale"]` for each 256 (Dettmers et al.,
            arXiv:2110.02861).
        master_weights: whether bf16 and fp16 parameters have fp32 masters. None: they do, unless `stochastic_rounding`
            makes up for it. Without one, fp16 is not possible, nor is rounding to nearest. `"float32"`: a copy,
            `state[p]["master"]`, 4 bytes per parameter. `"split"`: `state[p]["master_low"]` has the lower 16 bits of
            the master of a bf16 parameter, which has the others: 2 bytes, the same master (except for one unit in the
            last place where a tie is rounded, see `chunkc.kernels.split`), and fewer bytes to move. True: split where
            that is possible, for bf16 parameters rounded to nearest with moments that are not 8-bit; else fp32.
            Saved states have fp32 masters either way. Code that writes to a parameter with a split master writes the
            master. With an fp32 master the next update writes the parameter anew from the master.
        stochastic_rounding: round what is stored in bf16 (parameters, moments) up or down with the probability of the
            distance. The random bits depend on the seed, the step and the element's index alone: not on the budget, the
            home, `update_on` or what ran before. Fp32 is not rounded.
        rounding_seed: the seed of those bits.
        amsgrad: divide by the largest second moment so far, `state[p]["max_exp_avg_sq"]`. If a group has it, chunks
            have room for those of all parameters.
        foreach, fused: as in `torch.optim`, and without effect: an update is one fused pass whatever they say.
        capturable: without effect: `step()` runs on the host, and no CUDA graph can capture it.
        differentiable: refused if true.

    A parameter without a gradient is left as it is. With `torch.amp.GradScaler` gradients are unscaled
    inside the update. Parameters in fp64 are updated in fp64; complex ones as `torch.view_as_real` shows them.
    """

    @with_options
    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        capturable: bool = False,
        **options: Any,
    ) -> None:
        of_adam = {"capturable": capturable, DECOUPLED: True}
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **of_adam, **options)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group[DECOUPLED] = True  # even if a state of Adam's says otherwise, as in torch.optim
