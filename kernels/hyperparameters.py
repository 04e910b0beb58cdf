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
    """Scalars of the inner loop, each computed in double precision on the host, as `torch.optim` does.

    Kernels that compute in fp32 round them to it once, where `torch.optim` rounds them at every operation: the same
    value.
    """

    grad_sign: float  # -1 to maximize, else 1
    decay: float  # AdamW: the factor of parameters; 1 otherwise
    l2: float  # Adam: the weight decay added to the gradient; 0 otherwise
    lerp_weight: float  # 1 - beta1
    beta2: float
    one_minus_beta2: float
    bias_correction2_sqrt: float
    eps: float
    neg_step_size: float  # -lr / (1 - beta1 ** step)

    @classmethod
    def of(cls, row: Tensor) -> AdamScalars:
        """Read a row of `scalar_table`, each scalar as a 0-dim tensor."""
        scalars: Any = row.unbind()
        return cls(*scalars)


class AmsgradScalars(NamedTuple):
    """`AdamScalars`, and `amsgrad`: 1 to divide by the largest second moment so far; 0 to leave that as it is.

    A class of its own, since rows in Triton's kernels have as many scalars as these kernels read.
    """

    grad_sign: float
    decay: float
    l2: float
    lerp_weight: float
    beta2: float
    one_minus_beta2: float
    bias_correction2_sqrt: float
    eps: float
    neg_step_size: float
    amsgrad: float

    @classmethod
    def of(cls, row: Tensor) -> AmsgradScalars:
        """Read a row of a table, each scalar as a 0-dim tensor."""
        scalars: Any = row.unbind()
        return cls(*scalars)


def check_ranges(hyper: Any) -> None:
    """Check the hyper-parameters that Adam and LAMB have in common, by name.

    Raises:
        ValueError: one is out of range.
    """
    if hyper.step < 1:
        raise ValueError(f"step counts updates from 1, got {hyper.step}")
    for name in ("beta1", "beta2"):
        if not 0.0 <= getattr(hyper, name) < 1.0:
            raise ValueError(f"{name} must be in [0, 1), got {getattr(hyper, name)}")
    for name in ("lr", "eps", "weight_decay"):
        if not getattr(hyper, name) >= 0.0:
            raise ValueError(f"{name} must not be negative, got {getattr(hyper, name)}")


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
        check_ranges(self)

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
        )

    def amsgrad_scalars(self) -> AmsgradScalars:
        """Derive the scalars for formats with `max_exp_avg_sq`."""
        return AmsgradScalars(*self.scalars(), amsgrad=float(self.amsgrad))


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
