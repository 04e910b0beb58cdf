"""Kinds of backward: those that work are plain PyTorch's, the others are refused before any gradient is touched."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import Arrays, array, differences, gradients
from optim_models import MLP, batch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook

import chunkc

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True"),
]

SMALL, LARGE = 400 * 1024, 64 * 2**20
"""Bytes: a budget in which no weight stays on the compute tier, and one in which all do."""

BUDGETS = pytest.mark.parametrize("budget_nbytes", [SMALL, LARGE])

Ask = Callable[[MLP, Callable[..., Tensor]], Any]


def built() -> MLP:
    torch.manual_seed(0)
    return MLP()


def compiled(model: nn.Module, budget_nbytes: int, codegen: str = "eager") -> Callable[..., Tensor]:
    options = {"memory_budget": budget_nbytes, "codegen": codegen, "whole_graph": "never"}
    return torch.compile(model, backend="chunkc", options=options)


# ---------------------------------------------------------------- gradients of gradients


def _backward_with_graph(model: MLP, call: Callable[..., Tensor]) -> None:
    call(batch()).backward(create_graph=True)


def _without_keeping_it(model: MLP, call: Callable[..., Tensor]) -> None:
    call(batch()).backward(create_graph=True, retain_graph=False)


def _penalty(model: MLP, call: Callable[..., Tensor]) -> None:
    x = batch().requires_grad_()
    (gradient,) = torch.autograd.grad(call(x), x, create_graph=True)
    gradient.square().sum().backward()


def _penalty_of_frozen(model: MLP, call: Callable[..., Tensor]) -> None:
    x = batch().requires_grad_()
    model.requires_grad_(False)
    try:
        torch.autograd.grad(call(x), x, create_graph=True)
    finally:
        model.requires_grad_(True)


def _behind_more(model: MLP, call: Callable[..., Tensor]) -> None:
    """What is differentiated again is a function of the loss, and of others."""
    losses = [call(batch(step)) for step in range(2)]
    (losses[0] * losses[1]).exp().backward(create_graph=True)


def _in_a_hook(model: MLP, call: Callable[..., Tensor]) -> None:
    """A backward inside a backward."""

    def backward(_: Tensor) -> None:
        with torch.enable_grad():
            _backward_with_graph(model, call)

    z = torch.ones(3, requires_grad=True) * 2
    z.register_hook(backward)
    z.sum().backward()


@pytest.mark.quick(4, second=3)
@BUDGETS
@pytest.mark.parametrize(
    "ask", [_backward_with_graph, _without_keeping_it, _penalty, _penalty_of_frozen, _behind_more, _in_a_hook]
)
def test_gradients_of_gradients_are_refused(ask: Ask, budget_nbytes: int) -> None:
    model = built()
    call = compiled(model, budget_nbytes)
    with pytest.raises(chunkc.UnsupportedError, match="create_graph"):
        ask(model, call)
    assert all(p.grad is None for p in model.parameters())
    call(batch(1)).backward()
    before: Arrays = gradients(model)
    with pytest.raises(chunkc.UnsupportedError, match="create_graph"):
        ask(model, call)
    assert not differences(gradients(model), before)
    model.zero_grad()
    call(batch(1)).backward()  # and it works on
    assert not differences(gradients(model), before)


def test_gradients_of_gradients_are_refused_of_views_and_of_what_is_given_back() -> None:
    """What a graph returns may be a view that AOTAutograd makes, or an argument that other backwards go through."""

    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            y = x @ self.weight
            return y, y.view(-1), x

    model, leaf = Views(), torch.ones(2, 4, requires_grad=True)
    call = compiled(model, LARGE)
    for position in range(2):
        with pytest.raises(chunkc.UnsupportedError, match="create_graph"):
            call(leaf * 2)[position].sum().backward(create_graph=True)
    given_back = call(leaf * 2)[2]
    (gradient,) = torch.autograd.grad(given_back.square().sum(), leaf, create_graph=True)  # does not pass the graph
    assert gradient.requires_grad
    assert model.weight.grad is None


# ---------------------------------------------------------------- hooks where gradients are added up


def _prehook(node: Any, parameter: nn.Parameter, seen: list) -> Any:
    def double(gradients: tuple[Tensor]) -> tuple[Tensor]:
        seen.append(array(gradients[0]))
        return (gradients[0] * 2,)

    return node.register_prehook(double)


def _posthook(node: Any, parameter: nn.Parameter, seen: list) -> Any:
    def note(_: Any, gradients: tuple[Tensor]) -> None:
        assert parameter.grad is not None
        seen.extend([array(gradients[0]), array(parameter.grad)])

    return node.register_hook(note)


def _after_accumulation(node: Any, parameter: nn.Parameter, seen: list) -> Any:
    return parameter.register_post_accumulate_grad_hook(lambda p: seen.append(array(p.grad)))


def _of_several(node: Any, parameter: nn.Parameter, seen: list) -> Any:
    return register_multi_grad_hook([parameter], lambda gradients: seen.extend(array(g) for g in gradients))


def _steps_with_hook(
    call: Callable[..., Tensor], parameters: list[nn.Parameter], register: Callable[..., Any], keeps_node: bool
) -> list:
    """Five backwards: hooked between forward and backward of the second, free again before the fourth."""
    seen: list = []
    kept, handles = [], []
    for step in range(5):
        loss = call(batch(step))
        if step == 1 or (step == 2 and not keeps_node):
            for handle in handles:
                handle.remove()
            nodes = [get_gradient_edge(p).node for p in parameters]
            handles = [register(node, p, seen) for node, p in zip(nodes, parameters)]
            kept = nodes if keeps_node else []
            del nodes
        if step == 3:
            for handle in handles:
                handle.remove()
        loss.backward()
        del loss
        seen.append(len(seen))
        seen.extend(array(p.grad) for p in parameters if p.grad is not None)
    del kept
    return seen


@pytest.mark.quick(6, second=3)
@BUDGETS
@pytest.mark.parametrize("keeps_node", [True, False])
@pytest.mark.parametrize("register", [_prehook, _posthook, _after_accumulation, _of_several])
def test_hooks_see_what_they_see_in_plain_pytorch(
    register: Callable[..., Any], keeps_node: bool, budget_nbytes: int
) -> None:
    """Without `keeps_node`, nobody but the graph of a forward keeps the node, and its hooks go with it."""
    found, expected = [], []
    for results in (found, expected):
        model = built()
        call = compiled(model, budget_nbytes) if results is found else model
        parameters = [model.layers[2].weight, model.layers[1].bias]
        results += [_steps_with_hook(call, [p], register, keeps_node) for p in parameters]
        results += gradients(model).items()
    assert any(isinstance(value, int) and value > 6 for value in found[0])  # hooks were called
    assert not differences([x for x in found if isinstance(x, list)], [x for x in expected if isinstance(x, list)])


def test_hooks_are_looked_for_without_keeping_the_model_alive() -> None:
    model = built()
    call = compiled(model, SMALL)
    call(batch()).backward()
    call(batch()).backward()
    weight = weakref.ref(model.layers[0].weight)
    del model, call
    torch._dynamo.reset()
    gc.collect()
    assert weight() is None


# ---------------------------------------------------------------- compiled autograd


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("by", ["eager", "chunkc"])
def test_compiled_autograd_is_refused(by: str) -> None:
    model = built()
    call = compiled(model, SMALL)
    loss = call(batch())
    compiler = torch.compile(backend=by, options={"codegen": "eager"}) if by == "chunkc" else torch.compile(backend=by)
    with compiled_autograd._enable(compiler), pytest.raises(chunkc.UnsupportedError, match="compiled autograd"):
        loss.backward()
    assert all(p.grad is None for p in model.parameters())
    call(batch()).backward()
    assert all(p.grad is not None for p in model.parameters())
