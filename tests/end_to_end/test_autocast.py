"""Autocast with dropout: regions wherever users put them, sizes that change, every budget the same bits."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import HUGE, in_a_small_budget, kept, limited
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import chunkc

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

WIDTH, VOCAB = 32, 64
LOW = torch.bfloat16


class Block(nn.Module):
    """Attention and a feed-forward network, with dropout wherever GPT-2 has it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.projection, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)
        self.feed = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.attention(self.norm(x)).view(batch, length, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        dropout = 0.1 if self.training else 0.0
        mixed = F.scaled_dot_product_attention(*heads.unbind(), is_causal=True, dropout_p=dropout)
        x = x + self.dropout(self.projection(mixed.transpose(1, 2).reshape(x.shape)))
        return x + self.feed(x)


class GPT(nn.Module):
    """Tied embedding and head. `recomputed`: `use_reentrant` of the checkpoint around each block; None for none."""

    def __init__(self, recomputed: bool | None = None) -> None:
        super().__init__()
        self.recomputed = recomputed
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x) if self.recomputed is None else checkpoint(block, x, use_reentrant=self.recomputed)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), tokens.flatten())


class Decorated(GPT):
    """The region is the user's method."""

    @torch.autocast("cpu", LOW)
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens)


class Nested(GPT):
    """A block inside a region that is switched off, inside one that is on."""

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", LOW):
            x = self.blocks[0](self.embedding(tokens))
            with torch.autocast("cpu", enabled=False):
                x = self.blocks[1](x.float())
            return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), tokens.flatten())


def tokens(batch: int, length: int, seed: int) -> Tensor:
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def train(
    model: nn.Module, call: Any, *, region: torch.dtype | None = LOW, evaluated: bool = False, scaled: bool = False
) -> list[Tensor]:
    """Losses, gradients, losses of evaluations of other sizes between the steps, and the weights after three steps."""
    kind = torch.optim.AdamW if call is model else chunkc.optim.AdamW
    optimizer, scaler = kind(model.parameters(), lr=1e-3), torch.amp.GradScaler("cpu", enabled=scaled)
    torch.manual_seed(1)
    found: list[Tensor] = []
    for step in range(3):
        with torch.autocast("cpu", region, enabled=region is not None):
            loss = call(tokens(2, 8, step))
        scaler.scale(loss).backward()
        found += [kept(loss), *(kept(p.grad) for p in model.parameters() if p.grad is not None)]
        del loss
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if evaluated:
            model.eval()
            with torch.no_grad(), torch.autocast("cpu", region, enabled=region is not None):
                found.append(kept(call(tokens(3 + step, 12 + 4 * step, 9))))
            model.train()
    return [*found, *(kept(p) for p in model.parameters())]


def built(kind: type[nn.Module] = GPT, **arguments: Any) -> nn.Module:
    torch.manual_seed(0)
    return kind(**arguments).train()


def compiled(budget: int, codegen: str, kind: type[nn.Module] = GPT, **arguments: Any) -> tuple[nn.Module, Any]:
    torch._dynamo.reset()
    gc.collect()
    options = {"memory_budget": budget, "codegen": codegen, "whole_graph": "never", "chunk_size": 4096}
    options |= arguments.pop("options", {})
    model = chunkc.place(built(kind, **arguments), chunk_size=4096)
    return model, torch.compile(model, backend="chunkc", options=options)


def in_both_budgets(codegen: str, kind: type[nn.Module], how: dict[str, Any], **arguments: Any) -> list[Tensor]:
    """What is trained where everything fits, which a small budget must reproduce to the bit."""

    def trained(budget: int) -> list[Tensor]:
        made = compiled(budget, codegen, kind, **arguments)
        with limited(budget):
            return train(*made, **how)

    found = trained(HUGE)
    assert_equal(in_a_small_budget(trained), found)
    return found


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


def assert_close_losses(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected):
        if a.dim() == 0:
            torch.testing.assert_close(a, b, rtol=3e-3, atol=1e-4)


WAYS: dict[str, tuple[type[nn.Module], dict[str, Any], dict[str, Any]]] = {
    "decorated": (Decorated, {}, {"region": None}),
    "nested": (Nested, {}, {"region": None}),
    "float16, scaled": (GPT, {}, {"region": torch.float16, "scaled": True}),
    "recomputed, evaluated": (GPT, {"recomputed": True}, {"evaluated": True}),
}


TIERS = dict.fromkeys(WAYS, pytest.mark.second_tier) | {"decorated": (), "nested": pytest.mark.slow}


@pytest.mark.parametrize("way", [pytest.param(way, marks=marks) for way, marks in TIERS.items()])
def test_eager_segments_train_what_pytorch_does(way: str) -> None:
    """Eager segments draw as eager PyTorch does, so the losses are its, but for the order of sums."""
    kind, arguments, how = WAYS[way]
    free = in_both_budgets("eager", kind, how, **arguments)
    model = built(kind, **arguments)
    assert_close_losses(free, train(model, model, **how))


def test_a_region_around_the_backward_changes_nothing() -> None:
    """The backward is a graph already: what autocast would cast in eager PyTorch stays as it was captured."""
    found = []
    for inside in (False, True):
        model, call = compiled(HUGE, "eager")
        torch.manual_seed(1)
        loss = call(tokens(2, 8, 0))
        with torch.autocast("cpu", LOW, enabled=inside):
            loss.backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert_equal(*found)
