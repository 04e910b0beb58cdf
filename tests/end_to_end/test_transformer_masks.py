"""`nn.TransformerEncoder` and `nn.TransformerDecoder` with a mask and no `is_causal` are one graph, with the bits of
PyTorch's own answer to whether the mask is causal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException

import chunkc

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

LENGTH, WIDTH = 8, 16
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
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 32, **arguments), 1)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, 2, 32, **arguments), 1)

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
    return torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(length))


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
