"""Regions of the user's that are to be compiled once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import chunkc
from chunkc.passes.graphs.graphs import is_compute, module_path
from chunkc.passes.rewrite.regions import renamed_modules, write_out_regions
from chunkc.tracing.names import GraphNames, UserNames

region = torch.compiler.nested_compile_region


@region
def halved(x: Tensor) -> Tensor:
    return x * 0.5 + torch.tensor([0.25])


@region
def block(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.tanh(layer(halved(x))) + halved(x), x.mean()


class Regions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, mean = block(layer, x)
            x = x + mean
        return checkpoint(lambda x: halved(halved(x)).sin(), x, use_reentrant=False)


@pytest.mark.usefixtures("fresh_dynamo")
def test_regions_are_written_out_where_they_are_called() -> None:
    called = torch.ops.higher_order.invoke_subgraph
    seen: list[int] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        given = [value.clone() for value in inputs]
        expected = torch.fx.Interpreter(gm).run(*given)
        seen.append(len(gm.graph.find_nodes(op="call_function", target=called)))
        write_out_regions(gm)
        gm.graph.lint()
        seen.append(len(gm.graph.find_nodes(op="call_function", target=called)))
        torch.testing.assert_close(gm(*given), expected, rtol=0, atol=0)
        return gm.forward

    with torch.no_grad():
        torch.compile(Regions(), backend=backend)(torch.randn(4, 16))
    assert seen[0] > 1
    assert seen[1] == 0


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("grad", [True, False])
def test_models_with_regions_train(grad: bool) -> None:
    model, x = Regions(), torch.randn(4, 16)
    compiled = torch.compile(model, backend="chunkc", options={"codegen": "eager", "whole_graph": "never"})
    with torch.set_grad_enabled(grad):
        found, expected = compiled(x), model(x)
    torch.testing.assert_close(found, expected)
    if grad:
        gradients = torch.autograd.grad(expected.sum(), list(model.parameters()))
        found.sum().backward()
        torch.testing.assert_close([p.grad for p in model.parameters()], list(gradients))
    assert chunkc.report(compiled).minimum_budget_nbytes


def test_renamed_modules() -> None:
    traced = ["", "blocks.0.up.weight", "blocks.0.up.bias", "blocks.0.scale", "head.weight"]
    called = ["", "blocks.3.up.weight", "blocks.3.up.bias", "blocks.3.scale", "head.weight"]
    assert renamed_modules(traced, called) == {"blocks.0": "blocks.3"}
    assert renamed_modules(traced, traced) == {}


@pytest.mark.usefixtures("fresh_dynamo")
def test_operations_are_named_after_the_modules_of_their_call() -> None:
    model = Regions()
    names: list[str] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        GraphNames(gm).take(inputs, UserNames.seen_from(model))
        write_out_regions(gm)
        names.extend(dict.fromkeys(module_path(node) for node in gm.graph.nodes if is_compute(node)))
        return gm.forward

    torch.compile(model, backend=backend)(torch.randn(4, 16))
    assert [name for name in names if name] == ["layers.0", "layers.1", "layers.2"]
