"""GPT-2 (Radford et al., 2019) and larger models of its form: pre-norm blocks, learned positions, tied head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chunkc.models.common import (
    TextConfig,
    blocks_runner,
    initialise,
    linear,
    merge_heads,
    split_heads,
    token_loss,
)


@dataclass(frozen=True, kw_only=True)
class GPTConfig(TextConfig):
    """Sizes of a GPT; its feed-forward network has 4 * `width` inner features."""

    has_heads_apart: ClassVar[bool] = True

    vocabulary: int = 50_257
    max_length: int | None = 1024

    def module(self) -> GPT:
        return GPT(self)


class Attention(nn.Module):
    """Causal self-attention: [batch, length, width] in and out."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = linear(config.width, 3 * config.width, config)
        self.out = linear(config.width, config.width, config)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(part, self.num_heads) for part in self.qkv(x).chunk(3, dim=-1))
        return self.out(merge_heads(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


class Block(nn.Module):
    """Pre-norm block, [batch, length, width] in and out: attention, then a GELU network."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width, dtype=config.dtype)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width, dtype=config.dtype)
        self.up = linear(config.width, 4 * config.width, config)
        self.down = linear(4 * config.width, config.width, config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """GPT: `forward(ids, labels)`, both int64 [batch, length], returns mean cross-entropy."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        assert config.max_length is not None, "a GPT has a table of positions"
        self.run_blocks = blocks_runner(config)
        self.tokens = nn.Embedding(config.vocabulary, config.width, dtype=config.dtype)
        self.positions = nn.Embedding(config.max_length, config.width, dtype=config.dtype)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width, dtype=config.dtype)
        self.apply(initialise)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        x = self.run_blocks(self.blocks, x)
        return token_loss(F.linear(self.norm(x), self.tokens.weight), labels)
