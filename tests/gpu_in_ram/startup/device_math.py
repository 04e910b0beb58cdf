"""Operators that the CPU does not have as CUDA does: fused attention, dropout with its mask, softmax of halves,
histograms of integers.

Each takes CPU tensors and returns what its CUDA operator returns; None for what nobody reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _scores(query: Tensor, key: Tensor, bias: Tensor | None, is_causal: bool, scale: float | None) -> Tensor:
    """fp32 [batch, heads, queries, keys]; heads of keys are shared by queries' where there are fewer."""
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = query.float() @ _expanded(key, query).float().transpose(-1, -2) * scale
    if bias is not None:
        scores = scores + bias.float()
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    return scores


def _expanded(shared: Tensor, query: Tensor) -> Tensor:
    return shared.repeat_interleave(query.shape[1] // shared.shape[1], 1)


def combined(seed: int, offset: int) -> int:
    """A seed of a CPU generator for one draw of the CUDA generator."""
    return (seed * 1_000_003 + offset * 7919) % (1 << 62)


def _kept(seed: int, shape: Any, p: float) -> Tensor:
    """What dropout keeps: fp32 0 or 1 / (1 - p)."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=generator) >= p).float() / (1 - p)


def _forward(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, p: float, is_causal: bool,
             scale: float | None, generator: torch.Generator) -> tuple[Tensor, Tensor]:  # fmt: skip
    scores = _scores(query, key, bias, is_causal, scale)
    weights = scores.softmax(-1)
    if p:
        weights = weights * _kept(generator.initial_seed(), weights.shape, p)
    out = (weights @ _expanded(value, query).float()).to(query.dtype)
    return out, scores.logsumexp(-1)


def _summed(gradient: Tensor, shared: Tensor) -> Tensor:
    groups = gradient.shape[1] // shared.shape[1]
    return gradient.unflatten(1, (shared.shape[1], groups)).sum(2).to(shared.dtype)


def _backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, out: Tensor,
              logsumexp: Tensor, p: float, is_causal: bool, seed: int,
              scale: float | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key, value and scores, from what the forward kept."""
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    weights = (_scores(query, key, bias, is_causal, scale) - logsumexp[..., : query.shape[2], None]).exp()
    kept = _kept(seed, weights.shape, p) if p else torch.ones(())
    grad = grad.float()
    grad_value = (weights * kept).transpose(-1, -2) @ grad
    grad_weights = grad @ _expanded(value, query).float().transpose(-1, -2) * kept
    row_sums = (grad * out.float()).sum(-1, keepdim=True)
    grad_scores = weights * (grad_weights - row_sums)
    grad_query = grad_scores @ _expanded(key, query).float() * factor
    grad_key = grad_scores.transpose(-1, -2) @ query.float() * factor
    return grad_query.to(query.dtype), _summed(grad_key, key), _summed(grad_value, value), grad_scores


def flash(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None,
          generator=None):  # fmt: skip
    out, logsumexp = _forward(query, key, value, None, dropout_p, is_causal, scale, generator)
    state = torch.tensor([generator.initial_seed(), 0], dtype=torch.int64).view(torch.uint64)
    return out, logsumexp, None, None, None, None, state, None, None


def flash_backward(grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p,
                   is_causal, philox_seed, philox_offset, *, scale=None, **_):  # fmt: skip
    seed = int(philox_seed.view(torch.int64)[0]) if dropout_p else 0
    return _backward(grad_out, query, key, value, None, out, logsumexp, dropout_p, is_causal, seed, scale)[:3]


def efficient(query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None,
              generator=None):  # fmt: skip
    out, logsumexp = _forward(query, key, value, attn_bias, dropout_p, is_causal, scale, generator)
    return out, logsumexp if compute_log_sumexp else None, None, None


def efficient_backward(grad_out, query, key, value, attn_bias, out, logsumexp, philox_seed, philox_offset,
                       dropout_p, grad_input_mask, is_causal=False, *, scale=None, **_):  # fmt: skip
    seed = combined(int(philox_seed), int(philox_offset)) if dropout_p else 0
    *grads, grad_scores = _backward(
        grad_out, query, key, value, attn_bias, out, logsumexp, dropout_p, is_causal, seed, scale
    )
    grad_bias = None
    if grad_input_mask[3] and attn_bias is not None:
        grad_bias = grad_scores.sum_to_size(attn_bias.shape).to(attn_bias.dtype)
    return *grads, grad_bias


def native_dropout(input: Tensor, p: float, train: bool | None, generator: Any = None) -> tuple[Tensor, Tensor]:
    if train is False or p == 0:
        return input.clone(), torch.ones_like(input, dtype=torch.bool)
    mask = torch.rand(input.shape, generator=generator) >= p
    return (input.float() * mask / (1 - p) if p < 1 else torch.zeros_like(input)).to(input.dtype), mask


def softmax(input: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return torch.ops.aten._softmax.default(input.float() if half_to_float else input, dim, False)


def log_softmax(input: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return torch.ops.aten._log_softmax.default(input.float() if half_to_float else input, dim, False)


def histc(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Of integers too, which the CPU does not count."""
    return torch.ops.aten.histc.default(input.double(), *args, **kwargs).to(input.dtype)


def _in_float32(op: Any) -> Callable[..., Any]:
    """An operator whose CPU kernel does not take the mix of dtypes that CUDA's does."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return op(*(a.float() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args), **kwargs)

    return run


OPERATORS: dict[str, Callable[..., Any]] = {
    "aten::_scaled_dot_product_flash_attention": flash,
    "aten::_scaled_dot_product_flash_attention_backward": flash_backward,
    "aten::_scaled_dot_product_efficient_attention": efficient,
    "aten::_scaled_dot_product_efficient_attention_backward": efficient_backward,
    "aten::native_dropout": native_dropout,
    "aten::histc": histc,
    "aten::_softmax": softmax,
    "aten::_log_softmax": log_softmax,
    "aten::native_layer_norm_backward": _in_float32(torch.ops.aten.native_layer_norm_backward.default),
    "aten::native_group_norm_backward": _in_float32(torch.ops.aten.native_group_norm_backward.default),
}
