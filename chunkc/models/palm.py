"""PaLM (Chowdhery et al., 2022): parallel blocks, multi-query attention, rotary positions, SwiGLU, no biases."""

from __future__ import annotations

from dataclasses import dataclass

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

_ROTARY_BASE = 10_000.0


@dataclass(frozen=True, kw_only=True)
class PalmConfig(TextConfig):
    """Sizes of a PaLM; its feed-forward network has 4 * `width` inner features."""

    vocabulary: int = 256_000

    def module(self) -> Palm:
        return Palm(self)


class Block(nn.Module):
    """Parallel block: causal attention and a SwiGLU network of the same normalised input, added to the residual."""

    def __init__(self, config: PalmConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.norm = nn.LayerNorm(config.width, bias=False, dtype=config.dtype)
        self.q = linear(config.width, config.width, config, bias=False)
        self.kv = linear(config.width, 2 * config.head_width, config, bias=False)
        self.out = linear(config.width, config.width, config, bias=False)
        self.gate = linear(config.width, 4 * config.width, config, bias=False)
        self.up = linear(config.width, 4 * config.width, config, bias=False)
        self.down = linear(4 * config.width, config.width, config, bias=False)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        h = self.norm(x)
        q = rotate(split_heads(self.q(h), self.num_heads), cosines, sines)
        k, v = (split_heads(part, 1) for part in self.kv(h).chunk(2, dim=-1))
        k = rotate(k, cosines, sines)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.out(merge_heads(mixed)) + self.down(F.silu(self.gate(h)) * self.up(h))


class Palm(nn.Module):
    """PaLM: `forward(ids, labels)`, both int64 [batch, length], returns mean cross-entropy. Its head is tied."""

    def __init__(self, config: PalmConfig) -> None:
        super().__init__()
        self.run_blocks = blocks_runner(config)
        self.head_width = config.head_width
        self.tokens = nn.Embedding(config.vocabulary, config.width, dtype=config.dtype)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width, bias=False, dtype=config.dtype)
        self.apply(initialise)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids)
        cosines, sines = rotary_angles(ids.shape[1], self.head_width, _ROTARY_BASE, x)
        x = self.run_blocks(self.blocks, x, cosines, sines)
        return token_loss(F.linear(self.norm(x), self.tokens.weight), labels)
