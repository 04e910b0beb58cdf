"""The gradient that starts a backward: autograd lets go of its own, a caller of `out.backward(g)` keeps `g`."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import chunkc
from chunkc.runtime import cpu_allocator
from chunkc.torch_private.engine import KEEPS_TANGENTS

BATCH, WIDTH = 64, 1024
OUTPUT_NBYTES = 4 * BATCH * WIDTH
LOSS_NBYTES = 2 * 4
"""A loss computed outside the graph, and its gradient: the caller's own, not the plan's."""


class Widening(nn.Module):
    """Its backward is fullest at the first activation, when the output's gradient has been read for the last time."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.second = nn.Linear(WIDTH, 8)
        self.third = nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.silu(nn.functional.silu(self.first(x)) ** 2)
        return self.third(self.second(hidden))


def _peaks(start: Callable[[Tensor], None]) -> tuple[int, int]:
    """Predicted and measured bytes of a run whose backwards are begun by `start`."""
    cpu_allocator.install()
    torch._dynamo.reset()
    gc.collect()
    foreign_nbytes = cpu_allocator.current_nbytes()
    torch.manual_seed(0)
    model = Widening()
    options = {"memory_budget": "8MiB", "codegen": "eager", "whole_graph": "never"}
    compiled = torch.compile(model, backend="chunkc", options=options)
    optimizer = chunkc.optim.AdamW(model.parameters())
    for _ in range(2):  # the first makes the optimizer's states, which are predicted from the start
        start(compiled(torch.randn(BATCH, 8)))
        optimizer.step()
        optimizer.zero_grad()
    report = chunkc.report(compiled)
    return report.predicted_peak_nbytes, report.measured_peak_nbytes - foreign_nbytes


def _backward_of_sum(out: Tensor) -> None:
    (-out).sum().backward()


def _backward_with_gradient(out: Tensor) -> None:
    out.backward(torch.ones(BATCH, WIDTH))


def _backward_with_kept_gradient(out: Tensor) -> None:
    gradient = torch.ones(BATCH, WIDTH)
    torch.autograd.backward([out], [gradient])
    assert gradient.sum() == gradient.numel()


@pytest.mark.parametrize(
    "start", [_backward_with_gradient, _backward_with_kept_gradient], ids=lambda start: start.__name__.strip("_")
)
def test_a_given_gradient_counts(start: Callable[[Tensor], None]) -> None:
    predicted, measured = _peaks(start)
    assert predicted == measured


def test_autograds_own_gradient_is_let_go() -> None:
    predicted, measured = _peaks(_backward_of_sum)
    assert measured - predicted == LOSS_NBYTES


@pytest.mark.skipif(KEEPS_TANGENTS, reason="up to PyTorch 2.12, AOTAutograd holds every gradient that it gives")
def test_a_given_gradient_is_held_throughout() -> None:
    assert _peaks(_backward_with_gradient)[0] - _peaks(_backward_of_sum)[0] == OUTPUT_NBYTES
