"""Where predicted bytes are not exact: every exception, why, and the bound that is kept instead.

Everything else is exact to the byte, and tests hold both. Values are never larger than predicted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from chunkc.passes.scratch.copies import LOW_PRECISION


@dataclass(frozen=True)
class Inexact:
    """An operator whose scratch is only bounded.

    Attributes:
        when: the calls that are not exact.
        reason: why.
        bound: what is predicted instead.
        only_low_precision: in float32 and float64 the operator is exact.
        loose: the bound may be more than twice the truth; only tests ask.
    """

    when: str
    reason: str
    bound: str
    only_low_precision: bool = False
    loose: bool = False


_PRODUCT = Inexact(
    "bfloat16 and float16 (and float32 below full matmul precision)",
    "oneDNN packs operands in blocks that it picks by instruction set, cache and thread count",
    "per thread, the padded matrices, or what fits a 2 MiB cache",
    only_low_precision=True,
    loose=True,
)
_CONVOLUTION = Inexact(
    "float16; bfloat16 but for AVX-512 with bfloat16 instructions and without AMX; gaps in filters; backwards of "
    "channels-last or small single images; filters of one pixel, few channels or odd groups on several threads; "
    "processors without AVX-512",
    "oneDNN picks the blocked formats of image, filters and result, its scratchpad and how threads share, when it runs",
    "image, filters and result in blocks, and filters' gradients per thread; in low precision also 1 MiB per thread",
    loose=True,
)
_STATISTICS = Inexact(
    "low precision, neither contiguous nor channels last",
    "sums over such an input go through float32 copies of it",
    "one float32 copy and the channels' sums",
    only_low_precision=True,
)
_LAPACK = Inexact(
    "always",
    "LAPACK says only when it runs how much workspace it wants",
    "a copy of the matrices, pivots, and LAPACK's usual block of 64 columns",
)
_POWERS = Inexact(
    "always", "the norm of each matrix says how many of its powers are made", "the most: twelve matrices", loose=True
)
_STEPS = Inexact("always", "computed in several steps that ATen may fuse", "temporaries in the widest dtype")
_ATTENTION = Inexact(
    "more than one thread, and low precision",
    "each thread makes a sum per row while it works, and threads need not work at the same time; "
    "low precision is packed by oneDNN",
    "all threads at the same time",
    loose=True,
)
_MASK = Inexact("always", "composed of several operators", "values, masks and indices at the same time")
_SELECTED = Inexact(
    "always", "the mask's values say how many elements it selects", "all of them, with their positions", loose=True
)

_GROUPS: tuple[tuple[Inexact, str], ...] = (
    (_PRODUCT, "aten::mm aten::addmm aten::bmm aten::baddbmm aten::addbmm aten::_grouped_mm"),
    (_PRODUCT, "aten::mv aten::addmv aten::dot aten::vdot"),
    (_PRODUCT, "transformers::grouped_mm_fallback transformers::grouped_mm_fallback_backward"),
    (_PRODUCT, "aten::_scaled_dot_product_flash_attention_for_cpu"),
    (_ATTENTION, "aten::_scaled_dot_product_flash_attention_for_cpu_backward"),
    (_CONVOLUTION, "aten::convolution aten::convolution_backward"),
    (
        _STATISTICS,
        "aten::native_batch_norm aten::_native_batch_norm_legit aten::_native_batch_norm_legit_functional "
        "aten::_native_batch_norm_legit_no_training aten::_batch_norm_with_update",
    ),
    (
        _LAPACK,
        "aten::linalg_inv_ex aten::linalg_solve_triangular aten::linalg_lu_solve aten::triangular_solve "
        "aten::cholesky_solve "
        "aten::_linalg_det aten::_linalg_slogdet aten::_linalg_solve_ex aten::linalg_qr aten::_linalg_svd "
        "aten::_linalg_eigh",
    ),
    (_POWERS, "aten::linalg_matrix_exp"),
    (
        _STEPS,
        "aten::mse_loss aten::huber_loss aten::smooth_l1_loss aten::soft_margin_loss aten::soft_margin_loss_backward "
        "aten::binary_cross_entropy aten::binary_cross_entropy_with_logits aten::_fused_rms_norm "
        "aten::_cdist_forward aten::_euclidean_dist aten::_upsample_bilinear2d_aa aten::_upsample_bicubic2d_aa "
        "aten::_embedding_bag aten::_embedding_bag_forward_only aten::_embedding_bag_backward "
        "aten::_embedding_bag_dense_backward aten::blackman_window aten::hann_window "
        "aten::hamming_window aten::bartlett_window",
    ),
    (_PRODUCT, "aten::affine_grid_generator"),
    (_SELECTED, "aten::masked_scatter_backward"),
    (
        _MASK,
        "aten::_unsafe_masked_index aten::_unsafe_masked_index_put_accumulate "
        "prims::_low_memory_max_pool_with_offsets prims::_low_memory_max_pool_offsets_to_indices",
    ),
)

EXCEPTIONS: dict[str, Inexact] = {name: inexact for inexact, names in _GROUPS for name in names.split()}

BEYOND_OPERATORS: tuple[Inexact, ...] = (
    Inexact(
        "gradients of outputs other than the loss, and new values of buffers, in the backward",
        "whether the caller still holds what a graph returned or was given is not known when planning",
        "held to the end of the backward",
    ),
    Inexact(
        "several graphs: values that one graph gives to the next",
        "Python between the graphs decides when they are dropped",
        "held as long as the graph that returned them runs backwards",
    ),
)
"""Exceptions that are no operator's: what lives around a graph."""


def is_exact(name: str, dtype: torch.dtype) -> bool:
    """Whether the operator `name` ("namespace::op") is predicted to the byte for operands of `dtype`.

    For tests, which hold every operator to what this says of it.
    """
    found = EXCEPTIONS.get(name)
    return found is None or (found.only_low_precision and dtype not in LOW_PRECISION)


def table() -> str:
    """The exceptions as a Markdown table."""
    rows: dict[Inexact, list[str]] = {}
    for name, found in EXCEPTIONS.items():
        rows.setdefault(found, []).append(f"`{name.removeprefix('aten::')}`")
    lines = ["| what | when | why | predicted instead |", "|---|---|---|---|"]
    lines += [f"| {', '.join(names)} | {e.when} | {e.reason} | {e.bound} |" for e, names in rows.items()]
    lines += [f"| around a graph | {e.when} | {e.reason} | {e.bound} |" for e in BEYOND_OPERATORS]
    return "\n".join(lines)
