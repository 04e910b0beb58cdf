"""Predict the scratch of ATen's own convolutions on a CUDA device, without cuDNN (`torch.backends.cudnn.enabled`).

`ATen/native/Convolution.cpp` chooses among them (`select_conv_backend`):

    one group         images are unfolded into columns, one at a time: `ConvolutionMM2d.cu`
    transposed        columns are folded into images: `NaiveConvolutionTranspose2d.cu`
    depthwise         nothing: `DepthwiseConv2d.cu`

All copy operands that have gaps or another order. Convolutions of one dimension are those of images one pixel high.
Read off PyTorch 2.11 to 2.13, to the byte; depthwise backwards with filters in another order are bounded.
Others (several groups, dilated, of volumes) are not known here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from torch import Tensor

from chunkc.passes.graphs.cuda_memory import rounded_nbytes
from chunkc.passes.memory.scratch.cuda_reduction import outputs_at_once, reduces_fastest, reduction_nbytes


def own_shards(arguments: Mapping[str, Any], outputs: Sequence[Tensor]) -> list[int] | None:
    """List the allocations of a convolution or its backward, besides its results; None if they are not known.

    Args:
        arguments: of `aten::convolution` or `aten::convolution_backward`, by name.
    """
    image, weight, groups = arguments["input"], arguments["weight"], arguments["groups"]
    is_transposed, is_backward = arguments["transposed"], "grad_output" in arguments
    if weight.dim() > 4:
        return None
    if not is_transposed and groups > 1 and image.shape[1] == groups and weight.shape[0] % groups == 0:
        return _depthwise_backward(arguments) if is_backward else _copies(image, weight, arguments["bias"])
    if groups > 1 or not (is_transposed or all(step == 1 for step in arguments["dilation"])):
        return None
    if is_backward:
        return _backward(arguments)
    copies, bias = _copies(image, weight, arguments["bias"]), arguments["bias"]
    if is_transposed:
        ones = [] if bias is None else [prod(outputs[0].shape[2:]) * image.itemsize]
        return [*copies, _columns_nbytes(weight, image), *ones]
    return [*copies, *([_columns_nbytes(weight, outputs[0])] if _unfolds(arguments) else [])]


def _depthwise_backward(arguments: Mapping[str, Any]) -> list[int]:
    """Bound copies of operands, of the image only where it has no gradient, or the bias's gradient, which is last."""
    of_image, _, of_bias = arguments["output_mask"]
    grad = arguments["grad_output"]
    copies = _copies(grad, arguments["weight"], None if of_image else arguments["input"])
    summing = _summing_parts(grad, is_copied=False) if of_bias else []
    bias_nbytes = rounded_nbytes(grad.shape[1] * grad.itemsize) if of_bias else 0  # not there while there are copies
    return [max(0, _rounded(copies) - bias_nbytes, _rounded(summing))]


def _backward(arguments: Mapping[str, Any]) -> list[int]:
    """List the allocations at the fullest moment: the filters' gradient is made after the bias's scratch is freed."""
    grad, image, weight = arguments["grad_output"], arguments["input"], arguments["weight"]
    of_image, of_weight, of_bias = arguments["output_mask"]
    held = _copies(image, weight, grad)
    summing = _summing_parts(grad, is_copied=True) if of_bias else []
    if arguments["transposed"]:
        return [*held, *([_columns_nbytes(weight, image)] if _unfolds(arguments) else []), *summing]
    columns = [_columns_nbytes(weight, grad)] if of_image or of_weight else []
    later_nbytes = rounded_nbytes(_nbytes(weight)) if of_weight else 0
    if of_weight and not of_image:
        later_nbytes += _rounded(columns)
    return [*held, *columns, max(0, _rounded(summing) - later_nbytes)]


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


def _copies(*operands: Tensor | None) -> list[int]:
    return [_nbytes(operand) for operand in operands if operand is not None and not operand.is_contiguous()]


def _summing_parts(grad: Tensor, *, is_copied: bool) -> list[int]:
    """List the allocations of the bias's gradient, a sum over `grad`; `is_copied`: it is contiguous by then."""
    channels, positions = grad.shape[1], prod(grad.shape[2:])
    over_fastest = positions > 1 or channels == 1 if is_copied else reduces_fastest(grad, [0, *range(2, grad.dim())])
    vector = 4 if is_copied else outputs_at_once(grad, [0, *range(2, grad.dim())])
    num_inputs, itemsize = grad.shape[0] * positions, max(4, grad.itemsize)
    return reduction_nbytes(channels, num_inputs, over_fastest=bool(over_fastest), vector=vector, itemsize=itemsize)
