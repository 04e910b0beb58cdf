"""Bound the scratch of ATen's operators on a CUDA device from shapes, by rules for `passes.memory.scratch.cuda`.

Each rule was read off ATen's CUDA sources of PyTorch 2.11 to 2.13. It names its source file, below
`aten/src/ATen/native/cuda/` unless a folder is named. A rule gives the sizes of allocations; they are rounded where
they are added up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from chunkc.passes.graphs.cuda_memory import rounded_nbytes
from chunkc.passes.memory.scratch.bounds import broadcast_nbytes
from chunkc.passes.memory.scratch.copies import LOW_PRECISION, nbytes_of
from chunkc.passes.memory.scratch.cuda_convolution import own_shards
from chunkc.passes.memory.scratch.cuda_reduction import outputs_at_once, reduces_fastest, reduction_nbytes
from chunkc.passes.memory.scratch.iterator import common_dtype
from chunkc.passes.memory.scratch.rules import Call, bound_call, cast_nbytes, contiguous

CONVOLUTION_NBYTES = 1 << 30
"""The most that is set aside for one convolution's workspace (see `convolution`)."""

_CAST_SUMS = ("sum", "nansum", "mean", "norm", "linalg_vector_norm")
_SUMS = (*_CAST_SUMS, "logsumexp", "mse_loss", "smooth_l1_loss", "huber_loss", "count_nonzero")
_EXTREMES = ("amax", "amin", "all", "any")
_SUMS_OF_RESULTS = ("logsumexp", "count_nonzero")  # of exponentials, of masks
_CAST_FIRST = (*_CAST_SUMS, "prod")
_MADE_CONTIGUOUS = ("max", "min", "argmax", "argmin", "aminmax")

_MIB = 1 << 20


def reduction(call: Call) -> list[int]:
    """List a reduction's allocations: those of `cuda_reduction` (`Reduce.cuh`), and copies before it.

    Copied are, for an extreme of all elements, operands that are not contiguous (`ATen/native/TensorCompare.cpp`,
    `ReduceOps.cpp`), and operands that are summed in another dtype (`ReduceOpsUtils.h`), but for halves that are summed
    in fp32. Variances of complex numbers have results of their parts in addition (`ReduceOps.cpp`, `std_var_out`).
    """
    source = max(call.tensors, key=Tensor.numel)
    num_outputs = max(1, max((tensor.numel() for tensor in call.outputs), default=1))
    given = call.arguments.get("dim")
    dims = [] if given is None else [given] if isinstance(given, int) else list(given)
    copies = contiguous(call) if given is None and call.name in _MADE_CONTIGUOUS else []
    if call.name in ("any", "all") and source.numel() == 1:
        return [cast_nbytes(source, torch.bool)]  # one element is copied
    if call.name in _CAST_FIRST and not (source.dtype in LOW_PRECISION and call.outputs[0].dtype == torch.float32):
        dtype = call.outputs[0].dtype.to_complex() if source.is_complex() else call.outputs[0].dtype
        copies += [] if dtype == source.dtype else [cast_nbytes(source, dtype)]
    # What is summed in place of the operand has no gaps.
    summed = torch.empty_like(source, device="meta") if copies or call.name in _SUMS_OF_RESULTS else source
    parts = reduction_nbytes(
        num_outputs,
        max(1, source.numel()) // num_outputs,
        over_fastest=reduces_fastest(summed, dims),
        vector=outputs_at_once(summed, dims),
        itemsize=_accumulator_nbytes(call),
        max_threads=256 if source.dtype == torch.complex128 else 512,
    )
    if source.is_complex() and call.name.startswith(("var", "std")):  # of the real and of the imaginary parts
        copies += 2 * [nbytes_of(tensor) for tensor in call.outputs]
    return [*parts, *copies]


def whole_reduction(source: Tensor) -> list[int]:
    """Bound the results of reducing all elements to one or two, such as the largest, and the reduction's parts."""
    results = source.new_empty(()), source.new_empty(())
    return [*map(nbytes_of, results), *reduction(bound_call(torch.ops.aten.aminmax.default, (source,), {}, results))]


