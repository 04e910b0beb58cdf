"""Define Adam's hyper-parameters and scalars, and the table of scalars of all rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

GRAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of parameters and gradients that are updated in fp32."""

COMPLEX_DTYPES = (torch.complex64, torch.complex128)
"""Dtypes that updates take as pairs of elements, real and imaginary parts."""


def wide_dtype(param_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which parameters of a dtype are updated."""
    return torch.float64 if param_dtype == torch.float64 else torch.float32


def takes_gradients(param_dtype: torch.dtype, grad_dtype: torch.dtype) -> bool:
    """Whether an update widens gradients of a dtype without loss: fp64 ones only where it computes in fp64."""
    return grad_dtype in GRAD_DTYPES or grad_dtype == wide_dtype(param_dtype)


class AdamScalars(NamedTuple):
    """Scalars of the inner loop (see `chunkc.kernels.arithmetic.Arithmetic.scalars`)."""

    grad_sign: float  # -1 to maximize, else 1
    decay: float  # AdamW: the factor of parameters; 1 otherwise
    l2: float  # Adam: the weight decay added to the gradient; 0 otherwise
    lerp_weight: float  # 1 - beta1
    beta2: float
    one_minus_beta2: float
    bias_correction2_sqrt: float
    eps: float
    neg_step_size: float  # -lr / (1 - beta1 ** step)
    amsgrad: float  # 1 to divide by the largest second moment so far; 0 to leave that as it is


@dataclass(frozen=True, slots=True)
class Hyper:
    """Hyper-parameters of one update: its number, from 1, and its scalars, a named tuple."""

    step: int
    values: Any

    def scalars(self) -> Any:
        return self.values


def check_ranges(*, step: int, **values: float) -> None:
    """Check hyper-parameters by name.

    Raises:
        ValueError: `step` is under 1, `beta...` outside [0, 1), or another value negative or NaN.
    """
    if step < 1:
        raise ValueError(f"step counts updates from 1, got {step}")
    for name, value in values.items():
        if name.startswith("beta") and not 0.0 <= value < 1.0:
            raise ValueError(f"{name} must be in [0, 1), got {value}")
        if not value >= 0.0:
            raise ValueError(f"{name} must not be negative, got {value}")


@dataclass(frozen=True, slots=True)
class AdamHyper:
    """Hyper-parameters of one Adam or AdamW update. Hashable, so kernels may cache what they derive.

    Args:
        step: the number of this update, from 1: `torch.optim`'s step after its increment.
        decoupled: AdamW's weight decay if true, else Adam's (added to the gradient).
        amsgrad: divide by the largest second moment so far (Reddi et al., arXiv:1904.09237).

    Raises:
        ValueError: a value is outside the range that `torch.optim.Adam` accepts, or `step` is under 1.
    """

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    step: int = 1
    decoupled: bool = True
    maximize: bool = False
    amsgrad: bool = False

    def __post_init__(self) -> None:
        names = ("step", "beta1", "beta2", "lr", "eps", "weight_decay")
        check_ranges(**{name: getattr(self, name) for name in names})

    def scalars(self) -> AdamScalars:
        """Derive the scalars, in double precision."""
        return AdamScalars(
            grad_sign=-1.0 if self.maximize else 1.0,
            decay=1 - self.lr * self.weight_decay if self.decoupled else 1.0,
            l2=0.0 if self.decoupled else self.weight_decay,
            lerp_weight=1 - self.beta1,
            beta2=self.beta2,
            one_minus_beta2=1 - self.beta2,
            bias_correction2_sqrt=(1 - self.beta2**self.step) ** 0.5,
            eps=self.eps,
            neg_step_size=-(self.lr / (1 - self.beta1**self.step)),
            amsgrad=float(self.amsgrad),
        )


def scalar_table(hypers: Sequence[Any]) -> Tensor:
    """Make the scalars of several groups as fp32 `[num_groups, num_scalars]` on the CPU; a span names its row."""
    return table_of_rows([hyper.scalars() for hyper in hypers], torch.float32)


def table_of_rows(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
    """Make a table of scalars, a row for each group, in numpy's memory: not charged to a limited CPU allocator.

    Args:
        dtype: fp32 or fp64.
    """
    table = np.array(rows, dtype=np.float64 if dtype == torch.float64 else np.float32)
    return torch.from_numpy(table.reshape(len(rows), -1 if rows else 0))
