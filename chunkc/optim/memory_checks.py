"""Refuse parameters and gradients with a memory layout that no update can follow, before a step begins."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from chunkc.ir.errors import UnsupportedError
from chunkc.ir.states import is_scale
from chunkc.ir.strides import is_dense, overlaps_itself, share_memory, span_of
from chunkc.kernels.hyperparameters import takes_gradients
from chunkc.optim.stepping import SteppingOptimizer
from chunkc.runtime.store.consumed_gradients import gradient_of, without_memory

_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def check_memory(optimizer: SteppingOptimizer, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Refuse memory that kernels cannot read: they take one pointer and strides.

    Raises:
        UnsupportedError: the parameter or its gradient has no such memory.
    """
    if gradient.layout in _SPARSE:
        raise UnsupportedError(
            f"{type(optimizer).__name__} does not support sparse gradients, as that of "
            f"{optimizer.title_of(parameter)}; make the embedding with sparse=False"
        )
    readable = gradient_of(parameter)
    tensors = [("", parameter), *([] if readable is None else [("the gradient of ", readable)])]
    for prefix, tensor in tensors:
        if (reason := without_memory(tensor)) is not None:
            raise UnsupportedError(
                f"{prefix}{optimizer.title_of(parameter)} {reason}; {type(optimizer).__name__} updates dense tensors "
                "in the memory of a CPU or a GPU"
            )


def check_in_place(optimizer: SteppingOptimizer, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Refuse a parameter that cannot be updated in place.

    Raises:
        UnsupportedError: several elements of the parameter share one memory location, its states have another shape,
            or no kernel takes the gradient.
    """
    if overlaps_itself(parameter):
        raise UnsupportedError(
            f"{optimizer.title_of(parameter)} of shape {tuple(parameter.shape)} and strides {parameter.stride()} has "
            "several elements at one place in memory (as after expand): make it of a clone(), or train what was "
            "expanded"
        )
    for kind, state in optimizer.kept_states_of(parameter).items():
        if kind != "step" and not is_scale(kind) and state.shape != parameter.shape:
            raise UnsupportedError(
                f"{optimizer.title_of(parameter)} has the shape {tuple(parameter.shape)}, its states have "
                f"{tuple(state.shape)}: make a new optimizer"
            )
    dtypes = parameter.dtype, gradient.dtype
    if parameter.is_complex() and gradient.is_complex():
        dtypes = parameter.dtype.to_real(), gradient.dtype.to_real()
    if not takes_gradients(*dtypes):
        raise UnsupportedError(
            f"the gradient of {optimizer.title_of(parameter)} is {gradient.dtype}; {type(optimizer).__name__} takes "
            f"fp32, bf16 and fp16{', and the dtype of the parameter' if parameter.dtype.itemsize > 4 else ''}"
        )


def aliased_by_gradients(optimizer: SteppingOptimizer, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the parameters with a gradient that is their own memory, element by element or in another order.

    Args:
        parameters: all have a gradient.

    Raises:
        UnsupportedError: a gradient overlaps only a part of its parameter's memory, or another parameter.
    """
    parameters = [parameter for parameter in parameters if gradient_of(parameter) is not None]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not _overlap([span_of(parameter) for parameter in parameters], [span_of(gradient) for gradient in gradients]):
        return []
    aliased = []
    for parameter, gradient in zip(parameters, gradients, strict=True):
        sharing = [other for other in parameters if share_memory(gradient, other)]
        if not sharing:
            continue
        if any(other is not parameter for other in sharing) or not _same_memory(parameter, gradient):
            raise UnsupportedError(
                f"the gradient of {optimizer.title_of(parameter)} shares memory with "
                f"{optimizer.title_of(sharing[0])}, which this step changes: give it a clone() as its .grad"
            )
        aliased.append(parameter)
    return aliased


def _same_memory(parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Whether both occupy the same memory, possibly in another order."""
    if gradient.dtype != parameter.dtype or gradient.data_ptr() != parameter.data_ptr():
        return False
    return gradient.stride() == parameter.stride() or (is_dense(gradient) and is_dense(parameter))


def _overlap(spans: Sequence[tuple[int, int]], others: Sequence[tuple[int, int]]) -> bool:
    """Whether a span of addresses `[begin, end)` may overlap one of the others."""
    begins, ends = np.array([*spans, *others], dtype=np.int64).reshape(-1, 2).T
    order = np.argsort(begins, kind="stable")
    is_other = (np.arange(len(begins)) >= len(spans))[order]
    begins, ends = begins[order], ends[order]
    furthest = [np.maximum.accumulate(np.where(is_other == side, ends, 0)) for side in (False, True)]
    return bool((begins < np.where(is_other, *furthest)).any())
