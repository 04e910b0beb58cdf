"""Models with `torch.func` transforms inside train like any other."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import HUGE, in_a_small_budget
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

WIDTH = 32


class Mapped(nn.Module):
    """A loss of gradients per row, a mask made of positions, and several weights for one input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.several = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 8)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1])
        causal = torch.func.vmap(lambda i: torch.func.vmap(lambda j: i >= j)(positions))(positions)
        rows = torch.func.vmap(lambda row: torch.tanh(self.first(row / 128)))(x)
        slopes = torch.func.vmap(torch.func.grad(lambda row: (row.float() ** 3 / 3).sum()))(rows)
        mixed = causal.to(slopes.dtype) @ F.dropout(self.second(slopes), 0.1, self.training)
        return torch.func.vmap(lambda weight: mixed @ weight.to(mixed.dtype))(self.several).float().square().mean()


def steps(options: dict[str, Any] | None, region: bool) -> list[Tensor]:
    """Losses and gradients of steps with batches of several sizes; by eager PyTorch without options."""
    torch._dynamo.reset()
    gc.collect()
    torch.manual_seed(0)
    model = Mapped().train()
    call = model if options is None else torch.compile(model, backend="chunkc", options=options)
    torch.manual_seed(1)
    found: list[Tensor] = []
    for batch in (3, 5, 7):
        x = torch.randn(batch, 6 + batch, WIDTH, generator=torch.Generator().manual_seed(batch))
        with torch.autocast("cpu", torch.bfloat16, enabled=region):
            loss = call(x)
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        model.zero_grad(set_to_none=True)
    return found


@pytest.mark.second_tier
@pytest.mark.parametrize("region", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("codegen", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_mapped_functions_in_several_sizes(codegen: str, region: bool) -> None:
    """Equal bits in a large and a small budget; with eager segments, the losses of eager PyTorch."""

    def trained(budget: int) -> list[Tensor]:
        options = {"codegen": codegen, "memory_budget": budget, "whole_graph": "never", "chunk_size": 4096}
        return steps(options, region)

    free = trained(HUGE)
    assert all(map(torch.equal, free, in_a_small_budget(trained)))
    for found, wanted in zip(free, steps(None, region), strict=True):
        if codegen == "eager" and found.dim() == 0:
            torch.testing.assert_close(found, wanted, rtol=2e-2 if region else 1e-4, atol=1e-5)
