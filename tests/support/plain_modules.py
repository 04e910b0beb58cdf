"""Small plain PyTorch modules, each with one thing that a planner may stumble over.

Every `forward` returns the scalar loss; the batches are in `zoo.py`.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH, LAYERS, HEADS, VOCAB, SEQUENCE = 128, 3, 4, 500, 32


class ConvNet(nn.Module):
    """Convolutions with batch normalisation: buffers that a training step updates, one of them an integer."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 32, 64, 128)
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU())
            for a, b in pairwise(widths)
        )
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        for stage in self.stages:
            images = stage(images)
        return F.cross_entropy(self.head(images.mean((2, 3))), labels)


class Block(nn.Module):
    """A pre-norm transformer block without biases, in the manner of nanoGPT."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH, bias=False)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm_1(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class ByteGPT(nn.Module):
    """A byte-level GPT; `tied` shares embedding and head."""

    def __init__(self, *, num_layers: int = LAYERS, tied: bool = False) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(2 * SEQUENCE, WIDTH)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.blocks = nn.ModuleList(Block() for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.score(hidden, y)

    def embed(self, x: Tensor) -> Tensor:
        return self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))

    def score(self, hidden: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), y.flatten())


class GraphBreaks(ByteGPT):
    """A graph break after two of the blocks: three graphs, and a weight tied across the outer two."""

    def __init__(self) -> None:
        super().__init__(tied=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.blocks[0](self.embed(x))
        torch._dynamo.graph_break()
        hidden = self.blocks[1](hidden)
        torch._dynamo.graph_break()
        return self.score(self.blocks[2](hidden), y)


class BreaksInLoop(ByteGPT):
    """A model with graph breaks inside a loop.

    Dynamo runs the loop as it stands and captures `embed`, `score` and ONE graph for all blocks, called once per block
    with that block's parameters as inputs.
    """

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
            torch._dynamo.graph_break()
        return self.score(hidden, y)


class Stack(nn.Module):
    """Equal layers, one chunk each where chunks are small; biases too small to move."""

    def __init__(
        self, num_layers: int = 4, *, width: int = 64, bias: bool = True, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=bias, dtype=dtype) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.float().square().mean()


class FeedForward(nn.Module):
    """A residual block: norm, up, GELU, down, and dropout if its probability is given."""

    def __init__(self, width: int, *, times: int = 4, dropout: float | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, times * width), nn.Linear(times * width, width)
        self.dropout = nn.Identity() if dropout is None else nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Residual(nn.Module):
    """Blocks on rows of 64, each added to what it is given; the loss is the square of the last result."""

    def __init__(self, num_blocks: int = 3, kind: type[nn.Sequential] = nn.Sequential) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            kind(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(num_blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


class FrozenMLP(nn.Module):
    """An MLP with frozen first and third layers, and one frozen bias."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2 * WIDTH, 2 * WIDTH) for _ in range(4))
        for frozen in (self.layers[0], self.layers[2], self.layers[3].bias):
            frozen.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.mse_loss(x, y)


class CalledTwice(nn.Module):
    """Model with a block called twice, and an embedding that is also the head: two kinds of shared weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.block, self.middle = Block(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.block(torch.relu(self.middle(self.block(self.embedding(x)))))
        return F.cross_entropy(F.linear(hidden, self.embedding.weight).flatten(0, 1) / WIDTH, y.flatten())


class Encoder(nn.Module):
    """`nn.TransformerEncoderLayer`s, hence `nn.MultiheadAttention` with its packed projection."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.encoder(x), y)


class SometimesUnused(nn.Module):
    """A branch that takes part only where `branch` is true, and one parameter that never does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.side = nn.Linear(4 * WIDTH, 4 * WIDTH)
        self.never = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor, y: Tensor, branch: bool) -> Tensor:
        hidden = torch.relu(self.first(x))
        if branch:
            hidden = hidden + torch.relu(self.side(hidden))
        return F.mse_loss(self.last(hidden), y)


class BigEmbedding(nn.Module):
    """Model with one tensor, 4 MiB, far larger than all others together."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8192, WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 32))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(self.embedding(x)).flatten(0, 1), y.flatten())


