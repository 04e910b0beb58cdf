"""No view, cast or copy of a parameter is saved for the backward; what is computed stays the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._functorch.aot_autograd import aot_function
from torch._subclasses import FakeTensorMode

from chunkc.passes.graphs.graphs import is_compute, op_name, placeholders, returned, storage_keys
from chunkc.passes.rewrite.partition import hoist_for_backward
from chunkc.passes.rewrite.runner import Graphs
from chunkc.tracing.passes import CUT_JOINT, OF_PHASES, JointContext, TraceContext, run

MOVES = (
    "view", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "slice", "select", "clone", "alias",
)  # fmt: skip
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


class Quantized(nn.Module):
    """Frozen codes and scales that make a weight, a frozen weight that is multiplied by another, and an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randint(-9, 9, (8, 8), dtype=torch.int8), requires_grad=False)
        self.scale = nn.Parameter(torch.rand(8, 1), requires_grad=False)
        self.product = nn.Parameter(torch.randn(8, 8), requires_grad=False)
        self.adapter = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = torch.sin(self.codes * self.scale)
        return torch.tanh(torch.tanh(x @ self.adapter) @ weight @ (self.product @ self.product)).sum()


class Experts(nn.Module):
    """Layers of experts, whose gradients read what goes into each grouped product transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.randn(2, 16, 16).bfloat16()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ends = torch.tensor([8, 16], dtype=torch.int32, device=x.device)
        for weight in self.layers:
            x = nn.functional.silu(nn.functional.grouped_mm(x, weight, offs=ends))
        return x.float().sum()


def from_one_parameter(node: fx.Node, parameters: set[fx.Node]) -> bool:
    """Whether a node is one parameter, moved or cast without arithmetic."""
    while is_compute(node) and op_name(node).rpartition(".")[2] in (*MOVES, *CASTS):
        node = node.all_input_nodes[0]
    return node in parameters


def saved_by(model: nn.Module, x: torch.Tensor) -> tuple[list[fx.Node], set[fx.Node], torch.Tensor, list[torch.Tensor]]:
    """What the forward saves, its parameters, the loss and the gradients that the halves compute."""
    names, parameters = zip(*model.named_parameters())
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    found: dict[str, object] = {}

    def partition_fn(joint: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Graphs:
        frozen = [not parameter.requires_grad for parameter in parameters] + [False]
        capture = TraceContext([*names, None], frozen, 1, "eager", None, num_user_outputs=1)
        forward, backward = run((*CUT_JOINT, *OF_PHASES), (joint,), JointContext(capture, inputs, kwargs))
        found.update(forward=forward, num_outputs=kwargs["num_fwd_outputs"])
        return forward, backward

    def function(*args: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, dict(zip(names, args[:-1])), (args[-1],))

    compiled = aot_function(function, lambda gm, _: gm.forward, lambda gm, _: gm.forward, partition_fn=partition_fn)
    loss = compiled(*parameters, x)
    gradients = torch.autograd.grad(loss, trainable)
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


def test_what_frozen_parameters_give_is_computed_again_but_for_their_products() -> None:
    model, x = Quantized(), torch.randn(4, 8)
    saved, parameters, _, (gradient,) = saved_by(model, x)
    of_weights = [node for node in saved if node not in parameters and tuple(node.meta["val"].shape) == (8, 8)]
    (node,) = of_weights
    product = node if op_name(node) == "aten.mm" else node.all_input_nodes[0]
    assert op_name(product) == "aten.mm", "a product of weights costs more than the room that it takes"
    assert parameters.issuperset(product.all_input_nodes)
    torch.testing.assert_close(gradient, torch.autograd.grad(model(x), [model.adapter])[0])


def test_what_only_the_backward_reads_is_made_where_it_can_be() -> None:
    """Else the last segment would read all layers' values."""
    saved, _, _, _ = saved_by(Experts(), torch.randn(16, 16).bfloat16())
    views = [node for node in saved if op_name(node) == "aten.transpose" and is_compute(node.all_input_nodes[0])]
    assert len(views) == 2
    for view in views:
        assert view.prev is view.all_input_nodes[0], f"{view} comes late"


def test_a_mask_is_made_beside_what_it_is_made_of_and_nothing_that_may_be_larger() -> None:
    graph = fx.Graph()
    with FakeTensorMode():
        x, wide = torch.empty(4, 8), torch.empty(4, 8, dtype=torch.float64)
    names = iter(("x", "relu", "sin", "le", "larger"))

    def call(target: object, *args: object, of: torch.Tensor, **kwargs: object) -> fx.Node:
        node = graph.create_node("call_function", target, args, kwargs, next(names))
        node.meta["val"] = of.clone()
        return node

    given = graph.placeholder(next(names))
    given.meta["val"] = x
    relu = call(torch.ops.aten.relu.default, given, of=x)
    sin = call(torch.ops.aten.sin.default, relu, of=x)
    mask = call(torch.ops.aten.le.Scalar, relu, 0, of=x > 0)
    larger = call(torch.ops.aten._to_copy.default, relu, of=wide, dtype=torch.float64)
    graph.output((sin, mask, larger))
    hoist_for_backward(graph)
    assert [node.name for node in graph.nodes] == ["x", "relu", "le", "sin", "larger", "output"]


def test_what_writes_and_where_ranks_meet_is_not_moved() -> None:
    """Moved, a copy into an input would change what a later reader of it sees."""
    graph = fx.Graph()
    with FakeTensorMode():
        value = torch.empty(4, 8)
    given = graph.placeholder("x")
    given.meta["val"] = value

    def call(name: str, target: object, *args: object) -> fx.Node:
        node = graph.create_node("call_function", target, args, {}, name)
        node.meta["val"] = args[0].meta["val"] if target is torch.ops.aten.copy_.default else value.clone()  # type: ignore[attr-defined]
        return node

    made = call("made", torch.ops.aten.sin.default, given)
    read = call("read", torch.ops.aten.cos.default, given)
    call("written", torch.ops.aten.copy_.default, given, made)
    total = call("total", torch.ops._c10d_functional.all_reduce.default, made, "sum", "0")
    graph.output((read, total))
    before = [node.name for node in graph.nodes]
    hoist_for_backward(graph)
    assert [node.name for node in graph.nodes] == before


def test_a_check_stays_and_what_reads_a_mask_comes_after_it() -> None:
    """Both mask and product are made beside `relu`, which the product reads first; a check returns nothing."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    relu = graph.call_function(torch.ops.aten.relu.default, (x,))
    sin = graph.call_function(torch.ops.aten.sin.default, (relu,))
    mask = graph.call_function(torch.ops.aten.le.Scalar, (relu, 0))
    product = graph.call_function(torch.ops.aten.mul.Tensor, (relu, mask))
    check = graph.call_function(torch.ops.aten._assert_async.msg, (sin, "negative"))
    with FakeTensorMode():
        for node in (x, relu, sin, mask, product):
            node.meta["val"] = torch.empty(4, 8, dtype=torch.bool if node is mask else torch.float32)
    graph.output((sin, mask, product))
    hoist_for_backward(graph)
    graph.lint()
    assert list(graph.nodes)[:4] == [x, relu, mask, product]
    assert check in graph.nodes


def test_a_view_of_a_parameter_that_arithmetic_went_into_may_be_saved() -> None:
    model = Plain()
    saved, parameters, _, _ = saved_by(model, torch.randn(4, 8))
    assert any(node not in parameters and is_compute(node) for node in saved), "activations are saved as ever"
