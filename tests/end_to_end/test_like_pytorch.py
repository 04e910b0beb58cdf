"""Models beside plain PyTorch: with `torch.func` transforms inside; `nn.TransformerEncoder` and `nn.TransformerDecoder`
with a mask and no `is_causal`, which are one graph; and the whole ladder, inside a hard limit.
"""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import HUGE, TINY, TRACING_NBYTES, Result, in_a_small_budget, train, train_steps
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from zoo import LADDER, Case

import chunkc

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


# ---------------------------------------------------------------- masks of transformers

LENGTH, SIZE = 8, 16
CAUSAL = nn.Transformer.generate_square_subsequent_mask(LENGTH)
MASKS = {
    "causal": CAUSAL,
    "wider": torch.full((LENGTH, LENGTH), float("-inf")).triu(2),
    "boolean": CAUSAL.isinf(),
    "of heads": CAUSAL.expand(4, LENGTH, LENGTH).contiguous(),
}


class Model(nn.Module):
    """An encoder before a decoder; masks are arguments, or the model's own, or made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.mask: Tensor | None = None
        torch.manual_seed(0)
        arguments: dict[str, Any] = {"dropout": 0.0, "batch_first": True}
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(SIZE, 2, 32, **arguments), 1)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(SIZE, 2, 32, **arguments), 1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        mask = self.mask if mask is None else mask
        if mask is None:
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        memory = self.encoder(x, mask=mask)
        return self.decoder(x, memory, tgt_mask=mask)


def compiled(model: nn.Module, **options: Any) -> Any:
    options = {"memory_budget": 2**30, "codegen": "eager"} | options
    return torch.compile(model, backend="chunkc", options=options, fullgraph=True)


def rows(length: int = LENGTH) -> Tensor:
    return torch.randn(2, length, SIZE, generator=torch.Generator().manual_seed(length))


def trained(model: nn.Module, call: Any, *arguments: Tensor) -> list[Tensor]:
    model.zero_grad()
    out = call(*arguments)
    out.square().mean().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.quick(3)
@pytest.mark.parametrize("mask", [None, *MASKS])
def test_the_bits_are_those_of_plain_pytorch(mask: str | None) -> None:
    model = Model()
    given = () if mask is None else (MASKS[mask],)
    found, expected = trained(model, compiled(model), rows(), *given), trained(model, model, rows(), *given)
    assert all(map(torch.equal, found, expected))
    assert chunkc.report(model).num_chunks > 1


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 3])
def test_other_lengths_are_answered_for_themselves(window: int | None) -> None:
    """A mask that happens to be causal is applied like others: a window is as wide as short sequences are."""
    model = Model()
    call = compiled(model)
    for length in (8, 5, 6, 8) if window is None else (LENGTH, LENGTH + 1, window):
        masks = () if window is None else (torch.ones(length, length).tril().triu(1 - window).log(),)
        found, expected = call(rows(length), *masks), model(rows(length), *masks)
        torch.testing.assert_close(found, expected)
        assert masks or torch.equal(found, expected)


def test_a_mask_that_is_no_longer_causal_is_an_error() -> None:
    """Never the bits of a mask that was left out."""
    model = Model()
    call = compiled(model)
    assert torch.equal(call(rows(), CAUSAL), model(rows(), CAUSAL))
    with pytest.raises(RuntimeError, match=r"was causal.*is_causal=True or False"):
        call(rows(), MASKS["wider"])
    assert torch.equal(call(rows(), CAUSAL.clone()), model(rows(), CAUSAL))


@pytest.mark.quick(0, second=1)
@pytest.mark.parametrize("name", ["causal", "wider"])
def test_inductor_compiles_it(name: str) -> None:
    model = Model()
    call = compiled(model, codegen="inductor")
    torch.testing.assert_close(call(rows(), MASKS[name]), model(rows(), MASKS[name]))
    if name == "causal":
        with pytest.raises(RuntimeError, match="is_causal=True or False"):
            call(rows(), MASKS["wider"])
    else:
        torch.testing.assert_close(call(rows(), CAUSAL), model(rows(), CAUSAL))


@pytest.mark.quick(3)
@pytest.mark.parametrize("mask", [None, "attribute", *MASKS])
def test_an_explanation_answers_as_training_does(mask: str | None) -> None:
    """On fake tensors: of masks that are arguments, belong to the model, or are made inside."""
    given = (MASKS[mask],) if mask in MASKS else ()

    def made() -> Model:
        model = Model()
        model.mask = CAUSAL if mask == "attribute" else None
        return model

    explained = chunkc.explain(made(), rows(), *given, memory_budget=2**30, codegen="eager")
    with pytest.raises(chunkc.BudgetError) as error:
        compiled(made(), memory_budget=explained.minimum_budget_nbytes - 1)(rows(), *given)
    assert error.value.minimum_nbytes == explained.minimum_budget_nbytes
    assert error.value.minimum_nbytes > sum(p.nbytes for p in made().encoder.parameters())


def test_an_explanation_says_that_it_needs_the_values_of_a_mask() -> None:
    with pytest.raises(chunkc.UnsupportedError, match=r"needs the values of tensors.*encoder \(TransformerEncoder\)"):
        chunkc.explain(Model(), rows(), CAUSAL.to("meta"), memory_budget=2**30, codegen="eager")


def test_other_backends_break_the_graph_as_before() -> None:
    model = Model()
    with pytest.raises(TorchDynamoException):
        torch.compile(model, backend="aot_eager", fullgraph=True)(rows(), CAUSAL)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(model, backend="aot_eager")(rows(), CAUSAL), model(rows(), CAUSAL))


# ---------------------------------------------------------------- losses of the ladder

STEPS = 3
SECOND_TIER = ("sometimes_unused", "graph_breaks")


def plain_losses(case: Case) -> list[np.ndarray]:
    """What the loop of `harness.train` gives in plain PyTorch."""
    model = case.build(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    torch.manual_seed(0)
    return train_steps(case, model, optimizer, range(STEPS))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.second_tier if n in SECOND_TIER else pytest.mark.slow) for n in LADDER]
)
def test_losses_are_those_of_plain_pytorch(name: str) -> None:
    case = LADDER[name]

    def run(budget: int) -> Result:  # a batch alone is more than the first, which asks for the smallest
        return train(case, memory_budget=budget, limit=budget > 2 * TINY, steps=STEPS, whole_graph="never")

    found = in_a_small_budget(run)
    assert found.measured_peak_nbytes <= found.predicted_peak_nbytes + TRACING_NBYTES
    tolerance = 2e-2 if "autocast" in name else 1e-3  # bf16 has 8 bits
    np.testing.assert_allclose(found.losses, plain_losses(case), rtol=tolerance)
