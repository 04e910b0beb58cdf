"""No view, cast or copy of a parameter is saved for the backward; what is computed stays the same."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn
from torch._functorch.aot_autograd import aot_function

from chunkc.passes.graphs import is_compute, op_name, placeholders, returned, storage_keys
from chunkc.passes.partition import partition

MOVES = (
    "view",
    "t",
    "transpose",
    "permute",
    "expand",
    "unsqueeze",
    "squeeze",
    "slice",
    "select",
    "clone",
    "alias",
)
CASTS = ("_to_copy", "convert_element_type", "to")


class Transposed(nn.Module):
    """Uses one parameter through a chain of views, and another through a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64))
        self.scale = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.view(8, 8).t()[:, :8]
        return torch.tanh(torch.tanh(x @ weight) @ self.scale.clone()).sum()


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.layers(x).float().sum()


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).sum()


def from_one_parameter(node: fx.Node, parameters: set[fx.Node]) -> bool:
    """Whether a node is one parameter, moved or cast without arithmetic."""
    while is_compute(node) and op_name(node).rpartition(".")[2] in (*MOVES, *CASTS):
        node = node.all_input_nodes[0]
    return node in parameters


def saved_by(model: nn.Module, x: torch.Tensor) -> tuple[list[fx.Node], set[fx.Node], torch.Tensor, list[torch.Tensor]]:
    """What the forward saves, its parameters, the loss and the gradients that the halves compute."""
    names, parameters = zip(*model.named_parameters())
    found: dict[str, object] = {}

    def partition_fn(joint: fx.GraphModule, inputs: object, **kwargs: object) -> tuple:
        flags = [True] * len(parameters) + [False]
        forward, backward = partition(joint, inputs, is_parameter=flags, **kwargs)
        found.update(forward=forward, num_outputs=kwargs["num_fwd_outputs"])
        return forward, backward

    def function(*args: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, dict(zip(names, args[:-1])), (args[-1],))

    compiled = aot_function(function, lambda gm, _: gm.forward, lambda gm, _: gm.forward, partition_fn=partition_fn)
    loss = compiled(*parameters, x)
    gradients = torch.autograd.grad(loss, parameters)
    forward = found["forward"]
    assert isinstance(forward, fx.GraphModule)
    saved = [node for node in returned(forward.graph)[found["num_outputs"] :] if node is not None]
    return saved, set(placeholders(forward.graph)[: len(parameters)]), loss, list(gradients)


@pytest.mark.parametrize("kind", [Transposed, Autocast, Plain])
def test_no_view_or_cast_of_a_parameter_is_saved(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(4, 8)
    saved, parameters, loss, gradients = saved_by(model, x)
    assert saved
    keys = {key for parameter in parameters for key in storage_keys(parameter)}
    for node in saved:
        if node not in parameters:
            assert not from_one_parameter(node, parameters), f"{node} is a parameter moved or cast"
            assert not set(storage_keys(node)) & keys, f"{node} is a view of a parameter"
    expected = model(x)
    torch.testing.assert_close(loss, expected)
    for gradient, reference in zip(gradients, torch.autograd.grad(expected, list(model.parameters()))):
        torch.testing.assert_close(gradient, reference)


def test_a_view_of_a_parameter_that_arithmetic_went_into_may_be_saved() -> None:
    model = Plain()
    saved, parameters, _, _ = saved_by(model, torch.randn(4, 8))
    assert any(node not in parameters and is_compute(node) for node in saved), "activations are saved as ever"
