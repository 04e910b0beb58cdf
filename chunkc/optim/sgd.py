"""Update chunk by chunk by SGD."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from chunkc.ir.states import FLOAT32, MOMENTUM_BUFFER, StateFormat, scale_of
from chunkc.kernels.formats import UpdateFormat
from chunkc.kernels.sgd import MomentumFormat, SgdFormat, SgdHyper
from chunkc.optim.elementwise import ElementwiseRule, formats_in, with_options
from chunkc.optim.optimizer import ChunkedOptimizer
from chunkc.optim.rule import Groups, flag, number


@dataclass(frozen=True)
class SgdRule(ElementwiseRule):
    """SGD's rule. All parameters of an optimizer have a buffer; none has if no group has momentum."""

    moments = (MOMENTUM_BUFFER,)

    def states(self, groups: Groups) -> StateFormat:
        states = self.formats.states
        if any(number(group, "momentum") != 0 for group in groups):
            return replace(states, kinds=(MOMENTUM_BUFFER,))
        return replace(states, kinds=(), moments=FLOAT32)

    def idle(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return () if number(group, "momentum") != 0 else (MOMENTUM_BUFFER, scale_of(MOMENTUM_BUFFER))

    def loaded(self, state: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
        """Read a saved state. `torch.optim.SGD` counts no steps, and its buffer is None until the first step."""
        kept = {kind: value for kind, value in state.items() if kind != MOMENTUM_BUFFER or value is not None}
        return {"step": float(MOMENTUM_BUFFER in kept)} | kept

    def kernel(self, kinds: Iterable[str]) -> type[UpdateFormat]:
        return MomentumFormat if MOMENTUM_BUFFER in kinds else SgdFormat

    def hyper(self, group: Mapping[str, Any], step: int) -> SgdHyper:
        numbers = {name: number(group, name) for name in ("lr", "momentum", "dampening", "weight_decay")}
        return SgdHyper(**numbers, nesterov=flag(group, "nesterov"), step=step, maximize=flag(group, "maximize"))


class SGD(ChunkedOptimizer):
    """SGD with `torch.optim.SGD`'s semantics.

    Args:
        params: parameters, or groups of them with their own values of all that follows, up to `maximize`.
        momentum, dampening, nesterov: of the buffer of past gradients, `state[p]["momentum_buffer"]`, which the first
            update sets to the gradient. If no group has momentum, there is none. If one has, chunks have room for
            the buffers of all.
        weight_decay: added to the gradient, times the parameter.
        moments_dtype: how the buffer is stored.
        update_on, overlap, master_weights, stochastic_rounding, rounding_seed, foreach, fused, differentiable: as for
            `AdamW`. `state[p]["step"]` counts the updates since the states began.
    """

    @with_options
    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | torch.Tensor = 0,
        nesterov: bool = False,
        **options: Any,
    ) -> None:
        formats, rest = formats_in(options)
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        super().__init__(params, SgdRule(formats), defaults | {"nesterov": nesterov}, **rest)
