"""What autograd keeps, a hook makes or the user gives is counted: retained graphs, gradients that a hook returned, and
the user's own ones. PyTorch's order of additions is kept."""

from __future__ import annotations

import gc
from collections.abc import Callable

import optim_models
import pytest
import torch
from harness import HUGE, array, differences
from torch import Tensor, nn

import chunkc
from chunkc.runtime.device import cpu_allocator

SCALARS_NBYTES = 4096
"""More than the losses and tangents of a second backward, which no plan counts."""


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def backward_twice(model: Residual, call: Callable[[Tensor], Tensor], x: Tensor, step: int) -> None:
    loss = call(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def backward_with_a_hook(model: Residual, call: Callable[[Tensor], Tensor], x: Tensor, step: int) -> None:
    handle = model.layers[1][0].weight.register_hook(lambda grad: grad * 2) if step > 1 else None
    call(x).square().mean().backward()
    if handle is not None:
        handle.remove()


def give_gradients(model: Residual) -> list[Tensor]:
    """Own tensors, as large as all else in the budget; whoever has the list holds them."""
    weights = [layer[index].weight for layer in model.layers for index in (0, 2)]
    for weight in weights:
        weight.grad = torch.full_like(weight, 0.01)
    return [weight.grad for weight in weights]


def backward_onto_own_gradients(model: Residual, call: Callable[[Tensor], Tensor], x: Tensor, step: int) -> None:
    held = give_gradients(model)
    call(x).square().mean().backward()
    assert all(p.grad is None or p.dim() == 1 or any(p.grad is g for g in held) for p in model.parameters())


def backward_onto_later_gradients(model: Residual, call: Callable[[Tensor], Tensor], x: Tensor, step: int) -> None:
    loss = call(x).square().mean()
    held = give_gradients(model)
    loss.backward()
    assert all(p.grad is None or p.dim() == 1 or any(p.grad is g for g in held) for p in model.parameters())


def backward_onto_gradients_let_go_of(model: Residual, call: Callable[[Tensor], Tensor], x: Tensor, step: int) -> None:
    give_gradients(model)
    call(x).square().mean().backward()


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("backward", "budget_nbytes"),
    [
        (backward_twice, 650_000),
        (backward_with_a_hook, 700_000),
        (backward_onto_own_gradients, 1_200_000),
        (backward_onto_later_gradients, 1_200_000),
        (backward_onto_gradients_let_go_of, 700_000),
    ],
)
def test_no_more_is_taken_than_predicted(backward: Callable[..., None], budget_nbytes: int) -> None:
    def train(memory_budget: int) -> tuple[list[Tensor], int, int]:
        torch._dynamo.reset()
        gc.collect()
        before = cpu_allocator.current_nbytes()
        torch.manual_seed(1)
        model = Residual()
        options = {"memory_budget": memory_budget, "codegen": "eager", "whole_graph": "never", "chunk_size": 70_000}
        compiled = torch.compile(model, backend="chunkc", options=options)
        optimizer = chunkc.optim.AdamW(model.parameters(), lr=0.01)
        generator = torch.Generator().manual_seed(3)
        for step in range(4):
            backward(model, compiled, torch.randn(8, 64, generator=generator), step)
            optimizer.step()
            optimizer.zero_grad()
        report = chunkc.report(model)
        weights = [parameter.detach().clone() for parameter in model.parameters()]
        return weights, report.predicted_peak_nbytes, report.measured_peak_nbytes - before

    cpu_allocator.install()
    expected, *_ = train(10_000_000)
    weights, predicted, measured = train(budget_nbytes)
    assert all(torch.equal(left, right) for left, right in zip(weights, expected, strict=True))
    assert measured <= predicted + SCALARS_NBYTES
    assert predicted <= budget_nbytes


def test_one_tensor_is_added_to_in_pytorch_s_order() -> None:
    """That of any compiled backward, wherever the parameters are: another order rounds otherwise."""
    seen = []
    for budget in (2 * optim_models.BUDGET_NBYTES, HUGE, None):
        model, call = optim_models.build("plain" if budget is None else "adopted", memory_budget=budget)
        if budget is None:
            call = torch.compile(model, backend="aot_eager")
        shared = torch.full((optim_models.WIDTH, optim_models.WIDTH), 1e-3)
        for layer in model.layers:
            layer.weight.grad = shared
        optim_models.backward(call, 0)
        seen.append(array(shared))
        torch._dynamo.reset()
    assert not differences(seen[0], seen[1])
    assert not differences(seen[0], seen[2])
