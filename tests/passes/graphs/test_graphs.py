"""Small questions about graphs, asked of graphs whose answers are known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from chunkc.ir.hardware import CPU
from chunkc.passes.graphs import graphs
from chunkc.passes.graphs.cost import cost_s, node_flops
from chunkc.passes.graphs.graphs import is_compute


def trace(function, *args: torch.Tensor) -> fx.Graph:
    return make_fx(function, tracing_mode="fake")(*args).graph


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("L['self']._modules['h']._modules['0']._parameters['weight']", "h.0.weight"),
        ("L['self']._modules['encoder.layer']._buffers['mask']", "encoder.layer.mask"),
        ("L['self'].blocks[3].weight", "blocks.3.weight"),
        ("L['fn'].weight", "weight"),
        ("L['self'].__dict__['_modules']['base'].__dict__['_parameters']['weight']", "base.weight"),
        ("G['model']._modules['head']._parameters['bias']", "head.bias"),
        ("L['x']", ""),
        ("", ""),
    ],
)
def test_attribute_path_is_the_users_name(source: str, name: str) -> None:
    assert graphs.attribute_path(source) == name


@pytest.mark.parametrize(
    ("meta", "path"),
    [
        ({}, ""),
        ({"nn_module_stack": {"a": "L['self']", "b": "L['self']._modules['h']._modules['2']"}}, "h.2"),
        ({"nn_module_stack": {"b": "h.3.mlp"}}, "h.3.mlp"),
        ({"fwd_nn_module_stack": {"a": "L['self']._modules['head']"}}, "head"),
    ],
)
def test_module_path_is_the_innermost_module(meta: dict[str, dict[str, str]], path: str) -> None:
    """Of a node of a backward: its forward's."""
    node = trace(lambda x: (x + 1,), torch.ones(2)).find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)[0]
    node.meta.pop("nn_module_stack", None)
    node.meta |= {key: {name: (of, object) for name, of in stack.items()} for key, stack in meta.items()}
    assert graphs.module_path(node) == path


def test_op_name_leaves_out_the_overload() -> None:
    graph = trace(lambda x: (torch.mm(x, x), x.view(-1), torch.var_mean(x)[0]), torch.ones(2, 2))
    names = [graphs.op_name(node) for node in graph.nodes if graphs.is_compute(node)]
    assert names[:3] == ["aten.mm", "aten.view", "aten.var_mean"]
    assert "getitem" in names
    assert graphs.op_name(fx.Graph().get_attr("constant", type_expr=None)) == "constant"


def test_views_share_a_storage_and_results_do_not() -> None:
    graph = trace(lambda x: (x.t(), x + 1, x[0]), torch.ones(3, 4))
    x, view, add, part = graphs.placeholders(graph)[0], *(n for n in graph.nodes if graphs.is_compute(n))
    keys = set(graphs.storage_keys(x))
    assert graphs.is_view_of(view, keys)
    assert not graphs.is_view_of(add, keys)
    assert not graphs.is_view_of(x, keys), "a placeholder is no view"
    for node in (add, part):  # of a slice: those of all of it
        assert [graphs.storage_nbytes(t) for t in graphs.tensors_of(node)] == [48]


def test_a_node_with_several_results_has_all_their_storages() -> None:
    graph = trace(lambda x: tuple(torch.var_mean(x, 0)), torch.ones(3, 4))
    node = next(n for n in graph.nodes if graphs.op_name(n) == "aten.var_mean")
    assert len(set(graphs.storage_keys(node))) == 2
    assert all(graphs.is_getitem(user) for user in node.users)


def test_returned_keeps_the_place_of_nothing() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((None, x))
    assert graphs.returned(graph) == [None, x]
    assert graphs.output_node(graph).op == "output"


def test_inputs_come_once_in_order_of_first_use() -> None:
    graph = trace(lambda a, b, c: ((b + a) * b, c + 1), *(torch.ones(2) for _ in range(3)))
    a, b, c = graphs.placeholders(graph)
    add, mul, other = (node for node in graph.nodes if graphs.is_compute(node))
    assert list(graphs.input_nodes_in_order([add, mul, other])) == [b, a, c]
    assert list(graphs.input_nodes_in_order([mul])) == [add, b]


# ---------------------------------------------------------------- arithmetic counted by hand


def nodes_of(function: Callable[..., object], *inputs: Tensor) -> list[fx.Node]:
    graph = make_fx(function, tracing_mode="fake")(*inputs).graph
    return [node for node in graph.nodes if is_compute(node)]


def flops(function: Callable[..., object], *inputs: Tensor) -> int:
    return sum(node_flops(node) for node in nodes_of(function, *inputs))


HEADS = torch.zeros(2, 4, 16, 8)
PRODUCT_OF_HEADS = 2 * 4 * (2 * 16 * 16 * 8)
ROWS, MATRICES = torch.zeros(12, 16, dtype=torch.bfloat16), torch.zeros(3, 16, 32, dtype=torch.bfloat16)


def attention_and_its_gradient(q: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(F.scaled_dot_product_attention(q, q, q).sum(), q)
    return grad


FLOPS: dict[str, tuple[Callable[..., object], tuple[Tensor, ...], int]] = {
    "a matrix product": (torch.mm, (torch.zeros(3, 5), torch.zeros(5, 7)), 2 * 3 * 5 * 7),
    "attention is two products per head": (F.scaled_dot_product_attention, (HEADS,) * 3, 2 * PRODUCT_OF_HEADS),
    "its backward is five": (attention_and_its_gradient, (HEADS.clone().requires_grad_(),), (2 + 5) * PRODUCT_OF_HEADS),
    "grouped rows meet one matrix each": (
        lambda a, b, ends: torch._grouped_mm(a, b, offs=ends),
        (ROWS, MATRICES, torch.tensor([4, 8, 12], dtype=torch.int32)),
        2 * 12 * 16 * 32,
    ),
}


@pytest.mark.parametrize("name", FLOPS)
def test_products_are_counted(name: str) -> None:
    function, inputs, expected = FLOPS[name]
    assert flops(function, *inputs) == expected


@pytest.mark.parametrize("function", [torch.relu, torch.exp])
def test_what_is_no_product_costs_its_bytes(function: Callable[[Tensor], Tensor]) -> None:
    machine = replace(CPU, flops_per_s=1e30, memory_bytes_per_s=4000.0)
    assert flops(function, torch.zeros(1000)) == 0
    assert cost_s(nodes_of(function, torch.zeros(1000)), machine) == pytest.approx(1.0)