class BasicBlock(nn.Module):
    """ResNet's two convolutions with batch normalisation, and a projection where the shape changes."""

    def __init__(self, channels: int, filters: int, stride: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(channels, filters, 3, stride=stride, padding=1, bias=False)
        self.conv_2 = nn.Conv2d(filters, filters, 3, padding=1, bias=False)
        self.norm_1, self.norm_2 = nn.BatchNorm2d(filters), nn.BatchNorm2d(filters)
        self.project: nn.Module = nn.Identity()
        if stride != 1 or channels != filters:
            self.project = nn.Sequential(
                nn.Conv2d(channels, filters, 1, stride=stride, bias=False), nn.BatchNorm2d(filters)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_2(self.conv_2(F.relu(self.norm_1(self.conv_1(x)))))
        return F.relu(y + self.project(x))


class ResNet(nn.Module):
    """A ResNet-18 in small: stem, max-pooling, four stages, global average, a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 16, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        self.stages = nn.Sequential(
            BasicBlock(16, 16, 1), BasicBlock(16, 32, 2), BasicBlock(32, 64, 2), BasicBlock(64, 64, 1)
        )
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(64, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.pool(self.stages(self.stem(images))).flatten(1)), labels)


class ConvNeXtBlock(nn.Module):
    """A depthwise convolution, then an MLP with channels last, scaled per channel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 1e-2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.down(F.gelu(self.up(y))) * self.scale
        return x + y.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 4, stride=4)
        self.blocks_1 = nn.Sequential(ConvNeXtBlock(32), ConvNeXtBlock(32))
        self.shrink = nn.Sequential(nn.GroupNorm(1, 32), nn.Conv2d(32, 64, 2, stride=2))
        self.blocks_2 = nn.Sequential(ConvNeXtBlock(64), ConvNeXtBlock(64))
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.blocks_2(self.shrink(self.blocks_1(self.stem(images))))
        return F.cross_entropy(self.head(self.norm(x.mean((2, 3)))), labels)


class LSTMCells(nn.Module):
    """A language model of one LSTM layer, written out step by step, so that Dynamo captures it as one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.input, self.hidden = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        entering = self.input(self.embedding(x))
        h = c = entering.new_zeros(x.shape[0], WIDTH)
        states = []
        for step in range(8):
            i, f, g, o = (entering[:, step] + self.hidden(h)).chunk(4, -1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            states.append(h)
        return F.cross_entropy(self.head(torch.stack(states, 1)).flatten(0, 1), y[:, :8].flatten())


class LSTM(nn.Module):
    """A recurrent model with `nn.LSTM`, which Dynamo does not capture: all of this forward runs eagerly."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(VOCAB, WIDTH), nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(x))
        return F.cross_entropy(self.head(states).flatten(0, 1), y.flatten())


class ResBlock(nn.Module):
    def __init__(self, channels: int, filters: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.GroupNorm(8, channels), nn.GroupNorm(8, filters)
        self.conv_1 = nn.Conv2d(channels, filters, 3, padding=1)
        self.conv_2 = nn.Conv2d(filters, filters, 3, padding=1)
        self.project = nn.Conv2d(channels, filters, 1) if channels != filters else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv_2(F.silu(self.norm_2(self.conv_1(F.silu(self.norm_1(x))))))
        return y + self.project(x)


class UNet(nn.Module):
    """A diffusion model's U-Net in small: group normalisation, SiLU, upsampling, skip connections."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.down_1, self.down_2 = ResBlock(16, 16), ResBlock(16, 32)
        self.shrink_1, self.shrink_2 = nn.Conv2d(16, 16, 3, 2, 1), nn.Conv2d(32, 32, 3, 2, 1)
        self.middle = ResBlock(32, 32)
        self.up_2, self.up_1 = ResBlock(64, 16), ResBlock(32, 16)
        self.grow = nn.ConvTranspose2d(16, 16, 2, stride=2)
        self.head = nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, images: Tensor, noise: Tensor) -> Tensor:
        one = self.down_1(self.stem(images))
        two = self.down_2(self.shrink_1(one))
        x = F.interpolate(self.middle(self.shrink_2(two)), scale_factor=2, mode="nearest")
        x = self.grow(self.up_2(torch.cat([x, two], 1)))
        return F.mse_loss(self.head(self.up_1(torch.cat([x, one], 1))), noise)


class DropoutMLP(nn.Module):
    """Dropout between linear layers, and on whole channels."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = F.dropout(F.relu(self.up(F.dropout(x, 0.1))), 0.3)
        return F.l1_loss(F.dropout1d(self.down(hidden), 0.2), y)


class CheckpointedGPT(ByteGPT):
    """A model that recomputes every block's activations in the backward."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        return self.score(hidden, y)


class AutocastGPT(ByteGPT):
    """Parameters in float32, matrix products and attention in bfloat16."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x, y)


class AutocastConvNet(ResNet):
    """Convolutions in bfloat16, batch normalisation as autocast decides."""

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(images, labels)


class SharedBlocks(nn.Module):
    """Odd operand layouts: transposed, expanded and strided inputs to products, norms, softmax and reductions."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.mix = Block(), nn.Linear(32, 32)
        self.gate = nn.Parameter(torch.randn(HEADS, 1, WIDTH // HEADS))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.block(x) + self.mix(x.transpose(1, 2)).transpose(1, 2)
        heads = x.unflatten(-1, (HEADS, -1)).transpose(1, 2) * self.gate
        weights = torch.einsum("bhqd,bhkd->bhqk", heads, heads.flip(-2)).softmax(-2)
        x = torch.einsum("bhqk,bhkd->bqhd", weights, heads).flatten(2)
        return F.smooth_l1_loss(F.layer_norm(x, (WIDTH,)), y) + x[:, ::2].var(1).mean()
