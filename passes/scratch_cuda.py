"""Bytes that an ATen operator allocates inside on a CUDA device beyond its outputs: upper bounds from shapes alone.

Matrix products take nothing of their own: cuBLAS works in a workspace that torch keeps (`passes.cuda_memory`). What
is listed here was read off ATen's CUDA sources of PyTorch 2.11 to 2.13, by the file named at each rule; it waits to
be checked by measuring. Where no rule is known the bound is a guess: as much again as all operands and results.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from chunkc.passes.cuda_memory import rounded_nbytes

MAX_SPLITS = 128
"""FlashAttention splits keys into at most so many parts (`num_splits_heuristic`, `flash_api.cpp`)."""

_ROWS_MULTIPLE = 128
_MIB = 1 << 20


class Call:
    """One call of an operator: its tensors in the order of its arguments, by name, and its results."""

    def __init__(self, target: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any], outputs: object) -> None:
        names = [argument.name for argument in target._schema.arguments]
        self.arguments: dict[str, Any] = dict(zip(names, args)) | kwargs
        self.inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self.outputs = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]

    def tensor(self, name: str) -> Tensor:
        value = self.arguments[name]
        assert isinstance(value, Tensor), f"{name} is no tensor"
        return value


def cuda_scratch_nbytes(target: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any], outputs: object) -> int:
    """Upper bound of the bytes that `target` holds inside while it runs on a CUDA device, beyond its outputs.

    Args:
        args, kwargs, outputs: as the operator takes and returns them; of tensors, also fake ones, only sizes, strides
            and dtypes are read.
    """
    call = Call(target, args, kwargs, outputs)
    return sum(rounded_nbytes(nbytes) for nbytes in _rule(target)(call))


def is_known(target: torch._ops.OpOverload) -> bool:
    """Whether `target` has a rule that was read off its source; otherwise `cuda_scratch_nbytes` guesses."""
    return _rule(target) is not _guess


Rule = Callable[[Call], list[int]]


def _rule(target: torch._ops.OpOverload) -> Rule:
    name = target._schema.name.removeprefix("aten::")
    if not name.endswith("__"):
        name = name.removesuffix("_")
    if name in _RULES:
        return _RULES[name]
    returns = target._schema.returns
    is_view = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    if is_view or target.namespace == "prims":
        return _nothing
    return _casts if torch.Tag.pointwise in target.tags else _guess


def _nothing(call: Call) -> list[int]:
    return []


def _casts(call: Call) -> list[int]:
    """TensorIterator casts while it loads on CUDA devices, except of operands on other devices: it copies nothing."""
    return []


def _guess(call: Call) -> list[int]:
    return [_MIB, *(_nbytes(tensor) for tensor in (*call.inputs, *call.outputs))]


def _reduction(call: Call) -> list[int]:
    """`Reduce.cuh`: a buffer of partial results and semaphores where a reduction is split over blocks.

    Partial results are one accumulator (at most 8 bytes; 16 for an index beside a value) per output and block; blocks
    that share an output are no more than 65,536 bytes of input each would need.
    """
    numel_in = max((tensor.numel() for tensor in call.inputs), default=0)
    numel_out = max((tensor.numel() for tensor in call.outputs), default=0)
    blocks_per_output = max(1, min(1024, numel_in // max(1, numel_out) // 16))
    contiguous = [_nbytes(tensor) for tensor in call.inputs if not _is_dense(tensor)]
    return [16 * numel_out * blocks_per_output, 4 * numel_out, *contiguous]


def _contiguous(call: Call) -> list[int]:
    """Contiguous copies of operands that are not, as softmax, norms and losses make them."""
    return [_nbytes(tensor) for tensor in call.inputs if not tensor.is_contiguous()]


def _layer_norm_backward(call: Call) -> list[int]:
    """`layer_norm_kernel.cu`: partial sums of gamma and beta in up to 64 rows, in the accumulator's type."""
    width = max((tensor.numel() for tensor in call.outputs[1:]), default=0)
    return [*_contiguous(call), *(4 * 64 * width for _ in range(2))]


