"""A diffusion model's U-Net in the shape of Stable Diffusion's, without its text: 790 million parameters."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTHS = (320, 640, 1280, 1280)
NUM_BLOCKS = 2
NUM_HEADS = 8
IMAGE = 64
CHANNELS = 4
GROUPS = 32


class Residual(nn.Module):
    """Two convolutions, each behind a norm, and a way around them."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.norm_1, self.conv_1 = nn.GroupNorm(GROUPS, inner), nn.Conv2d(inner, outer, 3, padding=1)
        self.norm_2, self.conv_2 = nn.GroupNorm(GROUPS, outer), nn.Conv2d(outer, outer, 3, padding=1)
        self.around = nn.Conv2d(inner, outer, 1) if inner != outer else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv_1(F.silu(self.norm_1(x)))
        return self.around(x) + self.conv_2(F.silu(self.norm_2(hidden)))


class Attention(nn.Module):
    """Attention over all pixels, then a network of each pixel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, width, height, breadth = x.shape
        pixels = x.flatten(2).transpose(1, 2)
        heads = self.qkv(self.norm_1(pixels)).view(batch, -1, 3, NUM_HEADS, width // NUM_HEADS).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2])
        pixels = pixels + self.out(mixed.transpose(1, 2).reshape(batch, -1, width))
        pixels = pixels + self.down(F.gelu(self.up(self.norm_2(pixels))))
        return pixels.transpose(1, 2).reshape(batch, width, height, breadth)


class Stage(nn.Module):
    """A residual block, with attention behind it where pixels are few enough."""

    def __init__(self, inner: int, outer: int, *, attends: bool) -> None:
        super().__init__()
        self.residual = Residual(inner, outer)
        self.attention = Attention(outer) if attends else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(self.residual(x))


class UNet(nn.Module):
    """Down to an eighth of the size and up again; what the way down has made is joined on the way up."""

    def __init__(self, *, activation_checkpointing: bool) -> None:
        super().__init__()
        self.activation_checkpointing = activation_checkpointing
        self.stem = nn.Conv2d(CHANNELS, WIDTHS[0], 3, padding=1)
        self.down, self.shrink = nn.ModuleList(), nn.ModuleList()
        self.up, self.grow = nn.ModuleList(), nn.ModuleList()
        joined, width = [WIDTHS[0]], WIDTHS[0]
        for level, outer in enumerate(WIDTHS):
            for _ in range(NUM_BLOCKS):
                self.down.append(Stage(width, outer, attends=level < len(WIDTHS) - 1))
                width = outer
                joined.append(width)
            if level < len(WIDTHS) - 1:
                self.shrink.append(nn.Conv2d(width, width, 3, stride=2, padding=1))
                joined.append(width)
        self.middle = Stage(width, width, attends=True)
        for level, outer in reversed(list(enumerate(WIDTHS))):
            for _ in range(NUM_BLOCKS + 1):
                self.up.append(Stage(width + joined.pop(), outer, attends=level < len(WIDTHS) - 1))
                width = outer
            if level:
                self.grow.append(nn.Conv2d(width, width, 3, padding=1))
        self.norm, self.head = nn.GroupNorm(GROUPS, width), nn.Conv2d(width, CHANNELS, 3, padding=1)

    def forward(self, images: Tensor, noise: Tensor) -> Tensor:
        x = self.stem(images)
        joined = [x]
        for level in range(len(WIDTHS)):
            for block in self.down[level * NUM_BLOCKS : (level + 1) * NUM_BLOCKS]:
                x = self._run(block, x)
                joined.append(x)
            if level < len(self.shrink):
                x = self.shrink[level](x)
                joined.append(x)
        x = self._run(self.middle, x)
        for level in range(len(WIDTHS)):
            for block in self.up[level * (NUM_BLOCKS + 1) : (level + 1) * (NUM_BLOCKS + 1)]:
                x = self._run(block, torch.cat([x, joined.pop()], 1))
            if level < len(self.grow):
                x = self.grow[level](F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return F.mse_loss(self.head(F.silu(self.norm(x))).float(), noise.float())

    def _run(self, block: nn.Module, x: Tensor) -> Tensor:
        if not self.activation_checkpointing:
            found: Tensor = block(x)
            return found
        return checkpoint(block, x, use_reentrant=False)


def build(dtype: torch.dtype, *, activation_checkpointing: bool) -> nn.Module:
    """Build the model on the ambient device."""
    return UNet(activation_checkpointing=activation_checkpointing).to(dtype)


def example(batch_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Images, and the noise that is to be found in them."""
    shape = batch_size, CHANNELS, IMAGE, IMAGE
    return torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
