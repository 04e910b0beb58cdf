"""The table: which rule says how many scratch bytes an operator takes on the CPU."""

from __future__ import annotations

from collections.abc import Callable

from chunkc.passes.scratch.images import (
    affine_grid_rule,
    image_backward_rule,
    image_rule,
    pooling_offsets_rule,
    unfold_rule,
    upsample_backward_rule,
    upsample_rule,
    upsample_smooth_rule,
    window_outputs,
    window_rule,
)
from chunkc.passes.scratch.indexing import (
    embedding_rule,
    gather_rule,
    index_add_rule,
    index_rule,
    index_select_rule,
    masked_index_rule,
    masked_scatter_backward_rule,
    masked_scatter_rule,
    scatter_reduce_rule,
    scatter_rule,
)
from chunkc.passes.scratch.linear_algebra import (
    copy_and_pivots_rule,
    decomposition_rule,
    matrix_exp_rule,
    pivots_rule,
)
from chunkc.passes.scratch.norms import (
    batch_norm_backward_rule,
    batch_norm_rule,
    cross_entropy_backward_rule,
    ctc_backward_rule,
    distance_rule,
    embedding_bag_backward_rule,
    embedding_bag_outputs,
    embedding_bag_rule,
    group_norm_backward_outputs,
    group_norm_backward_rule,
    group_norm_rule,
    joint_contiguous_rule,
    layer_norm_backward_rule,
    layer_norm_rule,
    loss_rule,
    nll_loss_backward_rule,
    nll_loss_rule,
    norm_outputs,
    rms_norm_rule,
    safe_softmax_rule,
    weight_norm_backward_rule,
    weight_norm_rule,
)
from chunkc.passes.scratch.random_numbers import (
    multinomial_rule,
    normal_rule,
    permutation_rule,
    randomised_relu_rule,
    uniform_outputs,
)
from chunkc.passes.scratch.reductions import (
    extreme_rule,
    extreme_with_index_rule,
    histogram_rule,
    kthvalue_rule,
    logsumexp_rule,
    mean_rule,
    median_rule,
    norm_rule,
    prod_rule,
    renorm_rule,
    sum_rule,
    truth_rule,
    variance_rule,
)
from chunkc.passes.scratch.rules import (
    Call,
    attention_backward_rule,
    attention_rule,
    col2im_outputs,
    concatenation_rule,
    contiguous_rule,
    convolution_backward_rule,
    convolution_rule,
    copy_rule,
    dropout_backward_rule,
    dropout_rule,
    fma_rule,
    gelu_backward_rule,
    grouped_fallback_rule,
    isinf_rule,
    ldexp_rule,
    matrix_product_rule,
    nothing_rule,
    pointwise_rule,
    repeat_rule,
    roll_rule,
    scaled_rule,
    scan_rule,
    select_rule,
    sort_rule,
)


def _names(namespace: str, names: str) -> tuple[str, ...]:
    return tuple(f"{namespace}::{name}" for name in names.split())


_WINDOWS = "hann_window hamming_window bartlett_window blackman_window"

