"""Small engines, and plain loops to compare them with."""

from __future__ import annotations

from typing import Any

import torch
from harness import kept
from optim_models import BUDGET_NBYTES, MLP, batch
from torch import Tensor, nn

import chunkc
from chunkc.engine import Engine

EPS = 1e-4
"""Of Adam: its first updates then depend on how large gradients are."""

LR = 1e-2


PATRICKSTARS: dict[str, Any] = {
    "optimizer": {
        "type": "Adam",
        "params": {"lr": 0.001, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0, "use_hybrid_adam": True},
    },
    "fp16": {
        "enabled": True, "loss_scale": 0, "initial_scale_power": 2**3, "loss_scale_window": 1000, "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "default_chunk_size": 64 * 1024 * 1024, "release_after_init": True, "use_cpu_embedding": False,
    "client": {"mem_tracer": {"use_async_mem_monitor": True}},
}  # fmt: skip
"""PatrickStar's README."""


def small_model() -> MLP:
    """Make the same small model at each call."""
    torch.manual_seed(0)
    return MLP()


def config(**changes: Any) -> dict[str, Any]:
    """Return a configuration in which no weight can stay on the compute tier."""
    found: dict[str, Any] = {
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "eps": EPS}},
        "chunkc": {"memory_budget": BUDGET_NBYTES, "codegen": "eager", "whole_graph": "never"},
    }
    return found | changes


def engine(**changes: Any) -> tuple[Engine, torch.optim.Optimizer]:
    """Make an engine of the small model."""
    return chunkc.initialize_engine(small_model, 0, config(**changes))


def take_steps(model: Engine, steps: range, dtype: torch.dtype = torch.float32) -> None:
    """Train as DeepSpeed's loop does."""
    for step in steps:
        model.backward(model(batch(step, dtype)))
        model.step()


def weights(model: nn.Module) -> list[Tensor]:
    return [kept(p) for p in model.parameters()]


def assert_same(left: list[Tensor], right: list[Tensor]) -> None:
    assert len(left) == len(right) > 0
    assert all(torch.equal(a, b) for a, b in zip(left, right))


def assert_close(left: list[Tensor], right: list[Tensor], rtol: float = 1e-4, atol: float = 2e-6) -> None:
    assert len(left) == len(right) > 0
    for a, b in zip(left, right):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


class Masters:
    """A plain mixed-precision loop: a 16-bit model, fp32 masters under `torch.optim`, gradients unscaled in fp32."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.model = small_model()
        self.masters = [nn.Parameter(p.detach().clone()) for p in self.model.parameters()]
        self.model.to(dtype)
        # a master begins as its 16-bit parameter
        for master, p in zip(self.masters, self.model.parameters()):
            master.data.copy_(p.detach().float())
        self.optimizer = torch.optim.AdamW(self.masters, lr=LR, eps=EPS, weight_decay=0.0)

    def step(self, scale: float = 1.0, max_norm: float = 0.0) -> float:
        """Update, clear the gradients, and return their norm."""
        for master, p in zip(self.masters, self.model.parameters()):
            assert p.grad is not None
            master.grad = p.grad.float() / scale
        norm = float(nn.utils.clip_grad_norm_(self.masters, max_norm or float("inf")))
        self.optimizer.step()
        for master, p in zip(self.masters, self.model.parameters()):
            p.data.copy_(master.detach())
            p.grad = None
        return norm


def plain(num_steps: int, accumulate: int = 1, clip: float = 0.0, scheduled: bool = False) -> list[torch.Tensor]:
    """Train the small model in plain PyTorch, as the engine does."""
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step if scheduled else 1.0)
    for step in range(num_steps):
        for part in range(accumulate):
            (model(batch(step * accumulate + part)) / accumulate).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return weights(model)
