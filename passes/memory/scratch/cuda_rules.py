"""Bound the scratch of ATen's operators on a CUDA device from shapes, by rules for `passes.memory.scratch.cuda`.

Each rule was read off ATen's CUDA sources of PyTorch 2.11 to 2.13. It names its source file, below
`aten/src/ATen/native/cuda/` unless a folder is named. A rule gives the sizes of allocations; they are rounded where
they are added up.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from chunkc.passes.graphs.attention_cuda import Capability
from chunkc.passes.graphs.cuda_memory import rounded_nbytes
from chunkc.passes.memory.scratch.copies import LOW_PRECISION
from chunkc.passes.memory.scratch.cuda_convolution import own_shards
from chunkc.passes.memory.scratch.cuda_reduction import outputs_at_once, reduces_fastest, reduction_nbytes

CONVOLUTION_NBYTES = 1 << 30
"""The most that is set aside for one convolution's workspace (see `convolution`)."""

_CAST_SUMS = ("sum", "nansum", "mean", "norm", "linalg_vector_norm")
_SUMS = (*_CAST_SUMS, "logsumexp", "mse_loss", "smooth_l1_loss", "huber_loss", "count_nonzero")
_EXTREMES = ("amax", "amin", "all", "any")
_SUMS_OF_RESULTS = ("logsumexp", "count_nonzero")  # of exponentials, of masks
_CAST_FIRST = (*_CAST_SUMS, "prod")
_MADE_CONTIGUOUS = ("max", "min", "argmax", "argmin", "aminmax")

_MIB = 1 << 20


class Call:
    """A call of an operator: arguments by name, tensors in order, results, and the compute capability if known."""

    def __init__(
        self,
        target: torch._ops.OpOverload,
        args: tuple,
        kwargs: dict[str, Any],
        outputs: object,
        capability: Capability | None = None,
    ) -> None:
        self.name = target._schema.name.removeprefix("aten::")
        names = [argument.name for argument in target._schema.arguments]
        self.arguments: dict[str, Any] = dict(zip(names, args)) | kwargs
        self.inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self.outputs = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
        self.capability = capability

    def tensor(self, name: str) -> Tensor:
        value = self.arguments[name]
        assert isinstance(value, Tensor), f"{name} is no tensor"
        return value


def nothing(call: Call) -> list[int]:
    return []


def reduction(call: Call) -> list[int]:
    """List a reduction's allocations: those of `cuda_reduction` (`Reduce.cuh`), and copies before it.

    Copied are, for an extreme of all elements, operands that are not contiguous (`ATen/native/TensorCompare.cpp`,
    `ReduceOps.cpp`), and operands that are summed in another dtype (`ReduceOpsUtils.h`), but for halves that are summed
    in fp32. Variances of complex numbers have results of their parts in addition (`ReduceOps.cpp`, `std_var_out`).
    """
    source = max(call.inputs, key=Tensor.numel)
    num_outputs = max(1, max((tensor.numel() for tensor in call.outputs), default=1))
    given = call.arguments.get("dim")
    dims = [] if given is None else [given] if isinstance(given, int) else list(given)
    copies = contiguous(call) if given is None and call.name in _MADE_CONTIGUOUS else []
    if call.name in _CAST_FIRST and not (source.dtype in LOW_PRECISION and call.outputs[0].dtype == torch.float32):
        dtype = call.outputs[0].dtype
        copies += cast(source, dtype.to_complex() if source.is_complex() else dtype)
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
    call = Call(torch.ops.aten.aminmax.default, (source,), {}, results)
    return [*map(nbytes_of, results), *reduction(call)]


def count_nonzero(call: Call) -> list[int]:
    """Count a mask of the elements that are not zero, its int64 copy, and their sum: `TensorAdvancedIndexing.cpp`."""
    return [call.inputs[0].numel(), 8 * call.inputs[0].numel(), *reduction(call)]


def check(call: Call) -> list[int]:
    """Bound `_linalg_check_errors`: a mask of the numbers that are not zero, and whether any is."""
    info = call.tensor("info")
    return [info.numel(), *whole_reduction(info)]