_GROUPS: tuple[tuple[Callable[[Call], int], tuple[str, ...]], ...] = (
    (
        nothing_rule,
        _names(
            "aten",
            """
        masked_fill mode index_copy index_fill index_reduce _cdist_backward _pdist_forward _pdist_backward
        _fft_r2c _fft_c2r _fft_c2c _conj_physical linalg_cholesky_ex linalg_lu_factor_ex linalg_cross grid_sampler_3d
        grid_sampler_2d_backward grid_sampler_3d_backward rot90 channel_shuffle _ctc_loss
        _embedding_bag_per_sample_weights_backward fractional_max_pool2d_backward _logcumsumexp logcumsumexp
        _standard_gamma_grad _dirichlet_grad segment_reduce block_diag tril triu flip unfold_backward col2im polygamma
        rand_like randn_like bernoulli _reshape_alias count_nonzero diagonal_copy isin
        _local_scalar_dense _prelu_kernel _prelu_kernel_backward _unsafe_view
        addr alias_copy arange as_strided_copy as_strided_scatter cauchy
        complex constant_pad_nd diag_embed diagonal_backward diagonal_copy diagonal_scatter
        _assert_async _assert_scalar _assert_tensor_metadata _functional_assert_async _functional_assert_scalar
        _functional_sym_constrain_range _functional_sym_constrain_range_for_size _make_dep_token sym_constrain_range
        sym_constrain_range_for_size
        elu_backward empty empty_like empty_permuted empty_strided expand_copy exponential eye fill
        flip full full_like geometric glu glu_backward grid_sampler_2d hardshrink_backward
        hardsigmoid_backward hardswish hardswish_backward hardtanh_backward leaky_relu leaky_relu_backward
        linspace log_normal logspace mish_backward new_empty new_empty_strided new_full new_ones
        new_zeros normal_ ones ones_like permute_copy polar put rand randint
        randint_like randn randn_like resize resize_as scalar_tensor select_backward select_scatter
        slice_backward slice_scatter softplus_backward softshrink_backward split_with_sizes_copy
        normal_functional random poisson _standard_gamma binomial rrelu_with_noise_backward
        _assert_async _functional_assert_async squeeze_copy stack t_copy take topk trace
        transpose_copy tril_indices triu_indices
        unbind_copy unfold_copy uniform unsafe_split unsqueeze_copy view_copy zero zeros zeros_like""",
        ),
    ),
    (
        contiguous_rule,
        _names(
            "aten",
            """
        bucketize searchsorted log_sigmoid_forward multi_margin_loss multi_margin_loss_backward
        fractional_max_pool2d""",
        ),
    ),
    (
        joint_contiguous_rule,
        _names(
            "aten",
            """
        _softmax _softmax_backward_data _log_softmax _log_softmax_backward_data pixel_shuffle pixel_unshuffle
        embedding_dense_backward""",
        ),
    ),
    (
        image_rule,
        _names(
            "aten",
            """
        _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d avg_pool2d avg_pool3d
        max_pool2d_with_indices max_pool3d_with_indices max_unpool2d max_unpool3d reflection_pad1d reflection_pad2d
        reflection_pad3d replication_pad1d replication_pad2d replication_pad3d""",
        ),
    ),
    (
        image_backward_rule,
        _names(
            "aten",
            """
        _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward adaptive_max_pool2d_backward
        adaptive_max_pool3d_backward avg_pool2d_backward avg_pool3d_backward max_pool2d_with_indices_backward
        max_pool3d_with_indices_backward reflection_pad1d_backward reflection_pad2d_backward
        reflection_pad3d_backward replication_pad1d_backward replication_pad2d_backward
        replication_pad3d_backward""",
        ),
    ),
    (
        upsample_rule,
        _names(
            "aten",
            """
        upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d
        _upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
        upsample_trilinear3d upsample_bicubic2d""",
        ),
    ),
    (
        upsample_backward_rule,
        _names(
            "aten",
            """
        upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward
        _upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward _upsample_nearest_exact3d_backward
        upsample_linear1d_backward upsample_bilinear2d_backward upsample_trilinear3d_backward
        upsample_bicubic2d_backward _upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward""",
        ),
    ),
    (upsample_smooth_rule, _names("aten", "_upsample_bilinear2d_aa _upsample_bicubic2d_aa")),
    (nll_loss_rule, _names("aten", "nll_loss_forward nll_loss2d_forward")),
    (nll_loss_backward_rule, _names("aten", "nll_loss_backward nll_loss2d_backward")),
    (embedding_bag_rule, _names("aten", "_embedding_bag _embedding_bag_forward_only")),
    (embedding_bag_backward_rule, _names("aten", "_embedding_bag_backward _embedding_bag_dense_backward")),
    (distance_rule, _names("aten", "_cdist_forward _euclidean_dist")),
    (
        copy_and_pivots_rule,
        _names("aten", "linalg_inv_ex linalg_solve_triangular linalg_lu_solve triangular_solve cholesky_solve"),
    ),
    (pivots_rule, _names("aten", "_linalg_det _linalg_slogdet _linalg_solve_ex")),
    (decomposition_rule, _names("aten", "linalg_qr _linalg_svd _linalg_eigh")),
    (window_rule, _names("aten", _WINDOWS)),
    (matrix_exp_rule, _names("aten", "linalg_matrix_exp")),
    (
        pointwise_rule,
        _names(
            "aten",
            "rsub floor_divide mse_loss_backward huber_loss_backward smooth_l1_loss_backward log_sigmoid_backward",
        ),
    ),
    (copy_rule, _names("aten", "clone copy_ copy _to_copy contiguous lift_fresh_copy")),
    (select_rule, _names("aten", "where")),
    (scaled_rule, _names("aten", "deg2rad rad2deg")),
    (
        loss_rule,
        _names(
            "aten",
            """
        mse_loss huber_loss smooth_l1_loss soft_margin_loss soft_margin_loss_backward
        binary_cross_entropy binary_cross_entropy_with_logits""",
        ),
    ),
    (
        nothing_rule,
        _names(
            "prims",
            """
        iota convert_element_type rev where device_put normal cat
        empty_strided empty_permuted full_like scalar_tensor clone inductor_seed inductor_seeds
        inductor_lookup_seed inductor_random inductor_randint inductor_force_stride_order""",
        ),
    ),
    (
        pointwise_rule,
        _names(
            "prims",
            """
        abs acos acosh add asin asinh atan atan2 atanh bessel_i0 bessel_i1 bessel_j0 bessel_j1 bitwise_and
        bitwise_not bitwise_or bitwise_xor cbrt ceil conj_physical cos cosh digamma div eq erf erf_inv erfc erfcx
        exp exp2 expm1 floor fmax fmin fmod frexp gcd ge gt hypot igamma igammac imag isfinite le lgamma
        log log10 log1p log2 lt maximum minimum mul ndtri ne neg nextafter pow real reciprocal remainder round
        rsqrt shift_left shift_right_arithmetic sign signbit sin sinh spherical_bessel_j0
        sqrt sub tan tanh trunc zeta""",
        ),
    ),
    (sum_rule, ("aten::sum",)),
    (truth_rule, _names("aten", "any all")),
    (extreme_rule, _names("aten", "amax amin aminmax")),
    (extreme_with_index_rule, _names("aten", "max min argmax argmin")),
    (variance_rule, _names("aten", "var std var_mean std_mean")),
    (norm_rule, _names("aten", "norm linalg_vector_norm")),
    (median_rule, _names("aten", "median nanmedian")),
    (scan_rule, _names("aten", "cumsum cumprod logcumsumexp cummax cummin")),
    (matrix_product_rule, _names("aten", "mm addmm bmm baddbmm addbmm mv addmv dot vdot _grouped_mm")),
    (scatter_rule, _names("aten", "scatter scatter_add")),
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
    "aten::scatter_reduce": scatter_reduce_rule,
    "aten::index_select": index_select_rule,
    "aten::index_add": index_add_rule,
    "aten::masked_scatter": masked_scatter_rule,
    "aten::native_layer_norm": layer_norm_rule,
    "aten::native_group_norm": group_norm_rule,
    "aten::_fused_rms_norm": rms_norm_rule,
    "aten::binary_cross_entropy_backward": cross_entropy_backward_rule,
    "aten::_ctc_loss_backward": ctc_backward_rule,
    "aten::randperm": permutation_rule,
    "aten::mean": mean_rule,
    "aten::prod": prod_rule,
    "aten::nansum": prod_rule,
    "aten::ldexp": ldexp_rule,
    "aten::kthvalue": kthvalue_rule,
    "aten::renorm": renorm_rule,
    "aten::cat": concatenation_rule,
    "aten::roll": roll_rule,
    "aten::gelu_backward": gelu_backward_rule,
    "aten::isinf": isinf_rule,
    "aten::multinomial": multinomial_rule,
    "aten::normal": normal_rule,
    "aten::rrelu_with_noise_functional": randomised_relu_rule,
    "aten::_weight_norm_interface": weight_norm_rule,
    "aten::_weight_norm_interface_backward": weight_norm_backward_rule,
    "aten::im2col": unfold_rule,
    "aten::affine_grid_generator": affine_grid_rule,
    "aten::masked_scatter_backward": masked_scatter_backward_rule,
    "prims::fma": fma_rule,
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
    "aten::repeat": repeat_rule,
    "transformers::grouped_mm_fallback": grouped_fallback_rule,
    "transformers::grouped_mm_fallback_backward": grouped_fallback_rule,
}

OUTPUTS: dict[str, Callable[[Call], dict[int, int]]] = {
    "aten::native_batch_norm": norm_outputs,
    "aten::_native_batch_norm_legit": norm_outputs,
    "aten::_native_batch_norm_legit_functional": norm_outputs,
    "aten::_batch_norm_with_update": norm_outputs,
    "aten::native_layer_norm": norm_outputs,
    "aten::native_group_norm": norm_outputs,
    "aten::native_group_norm_backward": group_norm_backward_outputs,
    "aten::col2im": col2im_outputs,
    "aten::uniform": uniform_outputs,
    **dict.fromkeys(_names("aten", _WINDOWS), window_outputs),
    "aten::_embedding_bag": embedding_bag_outputs,
    "aten::_embedding_bag_forward_only": embedding_bag_outputs,
}
"""Operators whose results take other bytes than their fake tensors: returned position -> bytes."""
