"""Adam and AdamW, chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from chunkc.kernels.formats import AdamFormat, UpdateFormat
from chunkc.kernels.hyper import AdamHyper
from chunkc.optim.chunked_optimizer import ChunkedOptimizer
from chunkc.optim.elementwise import ElementwiseRule
from chunkc.optim.formats import formats_in, with_options
from chunkc.optim.rule import adam_hyper
from chunkc.optim.values import flag


@dataclass(frozen=True)
class AdamRule(ElementwiseRule):
    """Adam's.

    Attributes:
        decoupled: weight decay is AdamW's.
    """

    decoupled: bool = True

    def kernel(self, kinds: Iterable[str]) -> type[UpdateFormat]:
        return AdamFormat

    def hyper(self, group: Mapping[str, Any], step: int) -> AdamHyper:
        decoupled = self.decoupled or flag(group, "decoupled_weight_decay")  # as torch.optim.AdamW saves it
        return AdamHyper(**adam_hyper(group, step), decoupled=decoupled)

    def gradient_apart(self, gradient: torch.Tensor, hyper: AdamHyper) -> torch.Tensor:
        # Decay changes the parameter first; `maximize` has negated the gradient before that.
        return gradient if hyper.maximize else gradient.mul_(hyper.scalars().decay)


class Adam(ChunkedOptimizer):
    """Adam (Kingma and Ba, arXiv:1412.6980) with `torch.optim.Adam`'s semantics: weight decay joins the gradient.

    Its arguments are those of `AdamW`.
    """

    _decoupled = False

    @with_options
    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        capturable: bool = False,
        **options: Any,
    ) -> None:
        formats, rest = formats_in(options)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        rule = AdamRule(formats, self._decoupled)
        super().__init__(params, rule, defaults, amsgrad=amsgrad, capturable=capturable, **rest)


class AdamW(Adam):
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101) with `torch.optim.AdamW`'s semantics.

    Args:
        params: parameters, or groups of them with their own `lr`, `betas`, `eps`, `weight_decay`, `maximize`.
        update_on: where parameters at home are updated: `"device"`: in slots on the compute tier; `"cpu"`: at home, by
            the CPU, so that states never cross the link (only with `home="cpu"`); `"auto"`: on a CUDA device some here
            and some there, such that both are done the soonest, on the CPU in slots. The two kernels may differ in the
            last bit, so with `"auto"` results may depend on the budget.
        overlap: what updates by the CPU (`update_on="cpu"` or `"auto"`) run beside; the bits are the same.
            `"none"`: nothing; `step()` returns when all is updated.
            `"forward"`: the next forward. `step()` returns at once, and the compiled model waits for each chunk when it
            needs it. Until then, anything else that reads or writes parameters or gradients must call `synchronize()`
            first; the model's `state_dict` waits by itself, and the optimizer's own `state`, `state_dict`,
            `load_state_dict` and `zero_grad`.
            `"backward"`: a chunk's update begins when the backward has made its gradients; from the second step on.
            `step()` waits for the rest, so afterwards all is ordinary again, but between `backward()` and `step()`
            nothing may change gradients, parameters or hyper-parameters, or read parameters: no clipping, no
            GradScaler. Each `backward()` is followed by `step()`, but for those inside `with
            optimizer.accumulating():`. What is changed all the same raises, at the latest in `step()`.
            `"both"`: both, with the rules of both.

        moments_dtype: how `state[p]["exp_avg"]` and `["exp_avg_sq"]` are stored: `torch.float32`, `torch.bfloat16`, or
            `"int8"`: a code of one byte per element, with `["exp_avg_scale"]` for each 256 (Dettmers et al.,
            arXiv:2110.02861).
        master_weights: whether bf16 and fp16 parameters have fp32 masters. None: they do, unless `stochastic_rounding`
            makes up for it. Without one, fp16 is not possible, nor is rounding to nearest. `"float32"`: a copy,
            `state[p]["master"]`, 4 bytes per parameter. `"split"`: `state[p]["master_low"]` has the lower 16 bits of
            the master of a bf16 parameter, which has the others: 2 bytes, the same master (but for one place in the
            last bit where a tie is rounded, see `chunkc.kernels.split`), and fewer bytes to move. True: split where
            that is possible, for bf16 parameters rounded to nearest with moments that are not 8-bit; else fp32.
            Saved states have fp32 masters either way. Whoever writes to a parameter with a split master, writes the
            master. With an fp32 one the next update writes the parameter anew from the master.
        stochastic_rounding: round what is stored in bf16 (parameters, moments) up or down with the probability of the
            distance. The random bits depend on the seed, the step and the element's place alone: not on the budget, the
            home, `update_on` or what ran before. Fp32 is not rounded.
        rounding_seed: of those bits.
        foreach, fused: as in `torch.optim`, and without effect: an update is one fused pass whatever they say.
        amsgrad, capturable, differentiable: refused if true.

    Where a gradient is None, nothing happens to that parameter. With `torch.amp.GradScaler` gradients are unscaled
    inside the update.
    """

    _decoupled = True

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
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, capturable=capturable, **options)