def histogram(call: Call) -> list[int]:
    """Bound the search for minimum and maximum, if the range is not given: `SummaryOps.cu`."""
    low, high = (call.arguments.get(name, 0) for name in ("min", "max"))
    return [] if low != high else whole_reduction(call.tensor("self"))


def cast(tensor: Tensor, dtype: torch.dtype) -> list[int]:
    """Count a copy in that dtype, if the tensor has another."""
    return [] if tensor.dtype == dtype else [tensor.numel() * dtype.itemsize]


def _accumulator_nbytes(call: Call) -> int:
    """Return a bound of an accumulator's bytes: 4 at least for sums, more for pairs and variances."""
    itemsize = max(tensor.itemsize for tensor in (*call.inputs, *call.outputs))
    if call.name in _SUMS:
        return max(4, itemsize)
    return itemsize if call.name in _EXTREMES else 4 * max(4, itemsize)


def loss(call: Call) -> list[int]:
    """List the unreduced loss, copies and the reduction (`ATen/native/Loss.cpp`).

    This holds for logsumexp as well, which keeps its results and the differences from the largest element
    (`ReduceOps.cpp`).
    """
    results = [nbytes_of(tensor) for tensor in call.outputs]
    return [max(nbytes_of(tensor) for tensor in call.inputs), *results, *reduction(call), *contiguous(call)]


def logits_loss(call: Call) -> list[int]:
    """Count, besides `loss`, a second term, and with `pos_weight` a weight for each logit: `Loss.cpp`."""
    more = [nbytes_of(call.tensor("self"))] * (1 if call.arguments["pos_weight"] is None else 2)
    return [*loss(call), *more]


def contiguous(call: Call) -> list[int]:
    """List the copies of operands that are not contiguous, for kernels that read contiguous memory."""
    return [nbytes_of(tensor) for tensor in call.inputs if not tensor.is_contiguous()]


def results_twice(call: Call) -> list[int]:
    """Count two factors of the gradient, and contiguous copies: `Loss.cpp`, `soft_margin_loss_backward`."""
    return [*(2 * [nbytes_of(call.outputs[0])]), *contiguous(call)]


def result_once(call: Call) -> list[int]:
    """Count the product: `torch/_prims`, `fma`."""
    return [nbytes_of(call.outputs[0])]


def is_finite(call: Call) -> list[int]:
    """Count magnitudes, a mask of complex numbers, and for `isfinite` two more masks: `TensorCompare.cpp`."""
    source = call.tensor("self")
    if not (source.is_complex() or source.is_floating_point()):
        return []
    num_masks = int(source.is_complex()) + (2 if call.name == "isfinite" else 0)
    return [nbytes_of(source), *(num_masks * [source.numel()])]


def ldexp(call: Call) -> list[int]:
    """Count the powers of two (`ATen/native/BinaryOps.cpp`), and their base, a tensor of one number (`Pow.cpp`)."""
    other = call.tensor("other")
    itemsize = max(4, other.itemsize)
    return [other.numel() * itemsize, itemsize]


def clamp(call: Call) -> list[int]:
    """Count the operand's cast to the dtype of the result: `ATen/native/TensorCompare.cpp`."""
    return cast(call.tensor("self"), call.outputs[0].dtype)


def magnitude(call: Call) -> list[int]:
    """Count the magnitudes of complex numbers as complex numbers: `ATen/native/UnaryOps.cpp`."""
    source = call.tensor("self")
    return [nbytes_of(source)] if source.dtype.is_complex else []


def log_gamma(call: Call) -> list[int]:
    """Count the operands of each of `p` terms, and the `p` numbers: `ATen/native/UnaryOps.cpp`, `mvlgamma`."""
    result, terms = call.outputs[0], call.arguments["p"]
    return [terms * nbytes_of(result), terms * result.itemsize, nbytes_of(result)]