def _embedding_backward(call: Call) -> list[int]:
    """`Embedding.cu`, `EmbeddingBackwardKernel.cu`: sorted indices with their origins, counts, and CUB's scratch;
    partial sums per segment of equal indices, in fp32."""
    indices, grad = call.tensor("indices"), call.tensor("grad_output")
    num = indices.numel()
    width = grad.shape[-1] if grad.dim() else 1
    sorting = [8 * num] * 8 + [_MIB]
    segments = min(num, num // 10 + max((tensor.shape[0] for tensor in call.outputs), default=0) + 1)
    return [*sorting, 4 * segments * width, *_contiguous(call)]


def _index(call: Call) -> list[int]:
    """`Indexing.cu`, `index_put_with_sort_kernel`: linear indices, sorted, with their origins, and CUB's scratch."""
    indices = [leaf for leaf in tree_leaves(call.arguments.get("indices")) if isinstance(leaf, Tensor)]
    numel = prod(torch.broadcast_shapes(*(tensor.shape for tensor in indices))) if indices else 0
    return [8 * numel] * (8 + len(indices)) + [_MIB] + _contiguous(call)


def _sort(call: Call) -> list[int]:
    """`Sort.cpp`, `SortStable.cu`: values and int64 indices once more, doubled by CUB's segmented sort."""
    numel = max(tensor.numel() for tensor in call.inputs)
    itemsize = max(tensor.itemsize for tensor in call.inputs)
    return [numel * (itemsize + 8)] * 3 + [_MIB]


def _scan(call: Call) -> list[int]:
    """`ScanUtils.cuh`: a contiguous copy, and CUB's scratch for one row."""
    return [*_contiguous(call), _MIB]


def _convolution(call: Call) -> list[int]:
    """cuDNN takes what its heuristic likes best; torch limits it to nothing. Copies to channels-last are bounded by all
    operands, the workspace by `Conv_v8.cpp`'s own tries: 1 GiB on devices of 40 GiB or more."""
    return [*_guess(call), 1 << 30]


def _rows(tensor: Tensor, dim: int) -> int:
    return -(-tensor.shape[dim] // _ROWS_MULTIPLE) * _ROWS_MULTIPLE


def _padded_operands(call: Call, names: tuple[str, ...], multiple: int = 8) -> list[int]:
    """Copies of operands whose last dimension is padded, or whose strides a kernel does not take."""
    found = []
    for name in names:
        value = call.arguments.get(name)
        if isinstance(value, Tensor):
            width = value.shape[-1]
            found.append(value.numel() // max(1, width) * (-(-width // multiple) * multiple) * value.itemsize)
    return found


def _flash_forward(call: Call) -> list[int]:
    """`flash_attn/flash_api.cpp`, `mha_fwd`: copies of operands with an odd head size, the padded output, and where
    keys are split, fp32 partial outputs and their log-sum-exps per split. It splits only where batch, heads and blocks
    of queries leave multiprocessors idle, so all splits together are no more than two waves of blocks."""
    query = call.tensor("query")
    batch, heads, _, width = query.shape
    blocks = batch * heads * (_rows(query, 2) // 64)
    splits = min(MAX_SPLITS, max(1, 2 * _MULTIPROCESSORS // max(1, blocks)))
    partial = [] if splits == 1 else [splits * batch * heads * _rows(query, 2) * (_padded(width) + 1) * 4]
    copies = _padded_operands(call, ("query", "key", "value")) if width % 8 or not _last_dense(call) else []
    return [*copies, *(copies[:1]), *partial, 64]


def _flash_backward(call: Call) -> list[int]:
    """`mha_bwd`: fp32 sums of the query's gradient (once per block of keys where deterministic), row sums of
    `grad * out`, gradients of keys and values per query head where heads are shared, and copies as in the forward."""
    query, key = call.tensor("query"), call.tensor("key")
    batch, heads, _, width = query.shape
    deterministic = torch.are_deterministic_algorithms_enabled()
    copies_of_sum = max(1, -(-key.shape[2] // 64)) if deterministic else 1
    dq_sum = copies_of_sum * batch * heads * _rows(query, 2) * _padded(width) * 4
    row_sums = batch * heads * _rows(query, 2) * 4
    expanded = 2 * batch * heads * key.shape[2] * _padded(width) * key.itemsize if key.shape[1] != heads else 0
    names = ("grad_out", "query", "key", "value", "out")
    copies = _padded_operands(call, names) if width % 8 or not _last_dense(call) else [_nbytes(call.tensor("grad_out"))]
    return [dq_sum, row_sums, expanded, *copies, *copies[1:4], 64]


def _efficient_forward(call: Call) -> list[int]:
    """`mem_eff_attention/kernel_forward.h`: an fp32 accumulator of the output where the value's width exceeds what a
    block keeps in registers; a bias is padded to a multiple of 16."""
    query = call.tensor("query")
    value = call.arguments.get("value")
    width = value.shape[-1] if isinstance(value, Tensor) else query.shape[-1]
    return [4 * (query.numel() // max(1, query.shape[-1])) * width, *_padded_bias(call), 64]


def _efficient_backward(call: Call) -> list[int]:
    """`mem_eff_attention/kernel_backward.h`: `delta` per row, and a workspace of fp32 gradients of query, key and
    value, each padded to blocks of 128."""
    sums = [4 * _padded_numel(call.tensor(name)) for name in ("query", "key", "value")]
    delta = 4 * call.tensor("query").numel() // max(1, call.tensor("query").shape[-1])
    gradient = call.arguments.get("grad_out_", call.arguments.get("grad_out"))
    copy = [_nbytes(gradient)] if isinstance(gradient, Tensor) else []
    return [*sums, delta, *copy, *_padded_bias(call), 64]


def _cudnn_forward(call: Call) -> list[int]:
    """`cudnn/MHA.cpp`: the graph's own workspace, of which the frontend says only that it is small in the forward."""
    return [32 * _MIB, *_contiguous(call)]


def _cudnn_backward(call: Call) -> list[int]:
    """`cudnn/MHA.cpp`: a workspace with fp32 sums of the query's gradient and row sums."""
    query = call.tensor("query")
    rows = query.numel() // max(1, query.shape[-1])
    return [32 * _MIB, 4 * _padded_numel(query), 8 * rows, *_padded_operands(call, ("grad_out", "out"))]


def _padded_bias(call: Call) -> list[int]:
    bias = call.arguments.get("attn_bias", call.arguments.get("bias"))
    if not isinstance(bias, Tensor):
        return []
    width = bias.shape[-1]
    return [bias.numel() // max(1, width) * (width + 16) * bias.itemsize]


def _padded_numel(tensor: Tensor) -> int:
    return prod(tensor.shape[:-2]) * _rows(tensor, -2) * _padded(tensor.shape[-1])


def _padded(width: int) -> int:
    """A head size as FlashAttention rounds it: to 32, or to 64 above 128."""
    multiple = 32 if width <= 128 else 64
    return -(-width // multiple) * multiple


def _last_dense(call: Call) -> bool:
    return all(call.tensor(name).stride(-1) == 1 for name in ("query", "key", "value"))


def _is_dense(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() <= tensor.nbytes + tensor.storage_offset() * tensor.itemsize


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize


_MULTIPROCESSORS = 160
"""More than any device has that these kernels know (H100: 132, B200: 148)."""


def _names(rule: Rule, names: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


_RULES: dict[str, Rule] = {
    **_names(
        _nothing,
        """mm addmm bmm baddbmm mv addmv dot vdot cat stack clone copy _to_copy contiguous empty empty_like
        empty_strided empty_permuted full full_like fill zero zeros zeros_like ones ones_like new_empty
        new_empty_strided new_full new_zeros new_ones arange scalar_tensor eye tril triu embedding index_select gather
        rand randn randint randint_like rand_like randn_like bernoulli native_dropout native_dropout_backward
        constant_pad_nd slice_scatter select_scatter slice_backward select_backward resize _unsafe_view lift_fresh_copy
        expand_copy permute_copy view_copy flip roll repeat where masked_fill""",
    ),
    **_names(
        _contiguous,
        """_softmax _softmax_backward_data _log_softmax _log_softmax_backward_data _safe_softmax native_layer_norm
        nll_loss_forward nll_loss_backward gelu_backward native_group_norm max_pool2d_with_indices
        max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward scatter scatter_add index_copy index_fill""",
    ),
    **_names(
        _reduction,
        """sum mean prod all any amax amin aminmax argmax argmin max min var std var_mean std_mean norm
        linalg_vector_norm logsumexp nansum""",
    ),
    **_names(_layer_norm_backward, "native_layer_norm_backward"),
    **_names(_embedding_backward, "embedding_dense_backward"),
    **_names(_index, "index index_put _unsafe_index _unsafe_index_put index_add"),
    **_names(_sort, "sort topk"),
    **_names(_scan, "cumsum cumprod logcumsumexp cummax cummin"),
    **_names(_convolution, "convolution convolution_backward cudnn_convolution"),
    **_names(_flash_forward, "_scaled_dot_product_flash_attention"),
    **_names(_flash_backward, "_scaled_dot_product_flash_attention_backward"),
    **_names(_efficient_forward, "_scaled_dot_product_efficient_attention _efficient_attention_forward"),
    **_names(_efficient_backward, "_scaled_dot_product_efficient_attention_backward _efficient_attention_backward"),
    **_names(_cudnn_forward, "_scaled_dot_product_cudnn_attention"),
    **_names(_cudnn_backward, "_scaled_dot_product_cudnn_attention_backward"),
}
