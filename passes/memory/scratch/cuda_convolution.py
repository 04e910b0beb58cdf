"""Predict the scratch of ATen's own convolutions on a CUDA device, without cuDNN (`torch.backends.cudnn.enabled`).

`ATen/native/Convolution.cpp` chooses among them (`select_conv_backend`):

    one group         images are unfolded into columns, one at a time: `ConvolutionMM2d.cu`
    transposed        columns are folded into images: `NaiveConvolutionTranspose2d.cu`
    depthwise         nothing: `DepthwiseConv2d.cu`

All copy operands that have gaps or another order. Convolutions of one dimension are those of images one pixel high.
Read off PyTorch 2.11 to 2.13, to the byte. Others (several groups, dilated, of volumes) are not known here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from chunkc.passes.graphs.cuda_memory import rounded_nbytes
from chunkc.passes.memory.scratch.copies import nbytes_of
from chunkc.passes.memory.scratch.cuda_reduction import outputs_at_once, reduces_fastest, reduction_nbytes


def own_shards(arguments: Mapping[str, Any], outputs: Sequence[Tensor]) -> list[int] | None:
    """List the allocations of a convolution or its backward, besides its results; None if they are not known.

    Of a backward at the fullest moment: the bias's gradient is summed before the filters' is made, or of a depthwise
    one, last. Those with filters in another order, and those of the bias alone, are bounded.

    Args:
        arguments: of `aten::convolution` or `aten::convolution_backward`, by name.
    """
    image, weight, groups = arguments["input"], arguments["weight"], arguments["groups"]
    grad, is_transposed = arguments.get("grad_output"), arguments["transposed"]
    is_depthwise = not is_transposed and groups > 1 and image.shape[1] == groups and weight.shape[0] % groups == 0
    is_dilated = any(step != 1 for step in arguments["dilation"])
    if weight.dim() > 4 or not (is_depthwise or (groups == 1 and (is_transposed or not is_dilated))):
        return None
    of_image, of_weight, of_bias = arguments.get("output_mask", (False, False, False))
    result, bias = (outputs[0], arguments["bias"]) if grad is None else (grad, None)
    operands = [None if is_depthwise and of_image else image, weight, bias, grad]
    copies = [nbytes_of(operand) for operand in operands if operand is not None and not operand.is_contiguous()]
    steps = (*weight.shape[2:], *arguments["stride"], *arguments["dilation"], *(1 + n for n in arguments["padding"]))
    positions = prod((image if is_transposed else result).shape[2:])
    columns = [prod(weight.shape[1:]) * positions * weight.itemsize]
    if is_depthwise or (all(step == 1 for step in steps) and (grad is None) != is_transposed):
        columns = []
    if grad is None:
        return [
            *copies,
            *columns,
            *([prod(result.shape[2:]) * image.itemsize] if is_transposed and bias is not None else []),
        ]
    summing = _summing_nbytes(grad, is_copied=not is_depthwise) if of_bias else 0
    if is_depthwise:
        return [max(summing, _rounded(copies) - (_rounded([grad.shape[1] * grad.itemsize]) if of_bias else 0))]
    later = [] if is_transposed or not of_weight else [nbytes_of(weight), *([] if of_image else columns)]
    return [*copies, *columns, max(0, summing - _rounded(later))]


def _rounded(parts: Sequence[int]) -> int:
    return sum(map(rounded_nbytes, parts))


def _summing_nbytes(grad: Tensor, *, is_copied: bool) -> int:
    """Count what the bias's gradient takes, a sum over `grad`; `is_copied`: it is contiguous by then."""
    layout = torch.contiguous_format if is_copied else torch.preserve_format
    summed, dims = torch.empty_like(grad, device="meta", memory_format=layout), [0, *range(2, grad.dim())]
    over_fastest, vector = reduces_fastest(summed, dims), outputs_at_once(summed, dims)
    num_inputs, itemsize = grad.shape[0] * prod(grad.shape[2:]), max(4, grad.itemsize)
    return _rounded(
        reduction_nbytes(grad.shape[1], num_inputs, over_fastest=over_fastest, vector=vector, itemsize=itemsize)
    )
