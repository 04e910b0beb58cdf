"""Bytes that an ATen operator allocates inside on the CPU beyond its outputs: its scratch.

Operators take temporary memory from torch's allocator while they run: a cast of an operand, a contiguous
copy, an attention kernel's per-thread buffers, a matrix product's packed operands. It is gone when they
return, so no graph shows it, but a memory limit does. `scratch_nbytes` says how much, from sizes, strides
and dtypes alone.

One default rule and declared exceptions. Views, and operators listed as taking nothing, take nothing.
Elementwise operators (torch tags them) take a cast of each operand that is not in the common dtype. The
exceptions are functions in `RULES`, read off ATen's CPU kernels and checked by measuring. All are upper
bounds; those in `EXACT` are exact to the byte.

Where a bound is loose: low-precision matrix products and convolutions run in oneDNN, which picks its blocks
by instruction set, cache and thread count. An operator that `is_known` denies gets a generous guess, not a
bound.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from chunkc.passes.scratch_indexing import (
    embedding_rule,
    gather_rule,
    index_rule,
    masked_index_rule,
    scatter_rule,
)
from chunkc.passes.scratch_rules import (
    Call,
    attention_backward_rule,
    attention_rule,
    batch_norm_backward_rule,
    batch_norm_rule,
    constant_rule,
    contiguous_rule,
    convolution_backward_rule,
    convolution_rule,
    copy_rule,
    dropout_backward_rule,
    dropout_rule,
    group_norm_backward_rule,
    grouped_fallback_rule,
    guess_rule,
    histogram_rule,
    layer_norm_backward_rule,
    logsumexp_rule,
    matrix_product_rule,
    nothing_rule,
    pointwise_rule,
    pointwise_temporaries_rule,
    pooling_offsets_rule,
    reduction_rule,
    safe_softmax_rule,
    scan_rule,
    select_rule,
    sort_rule,
)


def scratch_nbytes(target: torch._ops.OpOverload, args: tuple, kwargs: dict, outputs: object, num_threads: int) -> int:
    """Upper bound of the bytes that `target` holds inside while it runs on the CPU, beyond its outputs.

    Args:
        args, kwargs, outputs: as the operator takes and returns them; of tensors, also fake ones, only sizes,
            strides and dtypes are read.
        num_threads: `torch.get_num_threads()` where it will run.
    """
    tensors = tuple(leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor))
    return _rule(target)(Call(target, _bind(target, args, kwargs), tensors, num_threads))


def is_known(target: torch._ops.OpOverload) -> bool:
    """Whether `target` has a rule that was checked; otherwise `scratch_nbytes` guesses generously."""
    return _rule(target) is not guess_rule


@cache
def _rule(target: torch._ops.OpOverload) -> Callable[[Call], int]:
    name = target._schema.name
    if name.startswith("aten::") and name.endswith("_") and not name.endswith("__") and name[:-1] in RULES:
        name = name[:-1]  # add_ as add
    for key in (str(target), name):
        if key in RULES:
            return RULES[key]
    if _is_view(target):
        return nothing_rule
    return pointwise_rule if torch.Tag.pointwise in target.tags else guess_rule


def _is_view(target: torch._ops.OpOverload) -> bool:
    returns = target._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _bind(target: torch._ops.OpOverload, args: tuple, kwargs: dict) -> dict[str, Any]:
    """Arguments by name, with the schema's defaults for those not given."""
    arguments: dict[str, Any] = {}
    for position, parameter in enumerate(target._schema.arguments):
        if position < len(args) and not parameter.kwarg_only:
            arguments[parameter.name] = args[position]
        elif parameter.name in kwargs:
            arguments[parameter.name] = kwargs[parameter.name]
        else:
            arguments[parameter.name] = parameter.default_value
    return arguments


def _names(namespace: str, names: str) -> tuple[str, ...]:
    return tuple(f"{namespace}::{name}" for name in names.split())


