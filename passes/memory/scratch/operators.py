"""A table of operators' scratch memory: one record for each, with its rules on the CPU and on CUDA devices.

To add an operator: name it where its rules are the same as others', or give it a line of its own. Tests hold each to
its record, on the CPU and on the GPU made of RAM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import torch

from chunkc.passes.memory.scratch import (
    bounds,
    cuda_attention,
    cuda_indexing,
    cuda_sorting,
    images,
    indexing,
    norms,
    reductions,
    rules,
)
from chunkc.passes.memory.scratch import cuda_rules as cuda
from chunkc.passes.memory.scratch.bounds import Bound
from chunkc.passes.memory.scratch.copies import LOW_PRECISION
from chunkc.passes.memory.scratch.exceptions import (
    ATTENTION,
    BEYOND_OPERATORS,
    CONVOLUTION,
    LAPACK,
    MASK,
    POWERS,
    PRODUCT,
    RARE,
    REPEATED,
    SELECTED,
    STATISTICS,
    STEPS,
    Inexact,
)


@dataclass(frozen=True)
class Operator:
    """The record of an operator.

    Attributes:
        cpu: how many bytes it takes inside on the CPU; None: only what holds for every view or elementwise operator.
        cuda: the same on a CUDA device, by tensor, and an upper bound.
        outputs: of results that take other bytes than their fake tensors: returned position -> bytes.
        cuda_outputs: the same on a CUDA device.
        inexact: why `cpu` is no more than an upper bound; None: it is exact to the byte.
    """

    cpu: rules.Rule | None = None
    cuda: rules.Rule | None = None
    outputs: Callable[[rules.Call], dict[int, int]] | None = None
    cuda_outputs: Callable[[rules.Call], dict[int, int]] | None = None
    inexact: Inexact | None = None


@cache
def find(target: torch._ops.OpOverload) -> Operator:
    """Return the record of an operator, or an empty one.

    An operator that works in place (`add_`) has the record of the other (`add`), without `outputs`: its result is the
    caller's tensor.
    """
    name = target._schema.name
    found = OPERATORS.get(_out_of_place(name), _UNKNOWN)
    return found if _out_of_place(name) == name else replace(found, outputs=None, cuda_outputs=None)


def _out_of_place(name: str) -> str:
    """Return the operator that has the record of `name`: the one out of place, if `name` works in place."""
    in_place = name.endswith("_") and not name.endswith("__") and name[:-1] in OPERATORS
    return name[:-1] if in_place else name


def is_exact(name: str, dtype: torch.dtype) -> bool:
    """Whether the operator `name` ("namespace::op") is predicted to the byte for operands of `dtype`.

    For tests, which hold every operator to what this says of it.
    """
    found = EXCEPTIONS.get(_out_of_place(name))
    return found is None or (found.only_low_precision and dtype not in LOW_PRECISION)


def table_of_exceptions() -> str:
    """Write the exceptions as a Markdown table."""
    rows: dict[Inexact, list[str]] = {}
    for name, found in EXCEPTIONS.items():
        rows.setdefault(found, []).append(f"`{name.removeprefix('aten::')}`")
    lines = ["| what | when | why | predicted instead |", "|---|---|---|---|"]
    lines += [f"| {', '.join(names)} | {e.when} | {e.reason} | {e.bound} |" for e, names in rows.items()]
    lines += [f"| around a graph | {e.when} | {e.reason} | {e.bound} |" for e in BEYOND_OPERATORS]
    return "\n".join(lines)


_UNKNOWN = Operator()

_HISTOGRAM = Operator(Bound(copies=1, strided=1, results=2, thread_results=1), inexact=RARE)

_GROUPS: tuple[tuple[Operator, str], ...] = (
    # --- nothing on either ---
    (
        Operator(rules.nothing, rules.nothing),
        """
        _assert_async _assert_scalar _assert_tensor_metadata _functional_assert_async _functional_assert_scalar
        _functional_sym_constrain_range _functional_sym_constrain_range_for_size _local_scalar_dense _make_dep_token
        _prelu_kernel _prelu_kernel_backward _unsafe_view addr alias_copy arange as_strided as_strided_copy
        as_strided_scatter cauchy complex constant_pad_nd diag_embed diagonal_backward diagonal_copy diagonal_scatter
        elu_backward empty empty_like empty_permuted empty_strided expand_copy exponential eye fill flip full full_like
        geometric glu glu_backward grid_sampler_2d grid_sampler_3d grid_sampler_3d_backward hardshrink_backward
        hardsigmoid_backward hardswish hardswish_backward hardtanh_backward leaky_relu leaky_relu_backward linalg_cross
        linspace log_normal logspace masked_fill mish_backward new_empty new_empty_strided new_full new_ones new_zeros
        ones ones_like permute_copy polar rand rand_like randint randint_like randn randn_like resize resize_as rot90
        scalar_tensor select_backward select_scatter slice_backward slice_scatter softplus_backward
        softshrink_backward split_with_sizes_copy squeeze squeeze_copy stack swapaxes swapdims sym_constrain_range
        sym_constrain_range_for_size t t_copy take trace transpose transpose_copy tril_indices triu_indices unbind_copy
        unfold_copy unsafe_split unsqueeze unsqueeze_copy view_copy zero zeros zeros_like
        _c10d_functional:: all_to_all_single wait_tensor
        """,
    ),
    (
        Operator(rules.nothing),
        """
        _conj_physical _dirichlet_grad _efficientzerotensor _logcumsumexp _pdist_backward _pdist_forward _reshape_alias
        _standard_gamma _standard_gamma_grad binomial block_diag linalg_lu_factor_ex normal_functional poisson put
        random rrelu_with_noise_backward
        prims:: iota convert_element_type rev where device_put normal cat empty_strided empty_permuted full_like
        scalar_tensor clone inductor_seed inductor_seeds inductor_lookup_seed inductor_random inductor_randint
        inductor_force_stride_order
        """,
    ),
    (Operator(rules.nothing, rules.nothing, rules.dense_results, rules.dense_results), "uniform"),
    # --- elementwise: what torch does not tag so, and what takes more on CUDA devices ---
    (
        Operator(rules.pointwise, rules.nothing),
        "rsub floor_divide mse_loss_backward huber_loss_backward smooth_l1_loss_backward log_sigmoid_backward",
    ),
    (
        Operator(rules.pointwise),
        """
        polygamma
        prims:: abs acos acosh add asin asinh atan atan2 atanh bessel_i0 bessel_i1 bessel_j0 bessel_j1 bitwise_and
        bitwise_not bitwise_or bitwise_xor cbrt ceil conj_physical cos cosh digamma div eq erf erf_inv erfc erfcx exp
        exp2 expm1 floor fmax fmin fmod frexp gcd ge gt hypot igamma igammac imag isfinite le lgamma log log10 log1p
        log2 lt maximum minimum mul ndtri ne neg nextafter pow real reciprocal remainder round rsqrt shift_left
        shift_right_arithmetic sign signbit sin sinh spherical_bessel_j0 sqrt sub tan tanh trunc zeta
        """,
    ),
    (Operator(cuda=rules.is_finite), "isfinite"),
    (Operator(rules.is_finite, rules.is_finite), "isinf"),
    (Operator(cuda=rules.cast), "clamp clamp_min clamp_max"),
    (Operator(cuda=cuda.one_number), "pow"),
    (Operator(cuda=cuda.magnitude), "abs angle"),
    (Operator(rules.select, cuda.where), "where"),
    (Operator(rules.scaled), "deg2rad rad2deg"),
    (Operator(rules.gelu_backward, rules.contiguous), "gelu_backward"),
    (Operator(rules.results, rules.results), "prims::fma"),
    (Operator(rules.log_gamma, rules.log_gamma, inexact=RARE), "mvlgamma"),
    (Operator(rules.power, rules.power, inexact=RARE), "ldexp"),
    # --- copies ---
    (Operator(rules.copy, rules.nothing), "clone copy _to_copy contiguous lift_fresh_copy"),
    (Operator(rules.concatenation, rules.nothing), "cat"),
    (Operator(rules.repeat, rules.nothing), "repeat"),
    (Operator(rules.roll, rules.roll), "roll"),
    (Operator(rules.triangle, rules.nothing, inexact=RARE), "tril triu"),
    (Operator(rules.fold, rules.fold, rules.fold_outputs, rules.fold_outputs), "col2im"),
    (Operator(rules.unfold, rules.unfold), "im2col"),
    (Operator(rules.unfold_backward, rules.unfold_backward), "unfold_backward"),
    # --- products, attention, convolutions ---
    (Operator(rules.matrix_product, cuda.product, inexact=PRODUCT), "mm addmm bmm baddbmm addbmm mv addmv dot vdot"),
    (Operator(rules.matrix_product, cuda.grouped_product, inexact=PRODUCT), "_grouped_mm"),
    (
        Operator(rules.grouped_fallback, rules.nothing, inexact=PRODUCT),
        "transformers:: grouped_mm_fallback grouped_mm_fallback_backward",
    ),
    (Operator(bounds.trilinear, inexact=PRODUCT), "_trilinear"),
    (
        Operator(rules.sparse_product, inexact=RARE),
        "sparse_sampled_addmm _sparse_mm_reduce_impl _sparse_mm_reduce_impl_backward",
    ),
    (Operator(rules.attention, inexact=PRODUCT), "_scaled_dot_product_flash_attention_for_cpu"),
    (Operator(rules.attention_backward, inexact=ATTENTION), "_scaled_dot_product_flash_attention_for_cpu_backward"),
    (Operator(cuda=cuda_attention.flash_forward), "_scaled_dot_product_flash_attention"),
    (Operator(cuda=cuda_attention.flash_backward), "_scaled_dot_product_flash_attention_backward"),
    (
        Operator(cuda=cuda_attention.efficient_forward, cuda_outputs=cuda_attention.efficient_outputs),
        "_scaled_dot_product_efficient_attention",
    ),
    (Operator(cuda=cuda_attention.efficient_forward), "_efficient_attention_forward"),
    (
        Operator(cuda=cuda_attention.efficient_backward),
        "_scaled_dot_product_efficient_attention_backward _efficient_attention_backward",
    ),
    (Operator(cuda=cuda_attention.cudnn_forward), "_scaled_dot_product_cudnn_attention"),
    (Operator(cuda=cuda_attention.cudnn_backward), "_scaled_dot_product_cudnn_attention_backward"),
    (Operator(rules.convolution, cuda.convolution, inexact=CONVOLUTION), "convolution"),
    (Operator(rules.convolution_backward, cuda.convolution, inexact=CONVOLUTION), "convolution_backward"),
    (Operator(cuda=cuda.convolution), "cudnn_convolution"),
    # --- reductions, scans, sorts ---
    (Operator(reductions.total, cuda.reduction), "sum"),
    (Operator(reductions.truth, cuda.reduction), "any all"),
    (Operator(reductions.extreme, cuda.reduction), "amax amin aminmax"),
    (Operator(reductions.extreme_with_index, cuda.reduction), "max min argmax argmin"),
    (Operator(reductions.variance, cuda.reduction), "var std var_mean std_mean"),
    (Operator(reductions.norm, cuda.reduction), "norm linalg_vector_norm"),
    (Operator(reductions.mean, cuda.reduction), "mean"),
    (Operator(reductions.prod, cuda.reduction), "prod nansum"),
    (Operator(reductions.logsumexp, cuda.loss), "logsumexp"),
    (Operator(reductions.count_nonzero, cuda.count_nonzero), "count_nonzero"),
    (Operator(Bound(together=4), cuda.difference, inexact=RARE), "dist"),
    (Operator(Bound(together=4), inexact=RARE), "allclose"),
    (Operator(Bound(copies=2, positions=1), cuda_sorting.median, inexact=RARE), "median nanmedian kthvalue"),
    (Operator(Bound(copies=5), inexact=RARE), "renorm"),
    (replace(_HISTOGRAM, cuda=cuda.histogram), "histc"),
    (_HISTOGRAM, "histogram _histogramdd_bin_edges _histogramdd_from_bin_cts _histogramdd_from_bin_tensors"),
    (Operator(Bound(strided=1, integers=2), inexact=RARE), "segment_reduce _segment_reduce_backward"),
    (Operator(rules.cast, cuda_sorting.scan), "logcumsumexp cumsum cumprod cummax cummin"),
    (Operator(rules.sort, cuda_sorting.sort), "sort"),
    (Operator(rules.nothing, cuda_sorting.topk), "topk"),
    (Operator(rules.nothing, cuda_sorting.bounded_sort), "mode"),
    (Operator(Bound(copies=5, positions=5), inexact=REPEATED), "isin _unique _unique2 unique_dim unique_consecutive"),
    # --- norms, softmax, dropout, losses ---
    (
        Operator(norms.batch_norm, cuda.batch_norm, norms.norm_outputs, inexact=STATISTICS),
        """
        native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional _batch_norm_with_update
        _batch_norm_with_update_functional
        """,
    ),
    (Operator(norms.batch_norm, cuda.batch_norm, inexact=STATISTICS), "_native_batch_norm_legit_no_training"),
    (Operator(norms.batch_norm_backward, cuda.batch_norm_backward), "native_batch_norm_backward"),
    (Operator(cuda=cuda.batch_norm_backward), "batch_norm_backward"),
    (Operator(cuda=cuda.cudnn_batch_norm), "cudnn_batch_norm cudnn_batch_norm_backward"),
    (Operator(norms.layer_norm, rules.contiguous, norms.norm_outputs), "native_layer_norm"),
    (Operator(norms.layer_norm_backward, cuda.layer_norm_backward), "native_layer_norm_backward"),
    (Operator(norms.group_norm, cuda.group_norm, norms.norm_outputs), "native_group_norm"),
    (
        Operator(norms.group_norm_backward, cuda.group_norm, norms.group_norm_backward_outputs),
        "native_group_norm_backward",
    ),
    (Operator(norms.rms_norm, rules.contiguous, inexact=STEPS), "_fused_rms_norm"),
    (Operator(cuda=cuda.layer_norm_backward), "_fused_rms_norm_backward"),
    (Operator(norms.weight_norm), "_weight_norm_interface _weight_norm_interface_backward"),
    (
        Operator(rules.contiguous, rules.contiguous),
        "_softmax _log_softmax _log_softmax_backward_data log_sigmoid_forward pixel_shuffle pixel_unshuffle",
    ),
    (Operator(rules.contiguous, cuda.softmax_backward), "_softmax_backward_data"),
    (Operator(norms.safe_softmax, cuda.safe_softmax), "_safe_softmax"),
    (Operator(rules.dropout, rules.nothing), "native_dropout"),
    (Operator(rules.dropout_backward, rules.nothing), "native_dropout_backward"),
    (Operator(norms.nll_loss, rules.contiguous), "nll_loss_forward nll_loss2d_forward"),
    (Operator(norms.nll_loss_backward, rules.contiguous), "nll_loss_backward nll_loss2d_backward"),
    (
        Operator(Bound(broadcast=3, casts=2), cuda.loss, inexact=RARE),
        "mse_loss huber_loss smooth_l1_loss soft_margin_loss binary_cross_entropy",
    ),
    (Operator(Bound(broadcast=2, casts=1), cuda.results_twice, inexact=STEPS), "soft_margin_loss_backward"),
    (Operator(norms.logits_loss, cuda.logits_loss, inexact=STEPS), "binary_cross_entropy_with_logits"),
    (Operator(norms.cross_entropy_backward, rules.contiguous), "binary_cross_entropy_backward"),
    (
        Operator(norms.chunked_loss, inexact=STEPS),
        "torch_nn:: _linear_cross_entropy_batch_chunked _linear_cross_entropy_batch_chunked_no_reduction",
    ),
    (Operator(Bound(integers=1), inexact=RARE), "_ctc_loss"),
    (Operator(Bound(copies=1, integers=1), inexact=RARE), "_ctc_loss_backward"),
    (Operator(norms.point_distances, inexact=RARE), "_cdist_forward _cdist_backward _euclidean_dist"),
    # --- indexing ---
    (Operator(indexing.embedding, indexing.embedding), "embedding"),
    (Operator(rules.contiguous, cuda_indexing.embedding_backward), "embedding_dense_backward"),
    (
        Operator(Bound(strided=1, sums=2, integers=3), outputs=norms.embedding_bag_outputs, inexact=RARE),
        "_embedding_bag _embedding_bag_forward_only",
    ),
    (
        Operator(Bound(strided=1, operands=1, integers=4), inexact=RARE),
        "_embedding_bag_backward _embedding_bag_dense_backward _embedding_bag_per_sample_weights_backward",
    ),
    (Operator(Bound(strided=1), inexact=RARE), "embedding_renorm"),
    (Operator(indexing.gather, cuda_indexing.gather), "gather"),
    (Operator(indexing.gather, cuda_indexing.scatter), "scatter scatter_add"),
    (Operator(indexing.scatter_reduce, cuda_indexing.scatter), "scatter_reduce"),
    (Operator(indexing.index, cuda_indexing.index), "index _unsafe_index"),
    (Operator(indexing.index, cuda_indexing.index_put), "index_put _unsafe_index_put"),
    (Operator(cuda=cuda_indexing.index_put), "_index_put_impl"),
    (Operator(indexing.index_select, rules.nothing), "index_select"),
    (Operator(indexing.index_add, cuda_indexing.index_add), "index_add"),
    (Operator(rules.nothing, cuda_indexing.index_add), "index_copy"),
    (Operator(rules.nothing, rules.contiguous), "index_fill"),
    (Operator(indexing.index_reduce, cuda_indexing.index_reduce, inexact=RARE), "index_reduce"),
    (
        Operator(indexing.masked_index, cuda_indexing.masked_index, inexact=MASK),
        "_unsafe_masked_index _unsafe_masked_index_put_accumulate",
    ),
    (Operator(indexing.masked_scatter, cuda_sorting.masked_scatter), "masked_scatter"),
    (Operator(Bound(copies=2, results=1, positions=2), inexact=SELECTED), "masked_scatter_backward"),
    (Operator(Bound(together=4), inexact=SELECTED), "masked_select"),
    (Operator(indexing.sparse, inexact=SELECTED), "nonzero_static _to_sparse sparse_mask"),
    (Operator(Bound(strided=1, positions=2), inexact=RARE), "bincount"),
    (Operator(indexing.search, cuda_indexing.search, inexact=RARE), "bucketize searchsorted"),
    # --- images ---
    (
        Operator(images.pooled, rules.contiguous),
        """
        _adaptive_avg_pool2d _adaptive_avg_pool3d avg_pool2d avg_pool3d max_pool2d_with_indices max_pool3d_with_indices
        channel_shuffle max_unpool2d max_unpool3d reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d
        replication_pad2d replication_pad3d
        """,
    ),
    (Operator(images.pooled, cuda.pooled), "adaptive_max_pool2d adaptive_max_pool3d"),
    (
        Operator(images.image_backward, rules.contiguous),
        """
        _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward adaptive_max_pool2d_backward
        adaptive_max_pool3d_backward avg_pool2d_backward avg_pool3d_backward max_pool2d_with_indices_backward
        max_pool3d_with_indices_backward reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward
        replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward
        """,
    ),
    (
        Operator(images.upsample, rules.contiguous),
        """
        upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d
        _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d
        """,
    ),
    (
        Operator(images.upsample_backward, rules.contiguous),
        """
        upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward
        _upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward _upsample_nearest_exact3d_backward
        upsample_linear1d_backward upsample_bilinear2d_backward upsample_trilinear3d_backward
        upsample_bicubic2d_backward _upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward
        """,
    ),
    (Operator(images.upsample_smooth, cuda.pooled, inexact=STEPS), "_upsample_bilinear2d_aa _upsample_bicubic2d_aa"),
    (
        Operator(images.pooling_offsets, images.pooling_offsets, inexact=MASK),
        "prims:: _low_memory_max_pool_with_offsets _low_memory_max_pool_offsets_to_indices",
    ),
    (Operator(rules.contiguous), "multi_margin_loss multi_margin_loss_backward"),
    (Operator(rules.contiguous), "fractional_max_pool2d fractional_max_pool3d"),
    (Operator(rules.contiguous, inexact=RARE), "fractional_max_pool2d_backward fractional_max_pool3d_backward"),
    (Operator(rules.contiguous, rules.nothing, inexact=RARE), "narrow_copy grid_sampler_2d_backward"),
    (Operator(images.affine_grid, inexact=RARE), "affine_grid_generator"),
    (
        Operator(Bound(results=4), outputs=images.window_outputs, inexact=RARE),
        "hann_window hamming_window bartlett_window blackman_window",
    ),
    # --- random numbers ---
    (Operator(Bound(), cuda_sorting.permutation, inexact=RARE), "randperm"),
    (Operator(Bound(copies=2, strided=1, results=1, rows=9), cuda_sorting.sample, inexact=RARE), "multinomial"),
    (Operator(Bound(strided=1, together=1, casts=1), cuda.normal, inexact=RARE), "normal"),
    (Operator(rules.nothing, cuda.bernoulli), "bernoulli"),
    (Operator(Bound(strided=2), inexact=RARE), "rrelu_with_noise rrelu_with_noise_functional"),
    # --- linear algebra ---
    (Operator(Bound(rows=24), inexact=LAPACK), "_linalg_det _linalg_slogdet _linalg_solve_ex"),
    (Operator(Bound(copies=1), inexact=LAPACK), "cholesky_inverse triangular_solve linalg_cholesky_ex cholesky"),
    (Operator(Bound(copies=1, rows=9), inexact=LAPACK), "linalg_solve_triangular lu_unpack"),
    (Operator(Bound(copies=2, rows=24), inexact=LAPACK), "cholesky_solve linalg_inv_ex linalg_lu linalg_lu_solve"),
    (Operator(Bound(copies=4, rows=32), inexact=LAPACK), "linalg_pinv"),
    (Operator(Bound(copies=1, work=2, blocks=97), inexact=LAPACK), "geqrf linalg_householder_product"),
    (Operator(Bound(copies=3, work=2, blocks=97), inexact=LAPACK), "linalg_qr"),
    (Operator(Bound(copies=1, work=2, blocks=550), inexact=LAPACK), "ormqr"),
    (Operator(Bound(copies=2, work=8), inexact=LAPACK), "_linalg_svd"),
    (Operator(Bound(copies=2, work=40), inexact=LAPACK), "_linalg_eigh"),
    (Operator(Bound(copies=1, work=72), inexact=LAPACK), "linalg_ldl_factor_ex"),
    (Operator(Bound(copies=2, rows=16, work=396), inexact=LAPACK), "linalg_eig"),
    (Operator(Bound(copies=1, rows=16, work=40), inexact=LAPACK), "_linalg_eigvals linalg_eigvals"),
    (Operator(Bound(copies=2, rows=32, work=330, blocks=150, numbers=600), inexact=LAPACK), "linalg_lstsq"),
    (Operator(bounds.matrix_powers, inexact=POWERS), "linalg_matrix_exp"),
    (Operator(Bound(positions=1), cuda.check, inexact=RARE), "_linalg_check_errors"),
    (Operator(bounds.transform), "_fft_r2c _fft_c2c"),
    (Operator(bounds.transform, inexact=RARE), "_fft_c2r"),
    # --- collectives: Gloo's on the CPU; NCCL writes straight to where results are to be ---
    (Operator(rules.contiguous_result, rules.nothing), "_c10d_functional:: all_reduce broadcast"),
    (Operator(rules.results, rules.nothing), "_c10d_functional::all_gather_into_tensor"),
    (Operator(rules.operands, rules.nothing), "_c10d_functional::reduce_scatter_tensor"),
)
"""Records with the operators that have them. A word that ends in `::` is the namespace of those behind it; else it is
`aten::`."""


def _names(words: str) -> Iterator[str]:
    namespace = "aten::"
    for word in words.split():
        if word.endswith("::"):
            namespace = word
        else:
            yield word if "::" in word else f"{namespace}{word}"


OPERATORS = {name: record for record, words in _GROUPS for name in _names(words)}

EXCEPTIONS = {name: record.inexact for name, record in OPERATORS.items() if record.inexact is not None}
"""Operators with scratch on the CPU that is only bounded, and why."""
