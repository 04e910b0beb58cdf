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


def falcon_mamba() -> nn.Module:
    from transformers import FalconMambaConfig, FalconMambaForCausalLM

    return FalconMambaForCausalLM(FalconMambaConfig(
        vocab_size=128, hidden_size=WIDTH, num_hidden_layers=2, state_size=4, intermediate_size=64, time_step_rank=4,
        use_cache=False, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    ))  # fmt: skip


def losses(make: Any, options: dict[str, Any] | None, region: bool, batches: list[dict[str, Tensor]]) -> list[Tensor]:
    """Losses and gradients of a step with each batch; by eager PyTorch without options."""
    torch._dynamo.reset()
    gc.collect()
    torch.manual_seed(0)
    model = make().train()
    call = model if options is None else torch.compile(model, backend="chunkc", options=options)
    torch.manual_seed(1)
    found: list[Tensor] = []
    for batch in batches:
        with torch.autocast("cpu", torch.bfloat16, enabled=region):
            output = call(**batch)
        loss = output if isinstance(output, Tensor) else output.loss
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        model.zero_grad(set_to_none=True)
    return found


def check(make: Any, codegen: str, region: bool, batches: list[dict[str, Tensor]]) -> None:
    """Equal bits in a large and a small budget; with eager segments, the losses of eager PyTorch."""

    def trained(budget: int) -> list[Tensor]:
        options = {"codegen": codegen, "memory_budget": budget, "whole_graph": "never", "chunk_size": 4096}
        return losses(make, options, region, batches)

    free, tight = trained(HUGE), in_a_small_budget(trained)
    assert all(torch.equal(a, b) for a, b in zip(free, tight, strict=True))
    expected = losses(make, None, region, batches)
    if codegen == "eager":
        for found, wanted in zip(free, expected, strict=True):
            if found.dim() == 0:
                torch.testing.assert_close(found, wanted, rtol=2e-2 if region else 1e-4, atol=1e-5)


@pytest.mark.second_tier
@pytest.mark.parametrize("region", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("codegen", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_mapped_functions_in_several_sizes(codegen: str, region: bool) -> None:
    check(Mapped, codegen, region, [{"x": torch.randn(batch, 6 + batch, WIDTH)} for batch in (3, 5, 7)])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("region", [False, True])
@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_falcon_mamba(codegen: str, region: bool) -> None:
    tokens = torch.randint(0, 128, (2, 12), generator=torch.Generator().manual_seed(0))
    check(falcon_mamba, codegen, region, [{"input_ids": tokens, "labels": tokens}])