_GROUPS: tuple[tuple[Callable[[Call], int], tuple[str, ...]], ...] = (
    (
        nothing_rule,
        _names(
            "aten",
            """
        _adaptive_avg_pool3d _local_scalar_dense _prelu_kernel _prelu_kernel_backward _unsafe_view
        addr alias_copy arange as_strided_copy as_strided_scatter avg_pool3d bernoulli cat cauchy
        complex constant_pad_nd diag_embed diagonal_backward diagonal_copy diagonal_scatter
        elu_backward empty empty_like empty_permuted empty_strided expand_copy exponential eye fill
        flip full full_like geometric glu glu_backward grid_sampler_2d hardshrink_backward
        hardsigmoid_backward hardswish hardswish_backward hardtanh_backward leaky_relu_backward
        linspace log_normal logspace mish_backward new_empty new_empty_strided new_full new_ones
        new_zeros nonzero nonzero_static normal_ ones ones_like permute_copy polar put rand randint
        randint_like randn randn_like resize resize_as scalar_tensor select_backward select_scatter
        slice_backward slice_scatter softplus_backward softshrink_backward split_with_sizes_copy
        squeeze_copy stack t_copy take topk trace transpose_copy tril_indices triu_indices
        unbind_copy unfold_copy uniform unsafe_split unsqueeze_copy view_copy zero zeros zeros_like""",
        ),
    ),
    (
        contiguous_rule,
        _names(
            "aten",
            """
        _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _log_softmax _log_softmax_backward_data
        _softmax _softmax_backward_data adaptive_max_pool2d adaptive_max_pool3d avg_pool2d
        avg_pool2d_backward avg_pool3d avg_pool3d_backward bucketize embedding_dense_backward
        gelu_backward roll index_select log_sigmoid_backward log_sigmoid_forward
        max_pool2d_with_indices max_pool2d_with_indices_backward max_pool3d_with_indices
        max_pool3d_with_indices_backward max_unpool2d max_unpool3d multi_margin_loss
        multi_margin_loss_backward native_group_norm native_layer_norm nll_loss2d_backward
        nll_loss2d_forward nll_loss_backward nll_loss_forward pixel_shuffle pixel_unshuffle
        reflection_pad1d reflection_pad1d_backward reflection_pad2d reflection_pad2d_backward
        reflection_pad3d reflection_pad3d_backward replication_pad1d replication_pad1d_backward
        replication_pad2d replication_pad2d_backward replication_pad3d replication_pad3d_backward
        searchsorted tril triu""",
        ),
    ),
    (
        pointwise_rule,
        _names("aten", "rsub floor_divide mse_loss_backward huber_loss_backward smooth_l1_loss_backward"),
    ),
    (copy_rule, _names("aten", "clone copy_ copy _to_copy contiguous lift_fresh_copy")),
    (select_rule, _names("aten", "where masked_fill")),
    (
        pointwise_temporaries_rule,
        _names(
            "aten",
            """
        isinf isfinite ldexp deg2rad rad2deg mse_loss huber_loss smooth_l1_loss soft_margin_loss
        soft_margin_loss_backward binary_cross_entropy binary_cross_entropy_backward
        binary_cross_entropy_with_logits""",
        ),
    ),
    (pointwise_temporaries_rule, _names("prims", "fma")),
    (nothing_rule, _names("prims", "iota convert_element_type")),
    (
        reduction_rule,
        _names(
            "aten",
            """
        sum mean nansum prod all any amax amin aminmax argmax argmin max min var std var_mean
        std_mean norm linalg_vector_norm""",
        ),
    ),
    (scan_rule, _names("aten", "cumsum cumprod logcumsumexp cummax cummin")),
    (matrix_product_rule, _names("aten", "mm addmm bmm baddbmm addbmm mv addmv dot vdot _grouped_mm")),
    (scatter_rule, _names("aten", "scatter scatter_add index_add index_copy index_fill")),
    (
        batch_norm_rule,
        _names(
            "aten",
            """
        native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional
        _native_batch_norm_legit_no_training _batch_norm_with_update""",
        ),
    ),
    (
        pooling_offsets_rule,
        _names(
            "prims",
            """
        _low_memory_max_pool_with_offsets _low_memory_max_pool_offsets_to_indices""",
        ),
    ),
)

RULES: dict[str, Callable[[Call], int]] = {name: rule for rule, names in _GROUPS for name in names} | {
    "aten::logsumexp": logsumexp_rule,
    "aten::_safe_softmax": safe_softmax_rule,
    "aten::sort": sort_rule,
    "aten::native_dropout": dropout_rule,
    "aten::native_dropout_backward": dropout_backward_rule,
    "aten::_scaled_dot_product_flash_attention_for_cpu": attention_rule,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": attention_backward_rule,
    "aten::convolution": convolution_rule,
    "aten::convolution_backward": convolution_backward_rule,
    "aten::native_layer_norm_backward": layer_norm_backward_rule,
    "aten::native_group_norm_backward": group_norm_backward_rule,
    "aten::native_batch_norm_backward": batch_norm_backward_rule,
    "aten::embedding": embedding_rule,
    "aten::gather": gather_rule,
    "aten::index": index_rule,
    "aten::_unsafe_index": index_rule,
    "aten::index_put": index_rule,
    "aten::_unsafe_index_put": index_rule,
    "aten::_unsafe_masked_index": masked_index_rule,
    "aten::_unsafe_masked_index_put_accumulate": masked_index_rule,
    "aten::histc": histogram_rule,
    "aten::repeat": constant_rule,
    "transformers::grouped_mm_fallback": grouped_fallback_rule,
    "transformers::grouped_mm_fallback_backward": grouped_fallback_rule,
    "aten::mvlgamma": guess_rule,
}

# Exact to the byte in full precision on contiguous operands; what grows with threads is exact where all work.
EXACT = frozenset(
    _names(
        "aten",
        """
        mm addmm bmm baddbmm clone copy cat embedding embedding_dense_backward native_dropout
        _softmax _log_softmax _softmax_backward_data _log_softmax_backward_data _safe_softmax
        native_layer_norm native_layer_norm_backward native_group_norm_backward cumsum sort
        nll_loss_forward nll_loss_backward gelu_backward _scaled_dot_product_flash_attention_for_cpu""",
    )
)
