"""Llama 3 (Meta, 2024): RMS norms, rotary positions, grouped-query attention, SwiGLU, no biases.

Llama 3.2 scales its low rotary frequencies. That changes values and no shape, and is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from chunkc.models.common import (
    TextConfig,
    blocks_runner,
    initialise,
    linear,
    merge_heads,
    rotary_angles,
    rotate,
    split_heads,
    token_loss,
)


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(TextConfig):
    """Sizes of a Llama.

    Attributes:
        num_kv_heads: heads of keys and values, a divisor of `num_heads`.
        inner_width: inner features of the feed-forward network.
        tied: whether the output head is the token embedding.
        rotary_base: base of the rotary frequencies, `rotary_base ** (-2 * i / head_width)` radians per token.
        norm_eps: added to the mean square in norms.
    """

    has_heads_apart: ClassVar[bool] = True

    vocabulary: int = 128_256
    num_kv_heads: int
    inner_width: int
    tied: bool = False
    rotary_base: float = 500_000.0
    norm_eps: float = 1e-5

    def module(self) -> nn.Module:
        return Llama(self)

    def network(self) -> nn.Module:
        """Make a block's feed-forward network, [batch, length, width] in and out."""
        return SwiGLU(self)


class Attention(nn.Module):
    """Causal grouped-query attention: [batch, length, width] in and out."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        kv_width = config.num_kv_heads * config.head_width
        self.q = linear(config.width, config.width, config, bias=False)
        self.k = linear(config.width, kv_width, config, bias=False)
        self.v = linear(config.width, kv_width, config, bias=False)
        self.out = linear(config.width, config.width, config, bias=False)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        q = rotate(split_heads(self.q(x), self.num_heads), cosines, sines)
        k = rotate(split_heads(self.k(x), self.num_kv_heads), cosines, sines)
        v = split_heads(self.v(x), self.num_kv_heads)
        return self.out(merge_heads(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)))


class SwiGLU(nn.Module):
    """Gated feed-forward network: [batch, length, width] in and out."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = linear(config.width, config.inner_width, config, bias=False)
        self.up = linear(config.width, config.inner_width, config, bias=False)
        self.down = linear(config.inner_width, config.width, config, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Pre-norm block, [batch, length, width] in and out: attention, then the feed-forward network."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(config.width, eps=config.norm_eps, dtype=config.dtype)
        self.attention = Attention(config)
        self.norm2 = nn.RMSNorm(config.width, eps=config.norm_eps, dtype=config.dtype)
        self.network = config.network()

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cosines, sines)
        return x + self.network(self.norm2(x))


class Llama(nn.Module):
    """Llama: `forward(ids, labels)`, both int64 [batch, length], returns mean cross-entropy."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.run_blocks = blocks_runner(config)
        self.head_width, self.rotary_base = config.head_width, config.rotary_base
        self.tokens = nn.Embedding(config.vocabulary, config.width, dtype=config.dtype)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.width, eps=config.norm_eps, dtype=config.dtype)
        self.head = None if config.tied else linear(config.width, config.vocabulary, config, bias=False)
        self.apply(initialise)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids)
        cosines, sines = rotary_angles(ids.shape[1], self.head_width, self.rotary_base, x)
        x = self.run_blocks(self.blocks, x, cosines, sines)
        x = self.norm(x)
        logits = F.linear(x, self.tokens.weight) if self.head is None else self.head(x)
        return token_loss(logits, labels)
