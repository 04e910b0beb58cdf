"""A GPT with every operator of usual ones, and its training on the device."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import chunkc
from chunkc.runtime.storage import pinned


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.first_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.second_norm(x))))


class GPT(nn.Module):
    """Returns its loss; tokens int64 [batch, sequence]."""

    def __init__(self, *, width: int, layers: int, heads: int, vocab: int, sequence: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(sequence, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


SMALL = {"width": 64, "layers": 3, "heads": 2, "vocab": 256, "sequence": 32}
MEDIUM = {"width": 512, "layers": 6, "heads": 8, "vocab": 8192, "sequence": 256}


@dataclass(frozen=True)
class Trained:
    losses: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    report: chunkc.Report


def train(
    shape: dict[str, int], dtype: torch.dtype, budget_nbytes: int, *, batch: int = 2, steps: int = 3,
    keep: bool = False, codegen: str = "eager", home: str = "cpu", disk_holds: str = "auto",
    optimizer: Callable[..., Any] = chunkc.optim.AdamW, scaler: torch.amp.GradScaler | None = None,
    clip: float | None = None, clip_in_step: bool = False, accumulate: int = 1, activations: str = "keep",
    loss_tile_rows: int | str = "auto", autocast: torch.dtype | None = None, **optimizer_options: Any,
) -> Trained:  # fmt: skip
    """Train a placed GPT; same seed, same weights and batches.

    Args:
        keep: the caller keeps each loss during the update and the next forward, which plans allow for.
        scaler: scales losses; with fp16, the first steps overflow.
        clip: the largest norm of all gradients.
        clip_in_step: by the optimizer's own method, or the scaler's.
        accumulate: backwards per step.
        autocast: the dtype of a region around the forward.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = chunkc.place(GPT(**shape).to(dtype), device="cuda", home=home, disk_holds=disk_holds)
    options = {
        "memory_budget": budget_nbytes, "codegen": codegen, "whole_graph": "never", "activations": activations,
        "loss_tile_rows": loss_tile_rows,
    }  # fmt: skip
    compiled = torch.compile(model, backend="chunkc", options=options)
    update = optimizer(model.parameters(), lr=1e-2, **optimizer_options)
    scaler = scaler or torch.amp.GradScaler("cuda", enabled=False)
    losses = []
    for step in range(steps * accumulate):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(shape["vocab"], (batch, shape["sequence"]), generator=generator).to("cuda")
        is_last = (step + 1) % accumulate == 0
        with nullcontext() if is_last else update.accumulating():
            with torch.autocast("cuda", autocast, enabled=autocast is not None):
                loss = compiled(tokens)
            scaler.scale(loss).backward()
        losses.append(loss.detach().cpu().clone())
        if not keep:
            del loss
        if not is_last:
            continue
        if clip is not None and clip_in_step and isinstance(scaler, chunkc.GradScaler):
            scaler.clip_grad_norm_(update, clip)
        elif clip is not None and clip_in_step:
            update.clip_grad_norm_(clip)
        elif clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(update)
        scaler.update()
        update.zero_grad()
    chunkc.synchronize(model)
    torch.cuda.synchronize()
    weights = tuple(p.detach().cpu().clone() for p in model.parameters())
    return Trained(tuple(losses), weights, chunkc.report(model))


def pinned_nbytes() -> int:
    """Return the bytes that all models have pinned now."""
    gc.collect()
    return sum(mapping.nbytes for mapping in list(pinned._alive))


def smallest_budget(shape: dict[str, int], dtype: torch.dtype, **options: Any) -> int:
    """Return the smallest budget that `BudgetError` names, in bytes. Options are those of `train`."""
    try:
        train(shape, dtype, 4096, steps=1, **options)
    except chunkc.BudgetError as error:
        return error.minimum_nbytes
    raise AssertionError("trains in 4 KiB")