def count_nonzero(call: Call) -> list[int]:
    """Count a mask of the elements that are not zero, its int64 copy, and their sum: `TensorAdvancedIndexing.cpp`."""
    return [call.tensors[0].numel(), 8 * call.tensors[0].numel(), *reduction(call)]


def check(call: Call) -> list[int]:
    """Bound `_linalg_check_errors`: a mask of the numbers that are not zero, and whether any is."""
    info = call["info"]
    return [info.numel(), *whole_reduction(info)]


def histogram(call: Call) -> list[int]:
    """Bound the search for minimum and maximum, if the range is not given: `SummaryOps.cu`."""
    low, high = (call.arguments.get(name, 0) for name in ("min", "max"))
    return [] if low != high else whole_reduction(call["self"])


def _accumulator_nbytes(call: Call) -> int:
    """Return a bound of an accumulator's bytes: 4 at least for sums, more for pairs and variances."""
    itemsize = max(tensor.itemsize for tensor in (*call.tensors, *call.outputs))
    if call.name in _SUMS:
        return max(4, itemsize)
    return itemsize if call.name in _EXTREMES else 4 * max(4, itemsize)


def loss(call: Call) -> list[int]:
    """List the unreduced loss, copies and the reduction (`ATen/native/Loss.cpp`).

    This holds for logsumexp as well, which keeps its results and the differences from the largest element
    (`ReduceOps.cpp`).
    """
    results = [nbytes_of(tensor) for tensor in call.outputs]
    return [max(nbytes_of(tensor) for tensor in call.tensors), *results, *reduction(call), *contiguous(call)]


def logits_loss(call: Call) -> list[int]:
    """Count, besides `loss`, a second term, and with `pos_weight` a weight for each logit: `Loss.cpp`."""
    more = [nbytes_of(call["self"])] * (1 if call["pos_weight"] is None else 2)
    return [*loss(call), *more]


def results_twice(call: Call) -> list[int]:
    """Count two factors of the gradient, and contiguous copies: `Loss.cpp`, `soft_margin_loss_backward`."""
    return [*(2 * [broadcast_nbytes(call.tensors)]), *contiguous(call)]


def magnitude(call: Call) -> list[int]:
    """Count the magnitudes of complex numbers as complex numbers: `ATen/native/UnaryOps.cpp`."""
    source = call["self"]
    return [nbytes_of(source)] if source.dtype.is_complex else []