def difference(call: Call) -> list[int]:
    """Count the difference, and its reduction: `ATen/native/ReduceOps.cpp`, `dist`."""
    numel, itemsize = prod(torch.broadcast_shapes(*(tensor.shape for tensor in call.inputs))), call.inputs[0].itemsize
    summing = reduction_nbytes(1, max(1, numel), over_fastest=True, itemsize=max(4, itemsize))
    return [numel * itemsize, *summing]


def one_number(call: Call) -> list[int]:
    """Count a base that is a number, copied to the device: `ATen/native/Pow.cpp`."""
    return [] if isinstance(call.arguments["self"], Tensor) else [call.outputs[0].itemsize]


def where(call: Call) -> list[int]:
    """Count casts to the dtype of the result, and numbers copied to the device: `ATen/native/TensorCompare.cpp`."""
    result, values = call.outputs[0], [call.arguments[name] for name in ("self", "other")]
    casts = [nbytes for value in values if isinstance(value, Tensor) for nbytes in cast(value, result.dtype)]
    is_moved = [not isinstance(value, Tensor) or value.device != result.device for value in values]
    return [*casts, *(sum(is_moved) * [result.itemsize])]


def softmax_backward(call: Call) -> list[int]:
    """Count the product of gradient and result, then copies of both if they are not contiguous: `SoftMax.cu`."""
    grad, output = call.tensor("grad_output"), call.tensor("output")
    product_nbytes = output.numel() * max(grad.itemsize, output.itemsize)
    copies = [] if grad.is_contiguous() else [product_nbytes]
    return [product_nbytes, *copies, *([] if output.is_contiguous() else [nbytes_of(output)])]


def safe_softmax(call: Call) -> list[int]:
    """Count a mask of operands that are -inf, one of rows with nothing else, and a zero; or before that, copies.

    Source: `ATen/native/transformers/attention.cpp`.
    """
    source, result = call.tensor("self"), call.outputs[0]
    size = result.shape[call.arguments["dim"]] if result.dim() else 1
    num_rows = result.numel() // size if size else 0
    summing = reduction_nbytes(num_rows, size, over_fastest=True, itemsize=1) if num_rows else []
    cast = [nbytes_of(result)] if source.dtype != result.dtype else []
    return largest([result.numel(), num_rows, result.itemsize, *summing], [*contiguous(call), *cast])


def layer_norm_backward(call: Call) -> list[int]:
    """Count partial sums for the gradients of gamma and beta, and contiguous copies.

    Only more than 65,536 rows of input have partial sums: one row of fp32 for each 32 rows of input, up to 32,768
    blocks of 32 columns in all. A reduction adds them up. Source: `layer_norm_kernel.cu`.
    """
    width = max((tensor.numel() for tensor in call.outputs[1:]), default=0)
    num_rows = call.inputs[0].numel() // max(1, width)
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
    image, is_backward = call.tensor("input"), call.name.endswith("backward")
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
    image = call.tensor("input")
    trains = call.arguments.get("training", not call.name.endswith("no_training"))
    absent = [8 for name in ("weight", "bias") if call.arguments[name] is None]
    return [*_copies_of_odd(call), *absent, *(_staged(image, 4) if trains and _channels_come_last(image) else [])]


def batch_norm_backward(call: Call) -> list[int]:
    """Count two sums per channel besides the forward's; sums per block are freed before the gradient exists."""
    image = call.tensor("input")
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
    return [4 * t.numel() for t in call.inputs if not t.is_contiguous() and not _channels_come_last(t)]


