"""What an optimizer updates outside of the plan is said once."""

from __future__ import annotations

import pytest
import torch
from harness import HUGE, take_step
from torch import nn

import chunkc


@torch.compiler.disable
def looked_up(words: nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
    return words(ids)


class Reader(nn.Module):
    """Words are looked up by eager code, or by the graph."""

    def __init__(self, *, eager: bool) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(64, 32), nn.Linear(32, 32)
        self.look_up = looked_up if eager else nn.Embedding.__call__

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.look_up(self.words, ids))


def warnings(caplog: pytest.LogCaptureFixture, optimizer: type, *, eager: bool, frozen: bool = False) -> list[str]:
    torch._dynamo.reset()
    caplog.clear()
    model = Reader(eager=eager)
    model.words.requires_grad_(not frozen)
    compiled = torch.compile(model, backend="chunkc", options={"memory_budget": HUGE, "codegen": "eager"})
    chosen = optimizer(model.parameters(), lr=0.1)
    for _ in range(3):
        take_step(compiled(torch.arange(8)).square().sum(), chosen)
    return [record.getMessage() for record in caplog.records if "no compiled graph" in record.getMessage()]


@pytest.mark.parametrize("optimizer", [chunkc.optim.SGD, torch.optim.SGD])
def test_parameters_that_no_graph_takes_are_named_once(caplog: pytest.LogCaptureFixture, optimizer: type) -> None:
    (said,) = warnings(caplog, optimizer, eager=True)
    assert said.startswith("no compiled graph takes words.weight: 8.00 KiB (8,192 bytes) of parameters are outside")
    assert warnings(caplog, optimizer, eager=False) == []


def test_frozen_ones_are_not_trained(caplog: pytest.LogCaptureFixture) -> None:
    assert warnings(caplog, chunkc.optim.SGD, eager=True, frozen=True) == []


def test_a_model_that_is_not_compiled_is_not_chunkc_s(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(4, 4)
    optimizer = chunkc.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert not caplog.records
