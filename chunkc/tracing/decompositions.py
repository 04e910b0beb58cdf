"""Decompose operators while AOTAutograd captures a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from chunkc.passes.rewrite.layouts import OPERANDS_ALIKE
from chunkc.passes.segments.cuts import RUN_BY_ATEN
from chunkc.torch_private.aot import get_decompositions
from chunkc.torch_private.engine import without_autocast
from chunkc.torch_private.inductor import select_decomp_table

aten = torch.ops.aten

_KEEP_MORE_THAN_THEY_SHOW = [
    aten.mse_loss,
    aten.smooth_l1_loss,
    aten.huber_loss,
    aten.binary_cross_entropy,
    aten.soft_margin_loss,
]
"""Losses with a scalar result that lives in storage of the unreduced size on a CPU: bytes that no shape tells of."""


def decompositions(codegen: str) -> dict[Any, Callable[..., Any]]:
    """Choose the decompositions for a code generator.

    Inductor gets its own table without operators that ATen runs (`cuts.RUN_BY_ATEN`). "eager" gets those that bring
    operands into one memory order (`layouts.OPERANDS_ALIKE`), and losses that keep more bytes than they show. Both
    decompose operators that are a whole layer, and LAPACK's checks.
    """
    if codegen == "eager":
        return {**OPERANDS_ALIKE, **get_decompositions(_KEEP_MORE_THAN_THEY_SHOW), **_ALWAYS}
    known = {op: decompose for op, decompose in select_decomp_table().items() if op not in RUN_BY_ATEN}
    return {**known, **_ALWAYS, aten.normal_functional.default: normal}


def normal(like: Tensor, mean: float = 0.0, std: float = 1.0, *, generator: torch.Generator | None = None) -> Tensor:
    """Decompose `x.normal_()` into `randn_like`.

    Inductor would leave it to ATen. Its meta function fails an assertion of PyTorch's own for a bf16 tensor with
    symbolic sizes, up to PyTorch 2.13.
    """
    if generator is not None:
        return NotImplemented
    return torch.randn_like(like) * std + mean


def transformer_encoder_layer(
    source: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    projection_weight: Tensor,
    projection_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Tensor:
    """Decompose `aten::_transformer_encoder_layer_fwd`, the fast path of `nn.TransformerEncoderLayer` in evaluation.

    As one operator, a layer would be one call, which needs all of the layer's matrices and memory at once.

    Args:
        source: [batch, length, embed_dim].
        mask: what is not 0 is masked: [length, length] (`mask_type` 0), [batch, length] (1), or of every head (2).
    """

    def attention(x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        shape = (batch, length, 3, num_heads, embed_dim // num_heads)
        query, key, value = F.linear(x, qkv_weight, qkv_bias).view(shape).permute(2, 0, 3, 1, 4).unbind()
        kept = None
        if mask is not None:
            kept = mask.logical_not()
            kept = kept.view(batch, 1, 1, length) if mask_type == 1 else kept
        found = F.scaled_dot_product_attention(query, key, value, kept)
        return F.linear(found.transpose(1, 2).reshape(x.shape), projection_weight, projection_bias)

    def feed_forward(x: Tensor) -> Tensor:
        hidden = F.linear(x, ffn_weight_1, ffn_bias_1)
        return F.linear(F.gelu(hidden) if use_gelu else F.relu(hidden), ffn_weight_2, ffn_bias_2)

    def norm_1(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def norm_2(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    with without_autocast():  # it would reach into what was one operator
        if norm_first:
            x = source + attention(norm_1(source))
            return x + feed_forward(norm_2(x))
        x = norm_1(source + attention(source))
        return norm_2(x + feed_forward(x))


def linalg_check_errors(info: Tensor, api_name: str, *, is_matrix: bool) -> None:
    """Decompose LAPACK's check, after `torch.linalg.inv`, `solve`, `cholesky` and others, into an assertion.

    It raises a `RuntimeError` (`torch.linalg.LinAlgError` is one) if the `info` of a matrix, a number each, is not 0.
    """
    which = "the matrix" if is_matrix else "a matrix of the batch"
    message = f"{api_name}: {which} is singular, not positive definite, or the algorithm did not converge"
    aten._assert_async.msg((info == 0).all(), message)


_ALWAYS: dict[Any, Callable[..., Any]] = {
    aten._transformer_encoder_layer_fwd.default: transformer_encoder_layer,
    aten._linalg_check_errors.default: linalg_check_errors,
}