def _staged(image: Tensor, num_sums: int) -> list[int]:
    """Count the sums of rows of blocks, and semaphores, if there are many rows: `flexible_launch_configs`."""
    num_channels = image.shape[1]
    num_rows = image.numel() // max(1, num_channels)
    width = min(_last_power_of_2(num_channels), 32)
    height = min(_last_power_of_2(-(-num_rows // 16)), 512 // width)
    if width * height != 512:
        width = min(_last_power_of_2(num_channels), 512 // height)
    num_blocks = min(-(-num_rows // (16 * height)), 128)
    return [4 * num_sums * num_channels * num_blocks, 4 * -(-num_channels // width)] if num_blocks >= 8 else []


def _last_power_of_2(number: int) -> int:
    return 1 << max(0, number.bit_length() - 1)


def cudnn_batch_norm(call: Call) -> list[int]:
    """Estimate cuDNN's workspace, which is known only when it runs, and count contiguous copies of operands.

    A policy, as for `convolution`: one copy of the image, and 2,052 bytes per channel. Source:
    `ATen/native/cudnn/BatchNorm.cpp`.
    """
    image = call.tensor("input")
    return [nbytes_of(image), (2048 + 4) * image.shape[1], *contiguous(call)]


def grouped_product(call: Call) -> list[int]:
    """Bound pointers, strides and sizes of each group, and CUTLASS' descriptors: `GroupMM.cu`."""
    return [512 * max((tensor.shape[0] for tensor in call.inputs), default=0), _MIB]


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
    copies = [4 * tensor.numel() for tensor in (*call.inputs, *call.outputs)]
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


def roll(call: Call) -> list[int]:
    """Count the results between one dimension and the next: `ATen/native/TensorTransformations.cpp`."""
    dims = call.arguments.get("dims", ())
    num_between = max(0, (1 if isinstance(dims, int) else len(dims)) - 1)
    return [*(num_between * [nbytes_of(call.outputs[0])]), *contiguous(call)]


def im2col(call: Call) -> list[int]:
    """Count the result as it starts, as large as the image: `Im2Col.cu`."""
    return [nbytes_of(call.inputs[0]), *contiguous(call)]


def pooled(call: Call) -> list[int]:
    """Count contiguous copies, and if there are any, results, which are copied to the operand's strides.

    Sources: `AdaptiveMaxPooling2d.cu`, `UpSampleBilinear2d.cu`.
    """
    copies = contiguous(call)
    return [*copies, *(nbytes_of(tensor) for tensor in call.outputs if copies)]


def pooling_offsets(call: Call) -> list[int]:
    """Count int64 indices, and per dimension remainders, positions and beginnings of windows: `inductor_prims.py`."""
    return (3 * len(call.arguments["kernel_size"]) + 1) * [8 * call.outputs[-1].numel()]


def bernoulli(call: Call) -> list[int]:
    """Count chances in fp32, if they are in low precision: `cuda/DistributionTemplates.h`."""
    chances = call.arguments.get("p", call.inputs[0])
    return [4 * chances.numel()] if isinstance(chances, Tensor) and chances.dtype in LOW_PRECISION else []


def normal(call: Call) -> list[int]:
    """Count numbers before they are shifted, and the test of the least deviation: `DistributionTemplates.h`."""
    mean, deviation = call.arguments.get("mean"), call.arguments.get("std")
    moved = [nbytes_of(call.outputs[0])] if isinstance(mean, Tensor) or isinstance(deviation, Tensor) else []
    return [*moved, *([deviation.itemsize, *whole_reduction(deviation)] if isinstance(deviation, Tensor) else [])]


def unfold_backward(call: Call) -> list[int]:
    """Count, where windows overlap (`UnfoldBackward.h`), the position of each element along the dimension."""
    result = call.outputs[0]
    overlap = result.dim() and call.arguments["step"] < call.arguments["size"]
    return [8 * result.shape[call.arguments["dim"]]] if overlap else []


def col2im(call: Call) -> list[int]:
    """Count contiguous copies, and the result as it started while it grows (see `col2im_outputs`)."""
    columns_nbytes, nbytes = nbytes_of(call.inputs[0]), nbytes_of(call.outputs[0])
    return [*contiguous(call), *([columns_nbytes] if nbytes > columns_nbytes else [])]


def col2im_outputs(call: Call) -> dict[int, int]:
    """Correct the result's bytes: it starts as large as the columns (`Col2Im.cu`)."""
    return {0: max(nbytes_of(call.inputs[0]), nbytes_of(call.outputs[0]))}


def uniform_outputs(call: Call) -> dict[int, int]:
    """Correct the result's bytes: it is dense, though its fake tensor has the strides of the argument."""
    return {0: nbytes_of(call.outputs[0])}


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


def nbytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize
