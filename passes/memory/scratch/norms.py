"""Count the scratch bytes of normalisations and losses on the CPU: statistics, sums per thread, copies.

Sources: ATen's `layer_norm_kernel.cpp`, `group_norm_kernel.cpp`, `batch_norm_kernel.cpp`, `Normalization.cpp`,
`LossNLL.cpp` and `SoftMaxKernel.cpp`; checked by measuring.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from chunkc.passes.memory.scratch.bounds import Bound
from chunkc.passes.memory.scratch.copies import LOW_PRECISION, contiguous_copy_nbytes, copy_block_nbytes, nbytes_of
from chunkc.passes.memory.scratch.iterator import reduces_two_inner_dimensions
from chunkc.passes.memory.scratch.products import gemm_nbytes, operand_copy_nbytes
from chunkc.passes.memory.scratch.rules import Call, cast_nbytes, pointwise


def _strided_nbytes(*tensors: Tensor | None) -> int:
    return sum(nbytes_of(t) for t in tensors if t is not None and not t.is_contiguous())


def layer_norm(call: Call) -> int:
    """Count contiguous copies; the block for transposing a matrix is freed before the results exist."""
    source = call["input"]
    copies = _strided_nbytes(source, call["weight"], call["bias"])
    block = copy_block_nbytes(source) if not source.is_contiguous() else 0
    return max(copies, copies + block - sum(map(nbytes_of, call.outputs)))


def layer_norm_backward(call: Call) -> int:
    """Count partial gradients of weight and bias for each thread, and contiguous copies."""
    grad, source = call["grad_out"], call["input"]
    wanted = call["output_mask"][1] or call["output_mask"][2]
    partial = 2 * call.num_threads * math.prod(call["normalized_shape"]) * source.itemsize if wanted else 0
    block = copy_block_nbytes(grad) if not grad.is_contiguous() else 0
    return _strided_nbytes(source, grad, call["weight"], call["bias"]) + max(partial, block)


def group_norm(call: Call) -> int:
    """Count two sums per image and channel, with channels last."""
    return 0 if call["input"].is_contiguous() else group_norm_backward(call)


def group_norm_backward(call: Call) -> int:
    """Count two sums per image and channel."""
    source = call["input"]
    return 2 * source.shape[0] * source.shape[1] * max(source.itemsize, 4)


def _format(source: Tensor) -> str:
    """Return how a batch normalisation walks its input: channels outside, channels innermost, or any strides."""
    if source.is_contiguous() and math.prod(source.shape[2:]) != 1:
        return "contiguous"
    if source.is_contiguous() or (source.dim() == 4 and source.is_contiguous(memory_format=torch.channels_last)):
        return "channels last"
    return "strided"


def batch_norm(call: Call) -> int:
    """Count a factor and an offset per channel; and in training with channels innermost, sums per thread.

    With other strides, count a number that is divided by or added, and one in place of each absent parameter.
    """
    source, channels = call["input"], call["input"].shape[1]
    statistics = _statistics_itemsize(call)
    factors = 2 * channels * max(4, statistics)
    training = call.arguments.get("training", call.arguments.get("train", "no_training" not in call.name))
    form = _format(source)
    if form == "strided" and channels == 1:
        return factors + (nbytes_of(source, 4) + 4 if source.dtype in LOW_PRECISION else 2 * statistics)  # a bound
    if form == "strided":
        low = nbytes_of(source, 4) if source.dtype in LOW_PRECISION else 0
        absent = (call["weight"] is None) + (call["bias"] is None)
        if training:
            return low + channels * 4 if low else max(0, 12 - channels * statistics, absent * statistics)
        return max(3 * channels * statistics, channels * statistics + 12)
    if form == "contiguous" or not training:
        return factors
    sums = call.num_threads * channels * max(4, source.itemsize)
    return max(factors, sums + 2 * channels * statistics)


def _statistics_itemsize(call: Call) -> int:
    """Return the item size of saved statistics: the input's, or the parameters' if that is larger."""
    names = ("weight", "bias", "running_mean")
    parameters = [call.arguments[name] for name in names if call.arguments.get(name) is not None]
    return max([call["input"].itemsize, *(t.itemsize for t in parameters)])


def norm_outputs(call: Call) -> dict[int, int]:
    """Correct the bytes of saved mean and inverse deviation: fake tensors have a wrong dtype in mixed precision."""
    itemsize = _statistics_itemsize(call)
    found = {position: nbytes_of(t, itemsize) for position, t in enumerate(call.outputs[1:3], 1)}
    for position, t in enumerate(
        call.outputs[3:], 3
    ):  # new running mean and variance; or what cuDNN reserves, here nothing
        found[position] = nbytes_of(t, call["running_mean"].itemsize)
    return found


def group_norm_backward_outputs(call: Call) -> dict[int, int]:
    """Correct the bytes of the input's gradient: it has the input's dtype, but its fake tensor the weight's."""
    return {0: nbytes_of(call["input"])} if call["output_mask"][0] else {}


def batch_norm_backward(call: Call) -> int:
    """Count a second gradient of the input if its format and the gradient's agree, else sums of the gradient.

    If they agree, with channels innermost, sums per thread and converted parameters count instead where they take more.
    """
    source, grad = call["input"], call["grad_out"]
    channels, form = source.shape[1], _format(source)
    if form == _format(grad) != "strided":
        is_low = any(t is not None and t.dtype in LOW_PRECISION for t in (call["weight"], call["running_mean"]))
        num_rows = 2 * call.num_threads + (3 if is_low else (not call["train"]) + (call["weight"] is None))
        return max(nbytes_of(source), num_rows * channels * max(4, source.itemsize) if form == "channels last" else 0)
    sums = channels * source.itemsize
    reduced = {dim for dim in range(grad.dim()) if dim != 1}
    if grad.dtype in LOW_PRECISION and reduces_two_inner_dimensions(grad, reduced):
        return nbytes_of(grad, 4) + channels * 4 + sums
    return sums


