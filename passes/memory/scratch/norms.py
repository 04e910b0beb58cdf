"""Scratch bytes of normalisations and losses on the CPU: statistics, partial sums per thread, contiguous copies.

Sources: ATen's `layer_norm_kernel.cpp`, `group_norm_kernel.cpp`, `batch_norm_kernel.cpp`, `Normalization.cpp`,
`LossNLL.cpp` and `SoftMaxKernel.cpp`; checked by measuring.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from chunkc.passes.memory.scratch.copies import LOW_PRECISION, contiguous_copy_nbytes, copy_block_nbytes, nbytes_of
from chunkc.passes.memory.scratch.iterator import reduces_two_inner_dimensions
from chunkc.passes.memory.scratch.rules import Call, pointwise_rule


def _strided_nbytes(*tensors: Tensor | None) -> int:
    return sum(nbytes_of(t) for t in tensors if t is not None and not t.is_contiguous())


def layer_norm_rule(call: Call) -> int:
    """Contiguous copies; the block through which a matrix is transposed is gone before the results exist."""
    source = call["input"]
    copies = _strided_nbytes(source, call["weight"], call["bias"])
    block = copy_block_nbytes(source) if not source.is_contiguous() else 0
    return max(copies, copies + block - sum(map(nbytes_of, call.outputs)))


def layer_norm_backward_rule(call: Call) -> int:
    """Partial gradients of weight and bias for each thread."""
    grad, source = call["grad_out"], call["input"]
    wanted = call["output_mask"][1] or call["output_mask"][2]
    partial = 2 * call.num_threads * math.prod(call["normalized_shape"]) * source.itemsize if wanted else 0
    block = copy_block_nbytes(grad) if not grad.is_contiguous() else 0
    return _strided_nbytes(source, grad, call["weight"], call["bias"]) + max(partial, block)


def group_norm_rule(call: Call) -> int:
    """Two sums, with channels last, per image and channel."""
    source = call["input"]
    if source.is_contiguous():
        return 0
    return 2 * source.shape[0] * source.shape[1] * max(source.itemsize, 4)


def group_norm_backward_rule(call: Call) -> int:
    """Two sums per image and channel."""
    source = call["input"]
    return 2 * source.shape[0] * source.shape[1] * max(source.itemsize, 4)


def _format(source: Tensor) -> str:
    """Ways in which a batch normalisation walks its input: channels outside, channels innermost, or any strides."""
    if source.is_contiguous() and math.prod(source.shape[2:]) != 1:
        return "contiguous"
    if source.is_contiguous() or (source.dim() == 4 and source.is_contiguous(memory_format=torch.channels_last)):
        return "channels last"
    return "strided"


def batch_norm_rule(call: Call) -> int:
    """A factor and an offset per channel; sums per thread where channels are innermost."""
    source, channels = call["input"], call["input"].shape[1]
    statistics = _statistics_itemsize(call)
    factors = 2 * channels * max(4, statistics)
    training = call.arguments.get("training", call.arguments.get("train", "no_training" not in str(call.target)))
    form = _format(source)
    if form == "strided" and channels == 1:
        return factors + (nbytes_of(source, 4) + 4 if source.dtype in LOW_PRECISION else 2 * statistics)  # a bound
    if form == "strided":
        low = nbytes_of(source, 4) if source.dtype in LOW_PRECISION else 0
        return low + channels * 4 if training and low else 0 if training else 3 * channels * statistics
    if form == "contiguous" or not training:
        return factors
    sums = call.num_threads * channels * max(4, source.itemsize)
    return max(factors, sums + 2 * channels * statistics)


def _statistics_itemsize(call: Call) -> int:
    """Saved statistics are kept in the parameters' dtype where it is wider than the input's."""
    names = ("weight", "bias", "running_mean")
    parameters = [call.arguments[name] for name in names if call.arguments.get(name) is not None]
    return max([call["input"].itemsize, *(t.itemsize for t in parameters)])


def norm_outputs(call: Call) -> dict[int, int]:
    """Saved mean and inverse deviation; fake tensors get their dtype wrong for mixed precision."""
    itemsize = _statistics_itemsize(call)
    found = {position: nbytes_of(t, itemsize) for position, t in enumerate(call.outputs[1:3], 1)}
    for position, t in enumerate(
        call.outputs[3:], 3
    ):  # new running mean and variance; or what cuDNN reserves, here nothing
        found[position] = nbytes_of(t, call["running_mean"].itemsize)
    return found


def group_norm_backward_outputs(call: Call) -> dict[int, int]:
    """The input's gradient has the input's dtype; its fake tensor says the weight's."""
    return {0: nbytes_of(call["input"])} if call["output_mask"][0] else {}


def batch_norm_backward_rule(call: Call) -> int:
    """A second gradient of the input where formats agree; sums of the gradient where they do not."""
    source, grad = call["input"], call["grad_out"]
    if _format(source) == _format(grad) != "strided":
        return nbytes_of(source)
    channels = source.shape[1]
    sums = channels * source.itemsize
    reduced = {dim for dim in range(grad.dim()) if dim != 1}
    if grad.dtype in LOW_PRECISION and reduces_two_inner_dimensions(grad, reduced):
        return nbytes_of(grad, 4) + channels * 4 + sums
    return sums


def rms_norm_rule(call: Call) -> int:
    """Bound: squares, and the input scaled."""
    source = call["input"]
    return 2 * nbytes_of(source, 4) + 4 * source.shape[0] + 64


