"""A table of operators' scratch memory: one record for each, with its rules on the CPU and on CUDA devices.

To add an operator: name it where its rules are the same as others', or give it a line of its own. Tests hold each to
its record, on the CPU and on the GPU made of RAM.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch

from chunkc.passes.memory.scratch import (
    cuda_attention,
    cuda_indexing,
    cuda_rules,
    cuda_sorting,
    decompositions,
    exceptions,
    fourier,
    images,
    indexing,
    linear_algebra,
    norms,
    random_numbers,
    reductions,
    rules,
)
from chunkc.passes.memory.scratch.bounds import Bound
from chunkc.passes.memory.scratch.copies import LOW_PRECISION
from chunkc.passes.memory.scratch.exceptions import BEYOND_OPERATORS, Inexact


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

    cpu: Callable[[rules.Call], int] | None = None
    cuda: Callable[[cuda_rules.Call], list[int]] | None = None
    outputs: Callable[[rules.Call], dict[int, int]] | None = None
    cuda_outputs: Callable[[cuda_rules.Call], dict[int, int]] | None = None
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

_GROUPS: tuple[tuple[Operator, str], ...] = (
    # --- copies, elementwise operators, products, attention, convolutions ---
    (
        Operator(rules.nothing_rule, cuda_rules.nothing),
        """
        masked_fill linalg_cross grid_sampler_3d grid_sampler_3d_backward rot90
        flip rand_like randn_like diagonal_copy _local_scalar_dense
        _prelu_kernel _prelu_kernel_backward _unsafe_view addr alias_copy arange as_strided_copy
        as_strided_scatter cauchy complex constant_pad_nd diag_embed diagonal_backward diagonal_scatter
        _assert_async _assert_scalar _assert_tensor_metadata _functional_assert_async _functional_assert_scalar
        _functional_sym_constrain_range _functional_sym_constrain_range_for_size _make_dep_token
        sym_constrain_range sym_constrain_range_for_size elu_backward empty empty_like empty_permuted
        empty_strided expand_copy exponential eye fill full full_like geometric glu glu_backward
        grid_sampler_2d hardshrink_backward hardsigmoid_backward hardswish hardswish_backward hardtanh_backward
        leaky_relu leaky_relu_backward linspace log_normal logspace mish_backward new_empty new_empty_strided
        new_full new_ones new_zeros ones ones_like permute_copy polar rand randint randint_like randn resize
        resize_as scalar_tensor select_backward select_scatter slice_backward slice_scatter softplus_backward
        softshrink_backward split_with_sizes_copy squeeze_copy stack t_copy take trace transpose_copy
        tril_indices triu_indices unbind_copy unfold_copy unsafe_split unsqueeze_copy view_copy zero zeros
        zeros_like
        """,
    ),
    (Operator(rules.nothing_rule, cuda_rules.nothing), "squeeze transpose unsqueeze t swapaxes swapdims as_strided"),
    (Operator(rules.nothing_rule, cuda_sorting.bounded_sort), "mode"),
    (Operator(rules.nothing_rule, cuda_sorting.topk), "topk"),
    (Operator(rules.nothing_rule, cuda_indexing.index_add), "index_copy"),
    (Operator(rules.nothing_rule, cuda_rules.contiguous), "index_fill"),
    (Operator(rules.shuffle_rule, cuda_rules.contiguous), "channel_shuffle"),
    (
        Operator(rules.nothing_rule),
        """
        _efficientzerotensor _pdist_forward _pdist_backward _conj_physical
        linalg_lu_factor_ex
        _logcumsumexp _standard_gamma_grad _dirichlet_grad
        block_diag _reshape_alias put normal_functional random poisson _standard_gamma binomial
        rrelu_with_noise_backward prims::iota prims::convert_element_type prims::rev prims::where
        prims::device_put prims::normal prims::cat prims::empty_strided prims::empty_permuted prims::full_like
        prims::scalar_tensor prims::clone prims::inductor_seed prims::inductor_seeds
        prims::inductor_lookup_seed prims::inductor_random prims::inductor_randint
        prims::inductor_force_stride_order
        """,
    ),
    (
        Operator(
            rules.col2im_rule,
            cuda_rules.col2im,
            outputs=rules.col2im_outputs,
            cuda_outputs=cuda_rules.col2im_outputs,
        ),
        "col2im",
    ),
    (Operator(rules.unfold_backward_rule, cuda_rules.unfold_backward), "unfold_backward"),
    (Operator(reductions.count_nonzero_rule, cuda_rules.count_nonzero), "count_nonzero"),
    (
        Operator(
            rules.nothing_rule,
            cuda_rules.nothing,
            outputs=random_numbers.uniform_outputs,
            cuda_outputs=cuda_rules.uniform_outputs,
        ),
        "uniform",
    ),
    (Operator(rules.scan_rule, cuda_sorting.scan), "logcumsumexp cumsum cumprod cummax cummin"),
    (Operator(rules.contiguous_rule, cuda_rules.contiguous), "log_sigmoid_forward"),
    (Operator(indexing.search_rule, cuda_indexing.search), "bucketize searchsorted"),
    (
        Operator(rules.contiguous_rule),
        """
        multi_margin_loss multi_margin_loss_backward fractional_max_pool2d fractional_max_pool3d
        _segment_reduce_backward
        """,
    ),
    (
        Operator(Bound(copies=4, positions=5, transposes=True), inexact=exceptions.REPEATED),
        "isin _unique _unique2 unique_dim unique_consecutive",
    ),
    (Operator(indexing.masked_select_rule, inexact=exceptions.SELECTED), "masked_select"),
    (Operator(indexing.nonzero_static_rule, inexact=exceptions.SELECTED), "nonzero_static"),
    (Operator(indexing.to_sparse_rule, inexact=exceptions.SELECTED), "_to_sparse"),
    (Operator(indexing.sparse_mask_rule, inexact=exceptions.SELECTED), "sparse_mask"),
    (Operator(rules.sampled_product_rule, inexact=exceptions.SELECTED), "sparse_sampled_addmm"),
    (
        Operator(reductions.histograms_rule, inexact=exceptions.STEPS),
        "histogram _histogramdd_from_bin_cts _histogramdd_from_bin_tensors",
    ),
    (Operator(reductions.bin_edges_rule), "_histogramdd_bin_edges"),
    (Operator(rules.sparse_reduction_rule), "_sparse_mm_reduce_impl"),
    (Operator(rules.sparse_reduction_backward_rule, inexact=exceptions.STEPS), "_sparse_mm_reduce_impl_backward"),
    (Operator(indexing.closeness_rule, inexact=exceptions.STEPS), "allclose"),
    (
        Operator(rules.pointwise_rule, cuda_rules.nothing),
        "rsub floor_divide mse_loss_backward huber_loss_backward smooth_l1_loss_backward log_sigmoid_backward",
    ),
    (
        Operator(rules.pointwise_rule),
        """
        polygamma prims::abs prims::acos prims::acosh prims::add prims::asin prims::asinh prims::atan prims::atan2
        prims::atanh prims::bessel_i0 prims::bessel_i1 prims::bessel_j0 prims::bessel_j1 prims::bitwise_and
        prims::bitwise_not prims::bitwise_or prims::bitwise_xor prims::cbrt prims::ceil prims::conj_physical
        prims::cos prims::cosh prims::digamma prims::div prims::eq prims::erf prims::erf_inv prims::erfc
        prims::erfcx prims::exp prims::exp2 prims::expm1 prims::floor prims::fmax prims::fmin prims::fmod
        prims::frexp prims::gcd prims::ge prims::gt prims::hypot prims::igamma prims::igammac prims::imag
        prims::isfinite prims::le prims::lgamma prims::log prims::log10 prims::log1p prims::log2 prims::lt
        prims::maximum prims::minimum prims::mul prims::ndtri prims::ne prims::neg prims::nextafter prims::pow
        prims::real prims::reciprocal prims::remainder prims::round prims::rsqrt prims::shift_left
        prims::shift_right_arithmetic prims::sign prims::signbit prims::sin prims::sinh
        prims::spherical_bessel_j0 prims::sqrt prims::sub prims::tan prims::tanh prims::trunc prims::zeta
        """,
    ),
    (Operator(rules.copy_rule, cuda_rules.nothing), "clone copy _to_copy contiguous lift_fresh_copy"),
    (Operator(rules.triangle_rule, cuda_rules.nothing), "tril triu"),
    (Operator(rules.log_gamma_rule, cuda_rules.log_gamma), "mvlgamma"),
    (Operator(rules.distance_rule, cuda_rules.difference), "dist"),
    (Operator(rules.narrow_copy_rule, cuda_rules.nothing), "narrow_copy"),
    (Operator(rules.select_rule, cuda_rules.where), "where"),
    (Operator(rules.scaled_rule), "deg2rad rad2deg"),
    (
        Operator(rules.matrix_product_rule, cuda_rules.product, inexact=exceptions.PRODUCT),
        "mm addmm bmm baddbmm addbmm mv addmv dot vdot",
    ),
    (Operator(rules.matrix_product_rule, cuda_rules.grouped_product, inexact=exceptions.PRODUCT), "_grouped_mm"),
    (Operator(rules.ldexp_rule, cuda_rules.ldexp), "ldexp"),
    (Operator(rules.concatenation_rule, cuda_rules.nothing), "cat"),
    (Operator(rules.roll_rule, cuda_rules.roll), "roll"),
    (Operator(rules.gelu_backward_rule, cuda_rules.contiguous), "gelu_backward"),
    (Operator(rules.isinf_rule, cuda_rules.is_finite), "isinf"),
    (Operator(rules.fma_rule, cuda_rules.result_once), "prims::fma"),
    (Operator(rules.sort_rule, cuda_sorting.sort), "sort"),
    (Operator(rules.dropout_rule, cuda_rules.nothing), "native_dropout"),
    (Operator(rules.dropout_backward_rule, cuda_rules.nothing), "native_dropout_backward"),
    (Operator(rules.attention_rule, inexact=exceptions.PRODUCT), "_scaled_dot_product_flash_attention_for_cpu"),
    (
        Operator(rules.attention_backward_rule, inexact=exceptions.ATTENTION),
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    ),
    (Operator(rules.convolution_rule, cuda_rules.convolution, inexact=exceptions.CONVOLUTION), "convolution"),
    (
        Operator(rules.convolution_backward_rule, cuda_rules.convolution, inexact=exceptions.CONVOLUTION),
        "convolution_backward",
    ),
    (Operator(rules.repeat_rule, cuda_rules.nothing), "repeat"),
    (
        Operator(rules.grouped_fallback_rule, cuda_rules.nothing, inexact=exceptions.PRODUCT),
        "transformers::grouped_mm_fallback transformers::grouped_mm_fallback_backward",
    ),
    # --- reductions ---
    (Operator(reductions.sum_rule, cuda_rules.reduction), "sum"),
    (Operator(reductions.truth_rule, cuda_rules.reduction), "any all"),
    (Operator(reductions.extreme_rule, cuda_rules.reduction), "amax amin aminmax"),
    (Operator(reductions.extreme_with_index_rule, cuda_rules.reduction), "max min argmax argmin"),
    (Operator(reductions.variance_rule, cuda_rules.reduction), "var std var_mean std_mean"),
    (Operator(reductions.norm_rule, cuda_rules.reduction), "norm linalg_vector_norm"),
    (Operator(reductions.median_rule, cuda_sorting.median), "median nanmedian"),
    (Operator(reductions.mean_rule, cuda_rules.reduction), "mean"),
    (Operator(reductions.prod_rule, cuda_rules.reduction), "prod nansum"),
    (Operator(reductions.kthvalue_rule, cuda_sorting.median), "kthvalue"),
    (Operator(reductions.renorm_rule), "renorm"),
    (Operator(reductions.logsumexp_rule, cuda_rules.loss), "logsumexp"),
    (Operator(reductions.histogram_rule, cuda_rules.histogram), "histc"),
    (Operator(reductions.segments_rule), "segment_reduce"),
    # --- norms, softmax, losses ---
    (
        Operator(norms.joint_contiguous_rule, cuda_rules.contiguous),
        "_softmax _log_softmax _log_softmax_backward_data pixel_shuffle pixel_unshuffle",
    ),
    (Operator(norms.joint_contiguous_rule, cuda_rules.softmax_backward), "_softmax_backward_data"),
    (Operator(norms.joint_contiguous_rule, cuda_indexing.embedding_backward), "embedding_dense_backward"),
    (Operator(norms.nll_loss_rule, cuda_rules.contiguous), "nll_loss_forward nll_loss2d_forward"),
    (Operator(norms.nll_loss_backward_rule, cuda_rules.contiguous), "nll_loss_backward nll_loss2d_backward"),
    (
        Operator(norms.embedding_bag_rule, outputs=norms.embedding_bag_outputs, inexact=exceptions.STEPS),
        "_embedding_bag _embedding_bag_forward_only",
    ),
    (
        Operator(norms.embedding_bag_backward_rule, inexact=exceptions.STEPS),
        "_embedding_bag_backward _embedding_bag_dense_backward",
    ),
    (Operator(norms.embedding_bag_weights_rule), "_embedding_bag_per_sample_weights_backward"),
    (Operator(norms.embedding_renorm_rule, inexact=exceptions.STEPS), "embedding_renorm"),
    (Operator(linear_algebra.trilinear_rule, inexact=exceptions.PRODUCT), "_trilinear"),
    (Operator(norms.distance_backward_rule, inexact=exceptions.STEPS), "_cdist_backward"),
    (Operator(norms.distance_rule, inexact=exceptions.STEPS), "_cdist_forward _euclidean_dist"),
    (
        Operator(norms.loss_rule, cuda_rules.loss, inexact=exceptions.STEPS),
        """
        mse_loss huber_loss smooth_l1_loss soft_margin_loss binary_cross_entropy
        """,
    ),
    (
        Operator(norms.logits_loss_rule, cuda_rules.logits_loss, inexact=exceptions.STEPS),
        "binary_cross_entropy_with_logits",
    ),
    (
        Operator(norms.chunked_loss_rule, inexact=exceptions.STEPS),
        """
        torch_nn::_linear_cross_entropy_batch_chunked torch_nn::_linear_cross_entropy_batch_chunked_no_reduction
        """,
    ),
    (Operator(norms.loss_rule, cuda_rules.results_twice, inexact=exceptions.STEPS), "soft_margin_loss_backward"),
    (
        Operator(
            norms.batch_norm_rule, cuda_rules.batch_norm, outputs=norms.norm_outputs, inexact=exceptions.STATISTICS
        ),
        """
        native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional _batch_norm_with_update
        _batch_norm_with_update_functional
        """,
    ),
    (
        Operator(norms.batch_norm_rule, cuda_rules.batch_norm, inexact=exceptions.STATISTICS),
        "_native_batch_norm_legit_no_training",
    ),
    (Operator(norms.layer_norm_rule, cuda_rules.contiguous, outputs=norms.norm_outputs), "native_layer_norm"),
    (Operator(norms.group_norm_rule, cuda_rules.group_norm, outputs=norms.norm_outputs), "native_group_norm"),
    (Operator(norms.rms_norm_rule, cuda_rules.contiguous, inexact=exceptions.STEPS), "_fused_rms_norm"),
    (Operator(norms.cross_entropy_backward_rule, cuda_rules.contiguous), "binary_cross_entropy_backward"),
    (Operator(norms.ctc_rule), "_ctc_loss"),
    (Operator(norms.ctc_backward_rule), "_ctc_loss_backward"),
    (Operator(norms.weight_norm_rule), "_weight_norm_interface"),
    (Operator(norms.weight_norm_backward_rule), "_weight_norm_interface_backward"),
    (Operator(norms.safe_softmax_rule, cuda_rules.safe_softmax), "_safe_softmax"),
    (Operator(norms.layer_norm_backward_rule, cuda_rules.layer_norm_backward), "native_layer_norm_backward"),
    (
        Operator(norms.group_norm_backward_rule, cuda_rules.group_norm, outputs=norms.group_norm_backward_outputs),
        "native_group_norm_backward",
    ),
    (Operator(norms.batch_norm_backward_rule, cuda_rules.batch_norm_backward), "native_batch_norm_backward"),
    # --- indexing ---
    (Operator(indexing.scatter_rule, cuda_indexing.scatter), "scatter scatter_add"),
    (Operator(indexing.scatter_reduce_rule, cuda_indexing.scatter), "scatter_reduce"),
    (Operator(indexing.index_reduce_rule, cuda_indexing.index_reduce), "index_reduce"),
    (Operator(indexing.index_select_rule, cuda_rules.nothing), "index_select"),
    (Operator(indexing.bincount_rule), "bincount"),
    (Operator(indexing.index_add_rule, cuda_indexing.index_add), "index_add"),
    (Operator(indexing.masked_scatter_rule, cuda_sorting.masked_scatter), "masked_scatter"),
    (Operator(indexing.masked_scatter_backward_rule, inexact=exceptions.SELECTED), "masked_scatter_backward"),
    (Operator(indexing.embedding_rule, cuda_indexing.embedding), "embedding"),
    (Operator(indexing.gather_rule, cuda_indexing.gather), "gather"),
    (Operator(indexing.index_rule, cuda_indexing.index), "index _unsafe_index"),
    (Operator(indexing.index_rule, cuda_indexing.index_put), "index_put _unsafe_index_put"),
    (Operator(indexing.masked_index_rule, cuda_indexing.masked_index, inexact=exceptions.MASK), "_unsafe_masked_index"),
    (
        Operator(indexing.masked_index_rule, cuda_indexing.masked_index, inexact=exceptions.MASK),
        "_unsafe_masked_index_put_accumulate",
    ),
    # --- images ---
    (
        Operator(images.image_rule, cuda_rules.contiguous),
        """
        _adaptive_avg_pool2d _adaptive_avg_pool3d avg_pool2d avg_pool3d
        max_pool2d_with_indices max_pool3d_with_indices max_unpool2d max_unpool3d reflection_pad1d
        reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d
        """,
    ),
    (Operator(images.image_rule, cuda_rules.pooled), "adaptive_max_pool2d adaptive_max_pool3d"),
    (
        Operator(images.image_backward_rule, cuda_rules.contiguous),
        """
        _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward adaptive_max_pool2d_backward
        adaptive_max_pool3d_backward avg_pool2d_backward avg_pool3d_backward max_pool2d_with_indices_backward
        max_pool3d_with_indices_backward reflection_pad1d_backward reflection_pad2d_backward
        reflection_pad3d_backward replication_pad1d_backward replication_pad2d_backward
        replication_pad3d_backward
        """,
    ),
    (
        Operator(images.upsample_rule, cuda_rules.contiguous),
        """
        upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d
        _upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
        upsample_trilinear3d upsample_bicubic2d
        """,
    ),
    (
        Operator(images.upsample_backward_rule, cuda_rules.contiguous),
        """
        upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward
        _upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward
        _upsample_nearest_exact3d_backward upsample_linear1d_backward upsample_bilinear2d_backward
        upsample_trilinear3d_backward upsample_bicubic2d_backward _upsample_bilinear2d_aa_backward
        _upsample_bicubic2d_aa_backward
        """,
    ),
    (
        Operator(images.upsample_smooth_rule, cuda_rules.pooled, inexact=exceptions.STEPS),
        "_upsample_bilinear2d_aa _upsample_bicubic2d_aa",
    ),
    (
        Operator(images.window_rule, outputs=images.window_outputs, inexact=exceptions.STEPS),
        "hann_window hamming_window bartlett_window blackman_window",
    ),
    (
        Operator(images.pooling_offsets_rule, cuda_rules.pooling_offsets, inexact=exceptions.MASK),
        "prims::_low_memory_max_pool_with_offsets prims::_low_memory_max_pool_offsets_to_indices",
    ),
    (Operator(images.sampler_backward_rule, cuda_rules.nothing), "grid_sampler_2d_backward"),
    (Operator(images.fractional_backward_rule), "fractional_max_pool2d_backward fractional_max_pool3d_backward"),
    (Operator(images.unfold_rule, cuda_rules.im2col), "im2col"),
    (Operator(images.affine_grid_rule, inexact=exceptions.PRODUCT), "affine_grid_generator"),
    # --- random numbers ---
    (Operator(random_numbers.permutation_rule, cuda_sorting.permutation), "randperm"),
    (Operator(random_numbers.multinomial_rule, cuda_sorting.sample), "multinomial"),
    (Operator(random_numbers.normal_rule, cuda_rules.normal), "normal"),
    (Operator(rules.nothing_rule, cuda_rules.bernoulli), "bernoulli"),
    (Operator(random_numbers.randomised_relu_rule), "rrelu_with_noise"),
    (Operator(random_numbers.functional_randomised_relu_rule), "rrelu_with_noise_functional"),
    # --- linear algebra ---
    (Operator(decompositions.determinant_rule, inexact=exceptions.LAPACK), "_linalg_det _linalg_slogdet"),
    (Operator(Bound(rows=2), inexact=exceptions.LAPACK), "_linalg_solve_ex"),
    (Operator(Bound(), inexact=exceptions.LAPACK), "cholesky_inverse triangular_solve"),
    (Operator(Bound(strided=1), inexact=exceptions.LAPACK), "linalg_cholesky_ex"),
    (Operator(decompositions.cholesky_rule, inexact=exceptions.LAPACK), "cholesky"),
    (Operator(decompositions.solve_triangular_rule, inexact=exceptions.LAPACK), "linalg_solve_triangular"),
    (Operator(decompositions.lu_unpack_rule, inexact=exceptions.LAPACK), "lu_unpack"),
    (Operator(Bound(by_columns=True, rows=2), inexact=exceptions.LAPACK), "linalg_lu_solve"),
    (
        Operator(Bound(copies=1, transposes=True, rows=24), inexact=exceptions.LAPACK),
        "cholesky_solve linalg_inv_ex linalg_lu",
    ),
    (Operator(Bound(copies=4, rows=32), inexact=exceptions.LAPACK), "linalg_pinv"),
    (Operator(Bound(copies=1, transposes=True, work=8), inexact=exceptions.LAPACK), "_linalg_svd"),
    (Operator(decompositions.eigh_rule, inexact=exceptions.LAPACK), "_linalg_eigh"),
    (Operator(decompositions.geqrf_rule, inexact=exceptions.LAPACK), "geqrf"),
    (Operator(decompositions.householder_rule, inexact=exceptions.LAPACK), "linalg_householder_product"),
    (Operator(decompositions.qr_rule, inexact=exceptions.LAPACK), "linalg_qr"),
    (Operator(decompositions.ormqr_rule, inexact=exceptions.LAPACK), "ormqr"),
    (Operator(Bound(strided=1, work=72), inexact=exceptions.LAPACK), "linalg_ldl_factor_ex"),
    (Operator(Bound(copies=2, rows=16, work=396), inexact=exceptions.LAPACK), "linalg_eig"),
    (Operator(Bound(copies=1, rows=16, work=40), inexact=exceptions.LAPACK), "_linalg_eigvals linalg_eigvals"),
    (Operator(Bound(copies=2, rows=32, work=300, numbers=600), inexact=exceptions.LAPACK), "linalg_lstsq"),
    (Operator(linear_algebra.matrix_exp_rule, inexact=exceptions.POWERS), "linalg_matrix_exp"),
    (Operator(linear_algebra.check_rule, cuda_rules.check), "_linalg_check_errors"),
    (Operator(fourier.transform_rule), "_fft_r2c _fft_c2c"),
    (Operator(Bound(copies=2, transposes=True), inexact=exceptions.FOURIER), "_fft_c2r"),
    # --- elementwise operators on the CPU, which take more on CUDA devices ---
    (Operator(cuda=cuda_rules.is_finite), "isfinite"),
    # --- collectives of a model: on gloo, and on NCCL, which writes straight to where results are to be ---
    (
        Operator(rules.contiguous_result_rule, cuda_rules.nothing),
        "_c10d_functional::all_reduce _c10d_functional::broadcast",
    ),
    (Operator(rules.gathered_rule, cuda_rules.nothing), "_c10d_functional::all_gather_into_tensor"),
    (Operator(rules.reduced_rule, cuda_rules.nothing), "_c10d_functional::reduce_scatter_tensor"),
    (
        Operator(rules.nothing_rule, cuda_rules.nothing),
        "_c10d_functional::all_to_all_single _c10d_functional::wait_tensor",
    ),
    (Operator(cuda=cuda_rules.clamp), "clamp clamp_min clamp_max"),
    (Operator(cuda=cuda_rules.one_number), "pow"),
    (Operator(cuda=cuda_rules.magnitude), "abs angle"),
    # --- operators that only CUDA devices have ---
    (Operator(cuda=cuda_rules.layer_norm_backward), "_fused_rms_norm_backward"),
    (Operator(cuda=cuda_rules.batch_norm_backward), "batch_norm_backward"),
    (Operator(cuda=cuda_rules.cudnn_batch_norm), "cudnn_batch_norm cudnn_batch_norm_backward"),
    (Operator(cuda=cuda_indexing.index_put), "_index_put_impl"),
    (Operator(cuda=cuda_rules.convolution), "cudnn_convolution"),
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
)
"""Operators with one record; `aten::` is left out of their names."""

OPERATORS = {name if "::" in name else f"aten::{name}": record for record, names in _GROUPS for name in names.split()}

EXCEPTIONS = {name: record.inexact for name, record in OPERATORS.items() if record.inexact is not None}
"""Operators with scratch on the CPU that is only bounded, and why."""