def difference(call: Call) -> list[int]:
    """Count the difference, and its reduction: `ATen/native/ReduceOps.cpp`, `dist`."""
    nbytes, itemsize = broadcast_nbytes(call.tensors), common_dtype(call.tensors, (), ()).itemsize
    summing = reduction_nbytes(1, max(1, nbytes // itemsize), over_fastest=True, itemsize=max(4, itemsize))
    return [nbytes, *summing]


def one_number(call: Call) -> list[int]:
    """Count a base that is a number, copied to the device: `ATen/native/Pow.cpp`."""
    return [] if isinstance(call["self"], Tensor) else [call.outputs[0].itemsize]


def where(call: Call) -> list[int]:
    """Count casts to the dtype of the result, and numbers copied to the device: `ATen/native/TensorCompare.cpp`."""
    result, values = call.outputs[0], [call[name] for name in ("self", "other")]
    casts = [cast_nbytes(value, result.dtype) for value in values if isinstance(value, Tensor)]
    is_moved = [not isinstance(value, Tensor) or value.device != result.device for value in values]
    return [*casts, *(sum(is_moved) * [result.itemsize])]


def softmax_backward(call: Call) -> list[int]:
    """Count the product of gradient and result, then copies of both if they are not contiguous: `SoftMax.cu`."""
    grad, output = call["grad_output"], call["output"]
    product_nbytes = output.numel() * max(grad.itemsize, output.itemsize)
    copies = [] if grad.is_contiguous() else [product_nbytes]
    return [product_nbytes, *copies, *([] if output.is_contiguous() else [nbytes_of(output)])]


def safe_softmax(call: Call) -> list[int]:
    """Count a mask of operands that are -inf, one of rows with nothing else, and a zero; or before that, copies.

    Source: `ATen/native/transformers/attention.cpp`.
    """
    source, result = call["self"], call.outputs[0]
    size = result.shape[call["dim"]] if result.dim() else 1
    num_rows = result.numel() // size if size else 0
    summing = reduction_nbytes(num_rows, size, over_fastest=True, itemsize=1) if num_rows else []
    cast = cast_nbytes(source, result.dtype)
    return largest([result.numel(), num_rows, result.itemsize, *summing], [*contiguous(call), cast])


def layer_norm_backward(call: Call) -> list[int]:
    """Count partial sums for the gradients of gamma and beta, and contiguous copies.

    Only more than 65,536 rows of input have partial sums: one row of fp32 for each 32 rows of input, up to 32,768
    blocks of 32 columns in all. A reduction adds them up. Source: `layer_norm_kernel.cu`.
    """
    width = max((tensor.numel() for tensor in call.outputs[1:]), default=0)
    num_rows = call.tensors[0].numel() // max(1, width)
    if num_rows <= 65_536:
        return contiguous(call)
    rows = max(64, min(-(-num_rows // 32), 32_768 // -(-width // 32)))
    summing = [*reduction_nbytes(width, rows, over_fastest=False, itemsize=4), 4 * width]
    return [*contiguous(call), *(4 * rows * width for _ in range(2)), *summing]


def group_norm(call: Call) -> list[int]:
    """Count fp32 factors per image and channel: `group_norm_kernel.cu`.

    There are two, and in low precision the statistics in fp32. The backward has two sums, a factor, and two factors per
    group, which count as much here.
    """
    image, is_backward = call["input"], call.name.endswith("backward")
    is_low = image.dtype in LOW_PRECISION and not is_backward
    in_fp32 = [4 * tensor.numel() for tensor in call.outputs[1:]] if is_low else []
    return [*contiguous(call), *((5 if is_backward else 2) * [4 * image.shape[0] * image.shape[1]]), *in_fp32]


def batch_norm(call: Call) -> list[int]:
    """Count fp32 copies of images with gaps, numbers for absent parameters, and in training sums if channels come last.

    There are four fp32 sums per channel of each row of blocks, and semaphores. Sources: `Normalization.cu`,
    `Normalization.cuh`.
    """
    if _may_be_cudnn_s(call):
        return cudnn_batch_norm(call)
    image = call["input"]
    trains = call.arguments.get("training", not call.name.endswith("no_training"))
    absent = [8 for name in ("weight", "bias") if call[name] is None]
    return [*_copies_of_odd(call), *absent, *(_staged(image, 4) if trains and _channels_come_last(image) else [])]


def batch_norm_backward(call: Call) -> list[int]:
    """Count two sums per channel besides the forward's; sums per block are freed before the gradient exists."""
    image = call["input"]
    if _may_be_cudnn_s(call):
        return cudnn_batch_norm(call)
    if not _channels_come_last(image):
        return _copies_of_odd(call)
    staged_nbytes = max(0, sum(_staged(image, 2)) - nbytes_of(image))
    return [*(2 * [4 * image.shape[1]]), staged_nbytes, *_copies_of_odd(call)]


def _may_be_cudnn_s(call: Call) -> bool:
    """Whether an operator chooses its kernel when it runs: `_batch_norm_with_update` and its backward.

    Source: `Normalization.cu`.
    """
    chooses = call.name.startswith("_batch_norm_with_update") or call.name == "batch_norm_backward"
    return chooses and torch.backends.cudnn.enabled


def _channels_come_last(image: Tensor) -> bool:
    """Whether `batch_norm_use_channels_last_kernels` holds for an image."""
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(image.dim())
    if layout is not None and image.is_contiguous(memory_format=layout):
        return True
    return image.is_contiguous() and image.dim() > 1 and image.stride(1) == 1


def _copies_of_odd(call: Call) -> list[int]:
    """Count fp32 copies of operands that are neither contiguous nor channels last: `batch_norm_mean_var`."""
    return [4 * t.numel() for t in call.tensors if not t.is_contiguous() and not _channels_come_last(t)]


def _staged(image: Tensor, num_sums: int) -> list[int]:
    """Bound the sums of rows of blocks, and semaphores, if there are many rows: `flexible_launch_configs`."""
    num_channels = image.shape[1]
    num_blocks = min(-(-image.numel() // max(1, 256 * num_channels)), 128)
    return [4 * num_sums * num_channels * num_blocks, 4 * num_channels] if num_blocks >= 8 else []


def cudnn_batch_norm(call: Call) -> list[int]:
    """Estimate cuDNN's workspace, which is known only when it runs, and count contiguous copies of operands.

    A policy, as for `convolution`: one copy of the image, and 2,052 bytes per channel. Source:
    `ATen/native/cudnn/BatchNorm.cpp`.
    """
    image = call["input"]
    return [nbytes_of(image), (2048 + 4) * image.shape[1], *contiguous(call)]


def grouped_product(call: Call) -> list[int]:
    """Bound pointers, strides and sizes of each group, and CUTLASS' descriptors: `GroupMM.cu`."""
    return [512 * max((tensor.shape[0] for tensor in call.tensors), default=0), _MIB]


def convolution(call: Call) -> list[int]:
    """Count ATen's own convolution without cuDNN (`cuda_convolution`), and estimate cuDNN's.

    cuDNN's scratch does not follow from shapes: heuristics choose an algorithm when the convolution runs, and
    `ATen/native/cudnn/Conv_v8.cpp` allocates its workspace, or tries the next algorithm if it cannot.

    So this is a policy and no bound: all operands and results in fp32 (copies in other layouts), and for the workspace
    eight times as much and 32 MiB, but at most CONVOLUTION_NBYTES. Under a memory limit cuDNN makes do with less, by
    another algorithm. To state better figures, declare `aten::convolution` and `aten::convolution_backward`.
    """
    own = None if torch.backends.cudnn.enabled else own_shards(call.arguments, call.outputs)
    if own is not None:
        return own
    copies = [4 * tensor.numel() for tensor in (*call.tensors, *call.outputs)]
    return [*copies, min(CONVOLUTION_NBYTES, 32 * _MIB + 8 * sum(copies))]


def product(call: Call) -> list[int]:
    """Count copies of matrices that lie neither by rows nor by columns: `Blas.cpp`, `prepare_matrix_for_cublas`."""
    factors = [call.arguments.get(name) for name in ("self", "mat1", "mat2", "batch1", "batch2", "mat")]
    if any(isinstance(call.arguments.get(name), Tensor) for name in ("mat1", "batch1", "mat")):
        factors = factors[1:]  # what is added is copied into the result
    matrices = [tensor for tensor in factors if isinstance(tensor, Tensor) and tensor.dim() > 1]
    return [nbytes_of(tensor) for tensor in matrices if not (_has_rows(tensor) or _has_rows(tensor.mT))]


def _has_rows(matrices: Tensor) -> bool:
    """Whether cuBLAS can read each matrix row by row as it lies."""
    to_next_row, to_next_column = matrices.stride()[-2:]
    return bool(to_next_column == 1 and to_next_row >= max(1, matrices.shape[-1]))


def pooled(call: Call) -> list[int]:
    """Count contiguous copies, and if there are any, results, which are copied to the operand's strides.

    Sources: `AdaptiveMaxPooling2d.cu`, `UpSampleBilinear2d.cu`.
    """
    copies = contiguous(call)
    return [*copies, *(nbytes_of(tensor) for tensor in call.outputs if copies)]


def bernoulli(call: Call) -> list[int]:
    """Count chances in fp32, if they are in low precision: `cuda/DistributionTemplates.h`."""
    chances = call.arguments.get("p", call.tensors[0])
    return [4 * chances.numel()] if isinstance(chances, Tensor) and chances.dtype in LOW_PRECISION else []


def normal(call: Call) -> list[int]:
    """Count numbers before they are shifted, and the test of the least deviation: `DistributionTemplates.h`."""
    mean, deviation = call.arguments.get("mean"), call.arguments.get("std")
    moved = [nbytes_of(call.outputs[0])] if isinstance(mean, Tensor) or isinstance(deviation, Tensor) else []
    return [*moved, *([deviation.itemsize, *whole_reduction(deviation)] if isinstance(deviation, Tensor) else [])]


def largest(*moments: list[int]) -> list[int]:
    """Return the allocations of the fullest of several moments."""
    return max(moments, key=lambda parts: sum(map(rounded_nbytes, parts)))


def is_dense(tensor: Tensor) -> bool:
    """Whether each element has its own place, and no place between them is left out."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True
