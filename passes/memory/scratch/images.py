"""Count the scratch bytes of pooling, padding, upsampling, sampling and unfolding on the CPU: copies, weights.

Source: ATen's `UpSampleKernel.cpp` and the pooling and padding kernels; checked by measuring.
"""

from __future__ import annotations

import torch
from torch import Tensor

from chunkc.passes.memory.scratch.copies import channels_come_last, contiguous_copy_nbytes, nbytes_of
from chunkc.passes.memory.scratch.products import gemm_nbytes
from chunkc.passes.memory.scratch.rules import Call, contiguous

_TAPS = {"nearest": 1, "linear": 2, "bilinear": 2, "trilinear": 2, "bicubic": 4}
_VECTORISED_UP_TO = 128
"""Height and width of an upsampled image, together, up to which the kernel for channels last is used for any format."""


def _channels_last(image: Tensor) -> bool:
    return image.dim() == 4 and image.is_contiguous(memory_format=torch.channels_last)


def _dense(image: Tensor) -> bool:
    """Whether an image kernel reads it in place: contiguous, or with channels last."""
    return image.is_contiguous() or _channels_last(image)


def pooled(call: Call) -> int:
    """Count copies of inputs that are neither contiguous nor with channels last."""
    return sum(contiguous_copy_nbytes(t) for t in call.tensors if not _dense(t))


def image_backward(call: Call) -> int:
    """Count contiguous copies; and the result's bytes, if the input has channels last and the gradient has not.

    Of the input only the shape and the format are read.
    """
    source = call.arguments.get("self", call.arguments.get("input"))
    read = [t for t in call.tensors if t is not source]
    copies = sum(contiguous_copy_nbytes(t) for t in read)
    if source is None or source.is_contiguous() or not (source.dim() == 4 and channels_come_last(source)):
        return copies
    grad = call["grad_output"]
    return 0 if _channels_last(grad) and not grad.is_contiguous() else copies + nbytes_of(call.outputs[0])


def upsample(call: Call) -> int:
    """Count copies with channels last, or indices and weights for every row and column of the result."""
    image, result = call["self" if "self" in call.arguments else "input"], call.outputs[0]
    name = call.target._schema.name
    taps = next(number for kind, number in _TAPS.items() if f"_{kind}" in name)
    if result.dim() == 4 and taps <= 2:
        last = _channels_last(image)
        if (last and image.shape[1] > 3) or sum(result.shape[2:]) <= _VECTORISED_UP_TO:
            return sum(nbytes_of(t) for t in (image, result) if not _channels_last(t))
    return sum(result.shape[2:]) * taps * (8 + image.itemsize)


def upsample_backward(call: Call) -> int:
    """Count a contiguous copy of the gradient, and one of a result that is not contiguous.

    A kernel for channels last reads the gradient in place; cubic and antialiased upsampling have none.
    """
    grad, result, name = call["grad_output"], call.outputs[0], call.target._schema.name
    if grad.is_contiguous() or (_channels_last(grad) and not ("bicubic" in name or "_aa_" in name)):
        return 0
    return contiguous_copy_nbytes(grad) + (0 if result.is_contiguous() else nbytes_of(result))


def upsample_smooth(call: Call) -> int:
    """Count, for antialiased upsampling, the image resized in one direction, and weights."""
    image, result = call["self"], call.outputs[0]
    between = image.shape[0] * image.shape[1] * image.shape[2] * result.shape[3] * image.itemsize
    taps = 4 if "bicubic" in call.target._schema.name else 2
    shrinking = max(1.0, *(a / b for a, b in zip(image.shape[2:], result.shape[2:], strict=True)))
    return between + sum(result.shape[2:]) * (int(taps * shrinking + 2) * (image.itemsize + 4) + 24)


def affine_grid(call: Call) -> int:
    """Bound positions in homogeneous coordinates, and their product with each image's matrix."""
    grid, dtype, num_dims = call.outputs[0], call["theta"].dtype, call.outputs[0].shape[-1]
    positions = grid.numel() // max(1, num_dims * grid.shape[0])
    return 2 * nbytes_of(grid) + gemm_nbytes(dtype, positions, num_dims + 1, num_dims, call.num_threads)


def window_outputs(call: Call) -> dict[int, int]:
    """Correct a periodic window's bytes: it is a view of a window with one more element."""
    window = call.outputs[0]
    return {0: nbytes_of(window) + window.itemsize} if call.arguments.get("periodic", True) else {}


def pooling_offsets(call: Call) -> list[int]:
    """Count windows written out as int64 indices (`inductor_prims.py`); on the CPU, bound these and contiguous copies.

    These are indices, and per dimension remainders, positions and beginnings of windows.
    """
    windows = (3 * len(call["kernel_size"]) + 1) * [8 * call.outputs[-1].numel()]
    return windows if call.on_cuda else [*windows, *contiguous(call), 64]
