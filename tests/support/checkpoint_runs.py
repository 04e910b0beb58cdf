"""Small training runs that are saved and resumed."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import chunkc

SMALL = 1_400_000
"""A budget in which chunks of the model below move."""

LARGE = 1 << 30


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    """Blocks that draw random numbers, a buffer that each forward changes, and an output tied to the input."""

    count: Tensor

    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.tokens = nn.Embedding(32, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(64, 32, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("count", torch.zeros(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        self.count.add_(1.0)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), ids.roll(-1, 1).flatten())


@dataclass
class Run:
    """A model in training."""

    model: nn.Module
    compiled: Any
    optimizer: Any
    scheduler: Any
    losses: list[float] = field(default_factory=list)

    def train(self, num_steps: int) -> list[float]:
        """Train some steps; return the losses, as floats of the same bits."""
        for _ in range(num_steps):
            loss = self.compiled(torch.randint(32, (4, 16)))
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.item())
        return self.losses

    def checkpoint(self, folder: Path, **options: Any) -> chunkc.Checkpoint:
        return chunkc.Checkpoint(
            folder, model=self.compiled, optimizer=self.optimizer, scheduler=self.scheduler, **options
        )

    def bits(self) -> dict[str, bytes]:
        """Collect every tensor of model and optimizer."""
        chunkc.synchronize(self.model)
        found = {name: bytes_of(tensor) for name, tensor in self.model.state_dict().items()}
        for index, state in self.optimizer.state_dict()["state"].items():
            found |= {f"{index}.{kind}": bytes_of(value) for kind, value in state.items()}
        return found


def bytes_of(tensor: Tensor) -> bytes:
    array: np.ndarray = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return array.tobytes()


def begin(
    *,
    budget: int | None = LARGE,
    home: str = "cpu",
    codegen: str = "eager",
    dtype: torch.dtype = torch.float32,
    optimizer: str = "AdamW",
    place: bool = False,
    seed: int = 0,
    num_blocks: int = 3,
    **settings: Any,
) -> Run:
    """Make a run that has trained nothing; without a budget, in plain PyTorch."""
    torch._dynamo.reset()
    gc.collect()
    torch.manual_seed(seed)
    model: nn.Module = Model(num_blocks).to(dtype)
    compiled: Any = model
    if budget is not None:
        model = chunkc.place(model, home=home) if place else model
        options = {"memory_budget": budget, "home": home, "codegen": codegen, "whole_graph": "never"}
        compiled = torch.compile(model, backend="chunkc", options=options)
    kind = getattr(torch.optim if budget is None else chunkc.optim, optimizer)
    made = kind(model.parameters(), lr=1e-2, **settings)
    return Run(model, compiled, made, torch.optim.lr_scheduler.CosineAnnealingLR(made, 20))


def resumed(folder: Path, **how: Any) -> Run:
    """Make a run that resumes the latest checkpoint; its model and generators had other values before."""
    run = begin(seed=12345, **how)
    assert run.checkpoint(folder).load_latest() is not None
    return run
