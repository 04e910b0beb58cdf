"""Predict the scratch of ATen's own convolutions on a CUDA device, without cuDNN (`torch.backends.cudnn.enabled`).

`ATen/native/Convolution.cpp` chooses among them (`select_conv_backend`):

    one group         images are unfolded into columns, one at a time: `ConvolutionMM2d.cu`
    transposed        columns are folded into images: `NaiveConvolutionTranspose2d.cu`
    depthwise         nothing: `DepthwiseConv2d.cu`

All copy operands that have gaps or another order. Convolutions of one dimension are those of images one pixel high.
Read off PyTorch 2.11 to 2.13, to the byte; others (several groups, dilated, of volumes) are not known here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from torch import Tensor

from chunkc.passes.graphs.cuda_memory import rounded_nbytes
from chunkc.passes.memory.scratch.cuda_reduction import reduces_fastest, reduction_nbytes


def own_shards(arguments: Mapping[str, Any], outputs: Sequence[Tensor]) -> list[int] | None:
    """List the allocations of a convolution or its backward, besides its results; None if they are not known.

    Args:
        arguments: of `aten::convolution` or `aten::convolution_backward`, by name.
    """
    if arguments["weight"].dim() > 4:
        return None
    return _backward_parts(arguments) if "grad_output" in arguments else _forward_parts(arguments, outputs[0])


def _forward_parts(arguments: Mapping[str, Any], result: Tensor) -> list[int] | None:
    image, weight, bias = arguments["input"], arguments["weight"], arguments["bias"]
    copies = _copies(image, weight, *([] if bias is None else [bias]))
    if _is_depthwise(arguments):
        return copies
    if not _is_known(arguments):
        return None
    if arguments["transposed"]:
        ones = [] if bias is None else [prod(result.shape[2:]) * image.itemsize]
        return [*copies, _columns_nbytes(weight, image), *ones]
    return [*copies, *([_columns_nbytes(weight, result)] if _unfolds(arguments) else [])]


def _backward_parts(arguments: Mapping[str, Any]) -> list[int] | None:
    """List the allocations of a backward, at its fullest moment.

    Depthwise, gradients are made in the order filters, image, bias. Otherwise the filters' comes last, after the bias's
    scratch is free again.
    """
    grad, image, weight = arguments["grad_output"], arguments["input"], arguments["weight"]
    of_image, of_weight, of_bias = arguments["output_mask"]
    if _is_depthwise(arguments):
        copy, *later = (_rounded(_copies(operand)) for operand in (grad, image, weight))
        with_filters = later[0] - (rounded_nbytes(_nbytes(image)) if of_image else 0) if of_weight else 0
        with_image = later[1] if of_image else 0
        bias_nbytes = rounded_nbytes(grad.shape[1] * grad.itemsize) if of_bias else 0
        inside = copy + max(with_filters, with_image) - bias_nbytes
        at_last = _rounded(_summing_parts(grad, is_copied=False)) if of_bias else 0
        return [max(0, inside, at_last)]
    if not _is_known(arguments):
        return None
    held = _copies(image, weight, grad)
    summing = _summing_parts(grad, is_copied=True) if of_bias else []
    if arguments["transposed"]:
        return [*held, *([_columns_nbytes(weight, image)] if _unfolds(arguments) else []), *summing]
    columns = [_columns_nbytes(weight, grad)] if of_image or of_weight else []
    later_nbytes = rounded_nbytes(_nbytes(weight)) if of_weight else 0
    if of_weight and not of_image:
        later_nbytes += _rounded(columns)
    return [*held, *columns, max(0, _rounded(summing) - later_nbytes)]


def _is_depthwise(arguments: Mapping[str, Any]) -> bool:
    image, weight, groups = arguments["input"], arguments["weight"], arguments["groups"]
    if arguments["transposed"] or groups == 1:
        return False
    return bool(image.shape[1] == groups and weight.shape[0] % groups == 0)


def _is_known(arguments: Mapping[str, Any]) -> bool:
    dilated = any(step != 1 for step in arguments["dilation"])
    return arguments["groups"] == 1 and (arguments["transposed"] or not dilated)


def _unfolds(arguments: Mapping[str, Any]) -> bool:
    """Whether columns differ from images."""
    steps = (*arguments["weight"].shape[2:], *arguments["stride"], *arguments["dilation"])
    return any(step != 1 for step in steps) or any(edge != 0 for edge in arguments["padding"])


def _columns_nbytes(weight: Tensor, positions_of: Tensor) -> int:
    """Count the bytes of one image's columns: for each position, the elements that one result is computed from."""
    return prod(weight.shape[1:]) * prod(positions_of.shape[2:]) * weight.itemsize


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize


def _rounded(parts: Sequence[int]) -> int:
    return sum(map(rounded_nbytes, parts))


def _copies(*operands: Tensor) -> list[int]:
    return [_nbytes(operand) for operand in operands if not operand.is_contiguous()]


def _summing_parts(grad: Tensor, *, is_copied: bool) -> list[int]:
    """List the allocations of the bias's gradient, a sum over `grad`; `is_copied`: it is contiguous by then."""
    channels, positions = grad.shape[1], prod(grad.shape[2:])
    over_fastest = positions > 1 or channels == 1 if is_copied else reduces_fastest(grad, [0, *range(2, grad.dim())])
    return reduction_nbytes(
        channels, grad.shape[0] * positions, over_fastest=bool(over_fastest), itemsize=max(4, grad.itemsize)
    )