def nll_loss(call: Call) -> int:
    """Count contiguous copies of weights and targets; and of logits, if losses are summed, or of one row."""
    copies = _strided_nbytes(call.arguments.get("weight"), call["target"])
    in_place = call["reduction"] == 0 and call["self"].dim() > 1
    return copies + (0 if in_place else contiguous_copy_nbytes(call["self"]))


def nll_loss_backward(call: Call) -> int:
    return _strided_nbytes(call.arguments.get("weight"), call["target"])


def safe_softmax(call: Call) -> int:
    """Count a mask of inputs that are -inf, and one of whole such rows; or, before that, a contiguous copy."""
    source, result = call["self"], call.outputs[0]
    dim = call["dim"] % max(1, result.dim())
    rows = math.prod(size for number, size in enumerate(result.shape) if number != dim)
    copies = contiguous_copy_nbytes(source) + cast_nbytes(source, result.dtype)
    return max(result.numel() + rows + result.itemsize, copies)


def rms_norm(call: Call) -> int:
    """Bound `_fused_rms_norm`: temporaries, numbers of each row, and in low precision a cast of the weight."""
    weight = call["weight"]
    weight_nbytes = nbytes_of(weight, 4) if weight is not None and weight.dtype in LOW_PRECISION else 0
    return weight_nbytes + Bound(copies=2, sums=2, rows=40)(call)


def logits_loss(call: Call) -> int:
    """Bound `binary_cross_entropy_with_logits`: two temporaries, contiguous logits, weights less one, casts twice."""
    logits, weight = call["self"], call["pos_weight"]
    itemsize = max(4 if call["reduction"] else 2, *(t.itemsize for t in call.tensors))
    temporaries = 2 * nbytes_of(logits, itemsize) + 64
    copies = contiguous_copy_nbytes(logits) + (0 if weight is None else nbytes_of(weight))
    return 2 * pointwise(call) + temporaries + copies


def chunked_loss(call: Call) -> int:
    """Bound `linear_cross_entropy` by chunks: a chunk's logits and rows, weights of all targets, wider operands.

    float16 has logits in two precisions, and bfloat16 narrows them, unless the policy is "accurate". Source: PyTorch's
    `linear_cross_entropy.py`.
    """
    source, weight, dtype, policy = (call[name] for name in ("input", "linear_weight", "acc_dtype", "acc_policy"))
    (num_rows, width), num_classes, chunk = source.shape, weight.shape[0], call["batch_chunk_size"]
    is_low, is_half, wide = source.dtype != dtype, source.dtype == torch.float16, dtype.itemsize
    names = ("input", "linear_weight", "linear_bias")
    of_input, of_weight, of_bias = (bool(call.arguments.get(f"compute_{name}_grad")) for name in names)
    has_chunk = of_weight and not (policy == "compact" and (is_half or not is_low))
    logits = wide + (6 if is_half and is_low else 2 * is_low)
    rows = wide * ((4 if is_low else 2) if of_input or of_weight else is_low)
    nbytes = chunk * (num_classes * logits + width * rows + 5 * wide) + num_rows * (9 + 3 * wide) + 256
    sums = has_chunk * (3 if is_low else 1)  # in low precision, the gradient is cast there and back
    nbytes += num_classes * wide * (width * (is_low + sums) + is_low + 2 * of_bias)
    nbytes += num_rows * width * wide * (of_input and is_low)
    is_narrow = policy != "accurate" and (is_half or (policy == "compact" and of_weight))
    shapes = ((chunk, width, num_classes), (chunk, num_classes, width), (num_classes, chunk, width))
    products = max(gemm_nbytes(source.dtype if is_narrow else dtype, *shape, call.num_threads) for shape in shapes)
    return nbytes + products + operand_copy_nbytes(source) + operand_copy_nbytes(weight)


def embedding_bag_outputs(call: Call) -> dict[int, int]:
    """Correct the bytes of each index's bag: there is room for one more."""
    return {1: 8 * (call["indices"].numel() + 1)} if call["mode"] != 0 else {}


def cross_entropy_backward(call: Call) -> int:
    """Count `binary_cross_entropy_backward`: casts, and the number by which a mean divides."""
    return pointwise(call) + (8 + call.outputs[0].itemsize if call["reduction"] == 1 else 0)


def point_distances(call: Call) -> int:
    """Bound `cdist`: operands with the common batch shape, and twice again for products; backwards also gradients.

    A product's operands are the points with two numbers appended.
    """
    points, is_backward = (call["x1"], call["x2"]), "grad" in call.arguments
    batch = math.prod(torch.broadcast_shapes(*(t.shape[:-2] for t in points)))
    numel = sum(batch * t.shape[-2] * (t.shape[-1] if is_backward else 3 * t.shape[-1] + 4) for t in points)
    gradients = nbytes_of(call["grad"]) + nbytes_of(call["cdist"]) if is_backward else 64
    return numel * points[0].itemsize + gradients


def weight_norm(call: Call) -> int:
    """Count a row of sums per thread, backwards three at least, over the last dimension."""
    direction, least = (call["saved_v"], 3) if "saved_v" in call.arguments else (call["v"], 1)
    return 4 * max(least, call.num_threads) * direction.shape[call["dim"]] if call["dim"] else 0
