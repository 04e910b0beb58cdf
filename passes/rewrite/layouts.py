"""Give operands of one memory order to operators with results that differ from their fake tensors otherwise.

Code that runs node by node takes views of results as traced, by the fake tensors' strides. Where these are wrong, a
view fails, or, worse, `as_strided` reads other elements. So while a graph is traced for such code, these operators get
operands of one order, for which fake tensors are right: the copies are in the graph, and planned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_aten = torch.ops.aten

_Overload = torch._ops.OpOverload


def _lie_alike(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors of the first one's shape have its strides, along all dimensions of more than one element."""
    first, alike = tensors[0], [t for t in tensors if t.shape == tensors[0].shape]
    longer = [dim for dim in range(first.dim()) if first.shape[dim] != 1]
    return all(t.stride(dim) == first.stride(dim) for t in alike for dim in longer)


def _are_contiguous(tensors: Sequence[Tensor]) -> bool:
    return all(tensor.is_contiguous() for tensor in tensors)


def _are_of_a_format(tensors: Sequence[Tensor]) -> bool:
    """Whether images, the first of the tensors and those of its shape, are all contiguous or all channels last."""
    images = [tensor for tensor in tensors if tensor.shape == tensors[0].shape]
    return _are_contiguous(images) or all(
        image.dim() == 4 and image.is_contiguous(memory_format=torch.channels_last) for image in images
    )


_FINE_IF: tuple[tuple[Callable[[Sequence[Tensor]], bool], tuple[_Overload, ...]], ...] = (
    (
        _lie_alike,
        (
            _aten.softplus_backward.default,
            _aten.elu_backward.default,
            _aten.hardtanh_backward.default,
            _aten.hardswish_backward.default,
            _aten.hardsigmoid_backward.default,
            _aten.logit_backward.default,
            _aten.binary_cross_entropy_backward.default,
        ),
    ),
    (
        _are_contiguous,
        (
            _aten.glu_backward.default,
            _aten.native_dropout_backward.default,
            _aten.mse_loss_backward.default,
            _aten.smooth_l1_loss_backward.default,
            _aten.huber_loss_backward.default,
            _aten._log_softmax_backward_data.default,
            _aten.log_sigmoid_forward.default,
            _aten.roll.default,
        ),
    ),
    (
        _are_of_a_format,
        (
            _aten.native_batch_norm.default,
            _aten._native_batch_norm_legit.default,
            _aten._native_batch_norm_legit.no_stats,
            _aten._native_batch_norm_legit_functional.default,
            _aten._native_batch_norm_legit_no_training.default,
            _aten._batch_norm_with_update.default,
            _aten._batch_norm_with_update_functional.default,
            _aten.native_batch_norm_backward.default,
            _aten.batch_norm_backward.default,
        ),
    ),
)


def _with_operands_alike(operator: _Overload, fine: Callable[[Sequence[Tensor]], bool]) -> Callable[..., Any]:
    """Make a decomposition that runs an operator on contiguous copies, unless its operands are `fine` as they are."""

    def decomposed(*args: Any, **kwargs: Any) -> Any:
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if fine(tensors):
            return NotImplemented
        args, kwargs = pytree.tree_map_only(Tensor, torch.Tensor.contiguous, (args, kwargs))
        return operator(*args, **kwargs)

    return decomposed


OPERANDS_ALIKE: dict[_Overload, Callable[..., Any]] = {
    operator: _with_operands_alike(operator, fine) for fine, operators in _FINE_IF for operator in operators
}
"""Decompositions for AOTAutograd."""
