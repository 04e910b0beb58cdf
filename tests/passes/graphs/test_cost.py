"""Arithmetic counted by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from chunkc.ir.hardware import CPU
from chunkc.passes.graphs.cost import cost_s, node_flops
from chunkc.passes.graphs.graphs import is_compute


def nodes_of(function: Callable[..., object], *inputs: Tensor) -> list[fx.Node]:
    graph = make_fx(function, tracing_mode="fake")(*inputs).graph
    return [node for node in graph.nodes if is_compute(node)]


def flops(function: Callable[..., object], *inputs: Tensor) -> int:
    return sum(node_flops(node) for node in nodes_of(function, *inputs))


def test_a_matrix_product() -> None:
    assert flops(torch.mm, torch.zeros(3, 5), torch.zeros(5, 7)) == 2 * 3 * 5 * 7


def test_attention_is_two_products_per_head() -> None:
    query = torch.zeros(2, 4, 16, 8)
    assert flops(F.scaled_dot_product_attention, query, query, query) == 2 * 4 * 2 * (2 * 16 * 16 * 8)


def test_attention_backward_counts_five_products() -> None:
    query = torch.zeros(2, 4, 16, 8, requires_grad=True)

    def step(q: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad(F.scaled_dot_product_attention(q, q, q).sum(), q)
        return grad

    assert flops(step, query) == 2 * 4 * (2 + 5) * (2 * 16 * 16 * 8)


def test_grouped_rows_meet_one_matrix_each() -> None:
    rows, matrices = torch.zeros(12, 16, dtype=torch.bfloat16), torch.zeros(3, 16, 32, dtype=torch.bfloat16)
    ends = torch.tensor([4, 8, 12], dtype=torch.int32)
    assert flops(lambda a, b, e: torch._grouped_mm(a, b, offs=e), rows, matrices, ends) == 2 * 12 * 16 * 32


@pytest.mark.parametrize("function", [torch.relu, torch.exp])
def test_what_is_no_product_costs_its_bytes(function: Callable[[Tensor], Tensor]) -> None:
    machine = replace(CPU, flops_per_s=1e30, memory_bytes_per_s=4000.0)
    assert flops(function, torch.zeros(1000)) == 0
    assert cost_s(nodes_of(function, torch.zeros(1000)), machine) == pytest.approx(1.0)
