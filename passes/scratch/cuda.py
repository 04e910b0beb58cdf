"""Bytes that an ATen operator allocates inside on a CUDA device beyond its outputs: upper bounds from shapes alone.

Matrix products take nothing of their own: cuBLAS works in a workspace that torch keeps (`passes.cuda_memory`). Views
take nothing, nor do elementwise operators: `TensorIterator.cpp` casts while it loads on CUDA devices. The others are
listed here with rules from `scratch.cuda_rules`, read off ATen's CUDA sources; they wait to be checked by measuring.
As on the CPU, what stands for an operator that nobody looked at (`is_known_on_cuda`) is a guess, and users may declare
it (`scratch.declared.declare_scratch`), as they may any whose rule they know to be wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from chunkc.passes.cuda_memory import rounded_nbytes
from chunkc.passes.scratch import cuda_rules as rules
from chunkc.passes.scratch.cuda_rules import Call
from chunkc.passes.scratch.declared import declared_nbytes, guessed_nbytes, is_declared
from chunkc.passes.scratch.rules import is_view

Rule = Callable[[Call], list[int]]


def cuda_scratch_nbytes(
    target: torch._ops.OpOverload,
    args: tuple,
    kwargs: dict[str, Any],
    outputs: object,
    num_threads: int = 1,
) -> int:
    """Upper bound of the bytes that `target` holds inside while it runs on a CUDA device, beyond its outputs.

    Args:
        args, kwargs, outputs: as the operator takes and returns them; of tensors, also fake ones, only sizes, strides
            and dtypes are read.
        num_threads: for declared functions.
    """
    declared = declared_nbytes(target, args, kwargs, outputs, num_threads)
    if declared is not None:
        return rounded_nbytes(declared)
    rule = _rule(target)
    parts = guessed_nbytes(args, kwargs, outputs) if rule is None else rule(Call(target, args, kwargs, outputs))
    return sum(map(rounded_nbytes, parts))


def cuda_output_nbytes(
    target: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any], outputs: object
) -> dict[int, int]:
    """Position among the returned tensors -> bytes of its storage on a CUDA device, where a fake tensor does not tell.
    What is not on the device takes none."""
    corrected = _OUTPUTS.get(target._schema.name)
    found = {} if corrected is None else corrected(Call(target, args, kwargs, outputs))
    return {position: rounded_nbytes(nbytes) for position, nbytes in found.items()}


def corrects_cuda_outputs(target: torch._ops.OpOverload) -> bool:
    """Whether `cuda_output_nbytes` may say something of `target`."""
    return target._schema.name in _OUTPUTS


def is_known_on_cuda(target: torch._ops.OpOverload) -> bool:
    """Whether somebody has said how much `target` takes; else `cuda_scratch_nbytes` is a guess."""
    return is_declared(target) or _rule(target) is not None


def _rule(target: torch._ops.OpOverload) -> Rule | None:
    name = target._schema.name.removeprefix("aten::")
    if not name.endswith("__"):
        name = name.removesuffix("_")
    if name in _RULES:
        return _RULES[name]
    if is_view(target) or target.namespace == "prims" or torch.Tag.pointwise in target.tags:
        return rules.nothing
    return None


def _names(rule: Rule, names: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


_RULES: dict[str, Rule] = {
    **_names(
        rules.nothing,
        """mm addmm bmm baddbmm addbmm mv addmv addr dot vdot cat stack clone copy _to_copy contiguous empty empty_like
        empty_strided empty_permuted full full_like fill zero zeros zeros_like ones ones_like new_empty
        new_empty_strided new_full new_zeros new_ones arange linspace logspace scalar_tensor eye tril triu tril_indices
        triu_indices embedding index_select gather rand randn randint randint_like rand_like randn_like bernoulli
        uniform normal exponential geometric cauchy log_normal native_dropout native_dropout_backward constant_pad_nd
        slice_scatter select_scatter diagonal_scatter as_strided_scatter slice_backward select_backward
        diagonal_backward unfold_backward resize resize_as _unsafe_view lift_fresh_copy expand_copy permute_copy
        view_copy t_copy transpose_copy squeeze_copy unsqueeze_copy alias_copy as_strided_copy diagonal_copy unfold_copy
        unbind_copy split_with_sizes_copy unsafe_split diag_embed flip rot90 roll repeat where masked_fill trace complex
        _assert_async _assert_scalar _assert_tensor_metadata _functional_assert_async _functional_assert_scalar
        _functional_sym_constrain_range _functional_sym_constrain_range_for_size _make_dep_token sym_constrain_range
        sym_constrain_range_for_size polar take linalg_cross floor_divide rsub mse_loss_backward huber_loss_backward
        smooth_l1_loss_backward
        log_sigmoid_backward elu_backward glu glu_backward hardshrink_backward hardsigmoid_backward hardswish
        hardswish_backward hardtanh_backward leaky_relu_backward mish_backward softplus_backward softshrink_backward
        _prelu_kernel _prelu_kernel_backward grid_sampler_2d grid_sampler_2d_backward grid_sampler_3d
        grid_sampler_3d_backward _local_scalar_dense leaky_relu transformers::grouped_mm_fallback
        transformers::grouped_mm_fallback_backward""",
    ),
    **_names(
        rules.contiguous,
        """_softmax _softmax_backward_data _log_softmax _log_softmax_backward_data _safe_softmax native_layer_norm
        _fused_rms_norm nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward gelu_backward
        native_group_norm max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward
        avg_pool3d avg_pool3d_backward max_pool3d_with_indices max_pool3d_with_indices_backward _adaptive_avg_pool2d
        _adaptive_avg_pool2d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward adaptive_max_pool2d
        adaptive_max_pool2d_backward adaptive_max_pool3d adaptive_max_pool3d_backward max_unpool2d max_unpool3d
        reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d
        reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward replication_pad1d_backward
        replication_pad2d_backward replication_pad3d_backward upsample_nearest1d upsample_nearest2d upsample_nearest3d
        _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d
        upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa
        upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward
        _upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward _upsample_nearest_exact3d_backward
        upsample_linear1d_backward upsample_bilinear2d_backward upsample_trilinear3d_backward
        upsample_bicubic2d_backward _upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward pixel_shuffle
        pixel_unshuffle channel_shuffle im2col col2im bucketize searchsorted scatter scatter_add scatter_reduce
        index_copy index_fill log_sigmoid_forward binary_cross_entropy_backward soft_margin_loss_backward""",
    ),
    **_names(
        rules.reduction,
        """sum mean prod all any amax amin aminmax argmax argmin max min var std var_mean std_mean norm
        linalg_vector_norm nansum count_nonzero histc""",
    ),
    **_names(
        rules.loss,
        """mse_loss huber_loss smooth_l1_loss soft_margin_loss binary_cross_entropy binary_cross_entropy_with_logits
        logsumexp""",
    ),
    **_names(rules.layer_norm_backward, "native_layer_norm_backward _fused_rms_norm_backward"),
    **_names(rules.group_norm_backward, "native_group_norm_backward"),
    **_names(
        rules.batch_norm,
        """native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional
        _native_batch_norm_legit_no_training _batch_norm_with_update _batch_norm_with_update_functional
        native_batch_norm_backward batch_norm_backward""",
    ),
    **_names(rules.cudnn_batch_norm, "cudnn_batch_norm cudnn_batch_norm_backward"),
    **_names(rules.embedding_backward, "embedding_dense_backward"),
    **_names(rules.index, "index _unsafe_index _unsafe_masked_index"),
    **_names(
        rules.index_put,
        "index_put _unsafe_index_put _index_put_impl index_add _unsafe_masked_index_put_accumulate",
    ),
    **_names(rules.sort, "sort topk kthvalue median nanmedian mode"),
    **_names(rules.sample, "multinomial"),
    **_names(rules.permutation, "randperm"),
    **_names(rules.scan, "cumsum cumprod logcumsumexp cummax cummin"),
    **_names(rules.masked_scatter, "masked_scatter"),
    **_names(rules.grouped_product, "_grouped_mm"),
    **_names(rules.convolution, "convolution convolution_backward cudnn_convolution"),
    **_names(rules.flash_forward, "_scaled_dot_product_flash_attention"),
    **_names(rules.flash_backward, "_scaled_dot_product_flash_attention_backward"),
    **_names(rules.efficient_forward, "_scaled_dot_product_efficient_attention _efficient_attention_forward"),
    **_names(
        rules.efficient_backward, "_scaled_dot_product_efficient_attention_backward _efficient_attention_backward"
    ),
    **_names(rules.cudnn_forward, "_scaled_dot_product_cudnn_attention"),
    **_names(rules.cudnn_backward, "_scaled_dot_product_cudnn_attention_backward"),
}

_OUTPUTS: dict[str, Callable[[Call], dict[int, int]]] = {
    "aten::_scaled_dot_product_efficient_attention": rules.efficient_outputs,
    "aten::col2im": rules.col2im_outputs,
    "aten::uniform": rules.uniform_outputs,
}
