"""Vision transformers (Dosovitskiy et al., 2020): patches of an image and a class token, pre-norm blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chunkc.models.common import (
    INITIAL_DEVIATION,
    ModelConfig,
    blocks_runner,
    initialise,
    linear,
    merge_heads,
    split_heads,
)

_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class VitConfig(ModelConfig):
    """Sizes of a vision transformer over square RGB images; its networks have 4 * `width` inner features.

    Attributes:
        image: pixels along an image's edge, a multiple of `patch`.
        patch: pixels along a patch's edge.
        num_classes: number of classes.
    """

    has_heads_apart: ClassVar[bool] = True

    image: int = 224
    patch: int
    num_classes: int = 1000

    @property
    def num_tokens(self) -> int:
        """Patches of an image, and the class token."""
        return (self.image // self.patch) ** 2 + 1

    def module(self) -> Vit:
        return Vit(self)

    def example(self, batch_size: int, seq_len: int | None) -> tuple[Tensor, ...]:
        assert seq_len is None, "an image model has no sequence length"
        shape = (batch_size, 3, self.image, self.image)
        num_values = batch_size * 3 * self.image * self.image
        images = torch.arange(num_values, dtype=torch.float32).sin().view(shape).to(self.dtype)
        return images, torch.arange(batch_size) * 7919 % self.num_classes


class Block(nn.Module):
    """Pre-norm block, [batch, tokens, width] in and out: attention over all tokens, then a GELU network."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.norm1 = nn.LayerNorm(config.width, eps=_EPS, dtype=config.dtype)
        self.qkv = linear(config.width, 3 * config.width, config)
        self.out = linear(config.width, config.width, config)
        self.norm2 = nn.LayerNorm(config.width, eps=_EPS, dtype=config.dtype)
        self.up = linear(config.width, 4 * config.width, config)
        self.down = linear(4 * config.width, config.width, config)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(part, self.num_heads) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        x = x + self.out(merge_heads(F.scaled_dot_product_attention(q, k, v)))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Vit(nn.Module):
    """ViT: `forward(images [batch, 3, image, image], labels int64 [batch])` returns the mean cross-entropy."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        assert config.image % config.patch == 0, "an image is cut into whole patches"
        self.run_blocks = blocks_runner(config)
        self.patches = nn.Conv2d(3, config.width, config.patch, stride=config.patch, dtype=config.dtype)
        self.class_token = nn.Parameter(torch.zeros(1, 1, config.width, dtype=config.dtype))
        self.positions = nn.Parameter(torch.empty(1, config.num_tokens, config.width, dtype=config.dtype))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width, eps=_EPS, dtype=config.dtype)
        self.head = linear(config.width, config.num_classes, config)
        nn.init.normal_(self.positions, std=INITIAL_DEVIATION)
        self.apply(initialise)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.class_token.expand(x.shape[0], -1, -1), x), dim=1) + self.positions
        x = self.run_blocks(self.blocks, x)
        return F.cross_entropy(self.head(self.norm(x[:, 0])).float(), labels)
