"""A caller who keeps ever more values: residents leave for them, then a graph that was whole is cut; it trains on."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from harness import session_of
from torch import Tensor, nn

import chunkc
from chunkc.runtime.device import cpu_allocator

BUDGET_NBYTES = 8_600_000  # whole and all resident at first
NUM_STEPS = 32


class Block(nn.Module):
    """A residual layer, one chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(x))


class Stack(nn.Module):
    """A loss, and the rows that it is of."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            x = block(x)
        return x.square().mean(), x


def train(codegen: str, budget_nbytes: int, *, keeping: bool) -> tuple[list[tuple[int, int, int]], list[Any]]:
    """Per step: bytes at most, groups that stay, calls of the forward. And losses and weights."""
    torch._dynamo.reset()
    gc.collect()
    torch.manual_seed(0)
    foreign_nbytes = cpu_allocator.current_nbytes()
    model = Stack()
    options = {"memory_budget": budget_nbytes, "codegen": codegen, "whole_graph": "auto", "activations": "keep"}
    call = torch.compile(model, backend="chunkc", options=options)
    optimizer = chunkc.optim.AdamW(model.parameters(), lr=1e-3)
    steps, results, kept = [], [], []
    for number in range(NUM_STEPS):
        x = torch.randn(128, 256, generator=torch.Generator().manual_seed(number))
        cpu_allocator.reset_peak()
        loss, rows = call(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        session = session_of(model)
        peak_nbytes = cpu_allocator.peak_nbytes() - foreign_nbytes
        steps.append(
            (peak_nbytes, len(session.store.resident), len(session.records.latest["forward"].measurement.peaks))
        )
        results.append(loss.item())
        if keeping:
            kept.append(rows.detach())
        del x, loss, rows
    return steps, [*results, *(p.detach().clone() for p in model.parameters())]


@pytest.mark.second_tier
@pytest.mark.parametrize("codegen", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_whole_graph_is_cut_in_the_end(codegen: str) -> None:
    cpu_allocator.install()
    steps, results = train(codegen, BUDGET_NBYTES, keeping=True)
    peaks, residents, calls = zip(*steps, strict=True)
    assert max(peaks) <= BUDGET_NBYTES
    assert (residents[0], calls[0]) == (6, 1)
    assert list(residents) == sorted(residents, reverse=True)
    assert 1 in calls[residents.index(4) :]  # some have left a graph that is whole still
    assert (residents[-1], calls[-1]) == (0, 6)
    _, expected = train(codegen, 1 << 30, keeping=False)
    for found, reference in zip(results, expected, strict=True):
        torch.testing.assert_close(found, reference, rtol=0.0 if codegen == "eager" else 1e-5, atol=0.0)
