"""Models that are built in ways that ordinary code builds them, for tests of construction, loading and saving."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH = 64


class Tied(nn.Module):
    """A weight of two modules, a buffer, and parameters that are initialised after all are made."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body = nn.Embedding(100, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 100, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)
        self.register_buffer("mask", torch.ones(WIDTH, WIDTH))
        nn.init.normal_(self.embedding.weight, std=0.02)
        with torch.no_grad():
            self.embedding.weight[0].zero_()

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.body(self.embedding(tokens)) @ (self.scale * self.mask))
        return self.head(x).square().mean()


def encoder() -> nn.Module:
    """Make a model with layers that are copies of one layer."""
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, num_layers=3)


def sequential() -> nn.Module:
    first, attention = nn.Linear(WIDTH, WIDTH), nn.MultiheadAttention(WIDTH, 4)
    return nn.Sequential(first, attention, nn.LSTM(WIDTH, WIDTH), nn.Bilinear(8, 8, 64))
