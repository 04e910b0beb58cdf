"""Tracing leaves nothing in the compute tier: what is charged after the first step is what the step made."""

from __future__ import annotations

import gc

import torch
from torch import Tensor, nn

import chunkc.backend  # noqa: F401  (what loading allocates comes before the count)
from chunkc.runtime import cpu_allocator


class Scaled(nn.Module):
    """PyTorch makes tensors of the numbers while Dynamo traces, and its autograd nodes keep them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) / 128).pow(2).sum() / 3


def test_numbers_in_the_traced_code_are_not_kept() -> None:
    cpu_allocator.install()
    torch._dynamo.reset()
    model, x = Scaled(), torch.randn(4, 8)
    gc.collect()
    before = cpu_allocator.current_nbytes()
    compiled = torch.compile(model, backend="chunkc", options={"memory_budget": 1 << 30, "codegen": "eager"})
    compiled(x).backward()
    model.zero_grad(set_to_none=True)
    gc.collect()
    assert cpu_allocator.current_nbytes() == before
