"""BERT (Devlin et al., 2018) with its masked-language-model head: post-norm blocks, no padding."""

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

_EPS = 1e-12


@dataclass(frozen=True, kw_only=True)
class BertConfig(TextConfig):
    """Sizes of a BERT; its feed-forward network has 4 * `width` inner features."""

    has_heads_apart: ClassVar[bool] = True

    vocabulary: int = 30_522
    max_length: int | None = 512
    num_token_types: int = 2

    def module(self) -> Bert:
        return Bert(self)


class Block(nn.Module):
    """Post-norm block, [batch, length, width] in and out: attention over all tokens, then a GELU network."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.q = linear(config.width, config.width, config)
        self.k = linear(config.width, config.width, config)
        self.v = linear(config.width, config.width, config)
        self.out = linear(config.width, config.width, config)
        self.norm1 = nn.LayerNorm(config.width, eps=_EPS, dtype=config.dtype)
        self.up = linear(config.width, 4 * config.width, config)
        self.down = linear(4 * config.width, config.width, config)
        self.norm2 = nn.LayerNorm(config.width, eps=_EPS, dtype=config.dtype)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(project(x), self.num_heads) for project in (self.q, self.k, self.v))
        x = self.norm1(x + self.out(merge_heads(F.scaled_dot_product_attention(q, k, v))))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class Bert(nn.Module):
    """BERT: `forward(ids, labels)`, both int64 [batch, length], returns mean cross-entropy; label -100 is ignored."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        assert config.max_length is not None, "a BERT has a table of positions"
        self.run_blocks = blocks_runner(config)
        self.tokens = nn.Embedding(config.vocabulary, config.width, dtype=config.dtype)
        self.positions = nn.Embedding(config.max_length, config.width, dtype=config.dtype)
        self.token_types = nn.Embedding(config.num_token_types, config.width, dtype=config.dtype)
        self.norm = nn.LayerNorm(config.width, eps=_EPS, dtype=config.dtype)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.head = linear(config.width, config.width, config)
        self.head_norm = nn.LayerNorm(config.width, eps=_EPS, dtype=config.dtype)
        self.head_bias = nn.Parameter(torch.zeros(config.vocabulary, dtype=config.dtype))
        self.apply(initialise)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        positions = self.positions(torch.arange(ids.shape[1], device=ids.device))
        x = self.norm(self.tokens(ids) + positions + self.token_types(torch.zeros_like(ids)))
        x = self.run_blocks(self.blocks, x)
        x = self.head_norm(F.gelu(self.head(x)))
        return token_loss(F.linear(x, self.tokens.weight, self.head_bias), labels)
