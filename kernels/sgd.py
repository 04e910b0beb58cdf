"""Define SGD with and without momentum: hyper-parameters, formats and arithmetic in plain PyTorch and in C++.

Each operation is one fp32 operation, rounded by itself, in the same order in both and in Triton
(`chunkc.kernels.sgd_triton_kernel`), so their bits are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from chunkc.ir.states import MOMENTUM_BUFFER
from chunkc.kernels.formats import Root, Slots, UpdateFormat


class SgdScalars(NamedTuple):
    """Scalars of the inner loop, each computed in double precision on the host."""

    grad_sign: float  # -1 to maximize, else 1
    l2: float  # the weight decay added to the gradient
    neg_lr: float
    keep: float  # factor of the buffer
    add: float  # factor of the gradient that is added to the buffer
    from_gradient: float  # factor of the gradient in the direction: 1 with Nesterov's momentum, else 0
    from_buffer: float  # factor of the new buffer in the direction; 0 without momentum, when the buffer is unchanged

    @classmethod
    def of(cls, row: Tensor) -> SgdScalars:
        """Read a row of `chunkc.kernels.hyperparameters.scalar_table`, each scalar as a 0-dim tensor."""
        scalars: Any = row.unbind()
        return cls(*scalars)


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
        if self.step < 1:
            raise ValueError(f"step counts updates from 1, got {self.step}")
        for name in ("lr", "momentum", "weight_decay"):
            if not getattr(self, name) >= 0.0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
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


@dataclass(frozen=True, slots=True, eq=False)
class SgdSlots(Slots):
    """Buffers of an SGD update."""

    param: Tensor
    grad: Tensor
    master: Tensor | None = None
    momentum_buffer: Tensor | None = None
    momentum_buffer_scale: Tensor | None = None


@dataclass(frozen=True, slots=True)
class SgdFormat(UpdateFormat):
    """Format of an SGD update without momentum."""

    scalars = SgdScalars
    slots = SgdSlots
    triton_kernel = "chunkc.kernels.sgd_triton_kernel:sgd_kernel"
    loop = ("", "    const float new_target = target + neg_lr * wide;")

    @property
    def kinds(self) -> tuple[str, ...]:
        return ()

    def new_values(
        self, wide: Tensor, target: Tensor, moments: Sequence[Tensor], scalars: Any, *, l2: bool, root: Root
    ) -> tuple[Tensor, Sequence[Tensor]]:
        return target + scalars.neg_lr * _gradient(wide, target, scalars, l2=l2), ()


@dataclass(frozen=True, slots=True)
class MomentumFormat(SgdFormat):
    """Format of an SGD update with momentum, in spans that have momentum and in others."""

    loop = (
        "",
        """    const float with_new = old_momentum_buffer * keep + wide * add;
    const float new_momentum_buffer = from_buffer != 0.0f ? with_new : old_momentum_buffer;
    const float mixed = wide * from_gradient + with_new * from_buffer;
    const float new_target = target + neg_lr * (from_buffer != 0.0f ? mixed : wide);""",
    )

    @property
    def kinds(self) -> tuple[str, ...]:
        return (MOMENTUM_BUFFER,)

    def new_values(
        self, wide: Tensor, target: Tensor, moments: Sequence[Tensor], scalars: Any, *, l2: bool, root: Root
    ) -> tuple[Tensor, Sequence[Tensor]]:
        wide = _gradient(wide, target, scalars, l2=l2)
        buffer = moments[0]
        with_new = buffer * scalars.keep + wide * scalars.add
        has_momentum = torch.as_tensor(scalars.from_buffer != 0, device=wide.device)
        mixed = wide * scalars.from_gradient + with_new * scalars.from_buffer
        direction = torch.where(has_momentum, mixed, wide)
        return target + scalars.neg_lr * direction, (torch.where(has_momentum, with_new, buffer),)


def _gradient(wide: Tensor, target: Tensor, scalars: Any, *, l2: bool) -> Tensor:
    wide = wide * scalars.grad_sign
    return wide + target * scalars.l2 if l2 else wide