def nll_loss_rule(call: Call) -> int:
    """Weights made contiguous; logits too where losses are summed."""
    copies = _strided_nbytes(call.arguments.get("weight"), call["target"])
    return copies + (contiguous_copy_nbytes(call["self"]) if call["reduction"] != 0 else 0)


def nll_loss_backward_rule(call: Call) -> int:
    return _strided_nbytes(call.arguments.get("weight"), call["target"])


def safe_softmax_rule(call: Call) -> int:
    """A mask of the inputs that are -inf, and whether a whole row is; before that, a contiguous copy."""
    source, result = call["self"], call.outputs[0]
    dim = call["dim"] % max(1, result.dim())
    rows = math.prod(size for number, size in enumerate(result.shape) if number != dim)
    cast = nbytes_of(source, result.itemsize) if source.dtype != result.dtype else 0
    return max(result.numel() + rows + result.itemsize, contiguous_copy_nbytes(source) + cast)


def joint_contiguous_rule(call: Call) -> int:
    """Contiguous copies of all operands, made before the result."""
    return contiguous_copy_nbytes(*call.tensors)


def loss_rule(call: Call) -> int:
    """Bound for losses in several steps: two temporaries in the widest dtype."""
    widest = max((nbytes_of(t, max(t.itemsize, 4)) for t in (*call.tensors, *call.outputs)), default=0)
    return pointwise_rule(call) + 2 * widest + 64


def cross_entropy_backward_rule(call: Call) -> int:
    """`binary_cross_entropy_backward`: the mean divides by a number."""
    if call["reduction"] != 1:
        return 0
    return 8 + (call.outputs[0].itemsize if call.outputs[0].dtype != torch.float64 else 0)


def ctc_backward_rule(call: Call) -> int:
    """Probabilities along the alignments, backwards."""
    return nbytes_of(call["log_alpha"])


def embedding_bag_outputs(call: Call) -> dict[int, int]:
    """The bag of each index has room for one more."""
    return {1: 8 * (call["indices"].numel() + 1)} if call["mode"] != 0 else {}


def embedding_bag_rule(call: Call) -> int:
    """Bound: rows of a bag are counted, or weighted."""
    indices, bags = call["indices"], call["offsets"].shape[0]
    return 0 if call["mode"] == 0 and _strided_nbytes(*call.tensors) == 0 else nbytes_of(indices, 8) + 16 * bags + 64


def embedding_bag_weights_rule(call: Call) -> int:
    """Offsets and indices in one dtype; the bag of each index twice, where the forward did not return it."""
    indices, offsets = call["indices"], call["offsets"]
    itemsize = max(indices.itemsize, offsets.itemsize)
    casts = sum(nbytes_of(t, itemsize) for t in (indices, offsets) if t.itemsize != itemsize)
    if call["offset2bag"].numel() or not indices.numel():
        return casts
    num_places = indices.numel() + 1
    return casts + itemsize * (num_places + max(num_places, offsets.numel()))


def embedding_renorm_rule(call: Call) -> int:
    """Bound: of one row at a time its norm, and the factor that it is scaled by."""
    return contiguous_copy_nbytes(call["indices"]) + 8 + 2 * call["self"].itemsize


def embedding_bag_backward_rule(call: Call) -> int:
    """Bound: indices are sorted and counted; for the largest of a bag, its rows are looked up and spread."""
    grad = call["grad"]
    if call["mode"] == 2:
        return nbytes_of(grad) + nbytes_of(grad, 8) + 8 * grad.shape[0] + 64
    return 4 * nbytes_of(call["indices"], 8) + nbytes_of(grad) + 64


def _points_nbytes(call: Call) -> tuple[list[int], int]:
    """Bytes of both operands of `cdist` in batches of one shape, and of those of them that are copies."""
    points = call["x1"], call["x2"]
    batch = torch.broadcast_shapes(*(t.shape[:-2] for t in points))
    whole = [math.prod(batch) * math.prod(t.shape[-2:]) * t.itemsize for t in points]
    is_copy = [t.shape[:-2] != batch or not t.is_contiguous() for t in points]
    return whole, sum(nbytes for nbytes, copied in zip(whole, is_copy, strict=True) if copied)


def distance_rule(call: Call) -> int:
    """Copies in one batch; Euclidean distances of many points by a matrix product of points with squares appended."""
    whole, copies = _points_nbytes(call)
    rows = call["x1"].shape[-2], call["x2"].shape[-2]
    by_product = call.arguments.get("p", 2.0) == 2.0 and call.arguments.get("compute_mode", 1) != 2
    far = max(rows) > 25 or call.arguments.get("compute_mode", 1) == 1
    if not (by_product and far):
        return copies
    points = call["x1"], call["x2"]
    batch = torch.broadcast_shapes(*(t.shape[:-2] for t in points))
    squares = 4 * points[0].itemsize * math.prod(batch) * max(rows)
    return copies + 2 * sum(whole) + squares + 16


def distance_backward_rule(call: Call) -> int:
    """Copies of operands in one batch, and of distances and their gradients in rows."""
    _, copies = _points_nbytes(call)
    return copies + _strided_nbytes(call["grad"], call["cdist"])


def weight_norm_rule(call: Call) -> int:
    """Over the last dimension, a row of sums per thread."""
    direction, dim = call["v"], call["dim"]
    return 4 * call.num_threads * direction.shape[dim] if dim else 0


def weight_norm_backward_rule(call: Call) -> int:
    """Over the last dimension, a row of sums per thread, and three at least."""
    direction, dim = call["saved_v"], call["dim"]
    return 4 * max(3, call.num_threads) * direction.shape[dim] if dim else 0
