"""`torch.autograd.grad` and `backward(inputs=...)` through a compiled model: PyTorch's values, `.grad` as it was."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import Arrays, array, differences, gradients, home_of, limited, session_of, weights
from optim_models import MLP, batch, is_managed
from torch import Tensor, nn

import chunkc
from chunkc.ir.layout import GRAD, Chunk
from chunkc.runtime.device import cpu_allocator
from chunkc.runtime.store.consumed_gradients import ConsumedGradient

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

SMALL, LARGE = 400 * 1024, 64 * 2**20
"""Bytes: a budget in which no weight stays on the compute tier, and one in which all do."""

BUDGETS = pytest.mark.parametrize("budget_nbytes", [SMALL, LARGE])


def built(module: Callable[[], nn.Module] = MLP) -> Any:
    torch.manual_seed(0)
    return module()


def compiled(model: nn.Module, budget_nbytes: int, **options: Any) -> Any:
    options = {"memory_budget": budget_nbytes, "codegen": "eager", "whole_graph": "never"} | options
    return torch.compile(model, backend="chunkc", options=options)


def both(budget_nbytes: int, module: Callable[[], nn.Module] = MLP, **options: Any) -> Any:
    """The model and what to call: under chunkc, and by the default backend without code generation."""
    ours, theirs = built(module), built(module)
    yield ours, compiled(ours, budget_nbytes, **options)
    torch._dynamo.reset()
    yield theirs, torch.compile(theirs, backend="aot_eager")


def arrays(values: Any) -> list[Any]:
    return [None if value is None else array(value) for value in values]


# ---------------------------------------------------------------- values

Ask = Callable[[nn.Module, Any, Tensor], list[Any]]


def _inputs(model: nn.Module, call: Any, x: Tensor) -> list[Any]:
    """Saliency, and the fast gradient sign method."""
    return [*torch.autograd.grad(call(x), x)]


def _parameters(model: nn.Module, call: Any, x: Tensor) -> list[Any]:
    """Influence functions, and the inner loop of first-order MAML."""
    return [*torch.autograd.grad(call(x), list(model.parameters()))]


def _some_and_inputs(model: nn.Module, call: Any, x: Tensor) -> list[Any]:
    return [*torch.autograd.grad(call(x), [model.layers[2].bias, x, model.layers[0].weight])]


def _backward_of_inputs(model: nn.Module, call: Any, x: Tensor) -> list[Any]:
    call(x).backward(inputs=[x])
    return [x.grad]


def _backward_of_some(model: nn.Module, call: Any, x: Tensor) -> list[Any]:
    """Added to those that are there; the others stay as they are."""
    call(x).backward(inputs=[model.layers[1].weight, model.layers[3].bias])
    return [x.grad, *(p.grad for p in model.parameters())]


def _twice(model: nn.Module, call: Any, x: Tensor) -> list[Any]:
    """Over one graph, which is kept, before and after its backward."""
    loss = call(x)
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    loss.backward(retain_graph=True)
    last = torch.autograd.grad(loss, [x, model.layers[0].weight])
    return [*first, *last, x.grad, *(p.grad for p in model.parameters())]


def _hooked(model: nn.Module, call: Any, x: Tensor) -> list[Any]:
    """A tensor's hook sees, and may replace, what is returned; and what is left out reaches none."""
    handles = [layer.weight.register_hook(lambda g: g * 2) for layer in model.layers[1:3]]
    found = torch.autograd.grad(call(x), [layer.weight for layer in model.layers[:2]])
    for handle in handles:
        handle.remove()
    return [*found]


ASKS = [_inputs, _parameters, _some_and_inputs, _backward_of_inputs, _backward_of_some, _twice, _hooked]


@pytest.mark.quick(6, second=7)
@BUDGETS
@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("ask", ASKS)
def test_values_are_the_default_backend_s(ask: Ask, with_gradients: bool, budget_nbytes: int) -> None:
    """Also of the training before and after it."""
    found: list[Any] = []
    for model, call in both(budget_nbytes):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        call(batch(1)).backward()
        if not with_gradients:
            optimizer.step()
            optimizer.zero_grad()
        results: list[Any] = arrays(ask(model, call, batch(2).requires_grad_()))
        results += arrays(p.grad for p in model.parameters())
        call(batch(3)).backward()
        results.append(gradients(model))
        optimizer.step()
        found.append([*results, weights(model)])
    assert not differences(*found)


@BUDGETS
def test_gradients_that_are_there_stay_the_tensors_that_they_are(budget_nbytes: int) -> None:
    model = built()
    call = compiled(model, budget_nbytes)
    call(batch()).backward()
    before = [(p.grad, p.grad.data_ptr(), p.grad._version) for p in model.parameters()]
    found = torch.autograd.grad(call(batch(1)), list(model.parameters()))
    for p, (grad, address, version) in zip(model.parameters(), before):
        assert p.grad is grad
        assert (grad.data_ptr(), grad._version) == (address, version)
    assert not {g.data_ptr() for g in found} & {address for _, address, _ in before}


class InParts(nn.Module):
    """Two graphs around code that Dynamo leaves alone; both use a weight, and one weight is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(128, 128) for _ in range(3))
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        torch._dynamo.graph_break()
        return (self.last(torch.tanh(self.second(x))) - 1).square().mean()


@pytest.mark.quick(2)
@BUDGETS
@pytest.mark.parametrize("of_inputs", [False, True])
def test_several_graphs_and_tied_parameters(of_inputs: bool, budget_nbytes: int) -> None:
    found: list[Any] = []
    for model, call in both(budget_nbytes, InParts):
        call(batch(1)).backward()
        x = batch(2).requires_grad_()
        wanted = [x] if of_inputs else [x, *model.parameters()]
        found.append([*arrays(torch.autograd.grad(call(x), wanted)), gradients(model)])
        model.zero_grad()  # to what is there each graph adds its own part, as in every backward
        call(x).backward(inputs=wanted)
        found[-1] += [array(x.grad), gradients(model)]
    assert not differences(*found)


@pytest.mark.parametrize("of_inputs", [False, True])
def test_several_gradients_at_once_are_refused_and_one_by_one_they_are_given(of_inputs: bool) -> None:
    model = nn.Linear(4, 3)
    call = compiled(model, LARGE)
    x = torch.ones(2, 4, requires_grad=True)
    wanted = [x] if of_inputs else list(model.parameters())
    each = torch.eye(6).view(6, 2, 3)
    with pytest.raises(chunkc.UnsupportedError, match=r"is_grads_batched=True.*one at a time"):
        torch.autograd.grad(call(x), wanted, each, is_grads_batched=True)
    assert all(p.grad is None for p in model.parameters())
    expected = torch.autograd.grad(model(x), wanted, each, is_grads_batched=True)
    out = call(x)
    found = [torch.autograd.grad(out, wanted, gradient, retain_graph=True) for gradient in each]
    for one_by_one, at_once in zip(zip(*found), expected):
        torch.testing.assert_close(torch.stack(one_by_one), at_once)


# ---------------------------------------------------------------- memory


def smallest() -> int:
    with pytest.raises(chunkc.BudgetError) as refused:
        compiled(built(), 4096)(batch())
    torch._dynamo.reset()
    return refused.value.minimum_nbytes


@pytest.mark.parametrize("ask", [_inputs, _parameters, _backward_of_some])
def test_under_the_smallest_budget_nothing_more_is_taken(ask: Ask) -> None:
    """Gradients that are returned lie at home: the limit is hard."""
    budget_nbytes = smallest()
    reference = built()
    expected: list[Any] = []
    for step in range(2):
        expected += arrays(ask(reference, reference, batch(step).requires_grad_()))
    reference(batch(2)).backward()
    model = built()
    call = compiled(model, budget_nbytes)
    inputs = [batch(step) for step in range(3)]
    call(inputs[2]).backward()
    model.zero_grad()
    cpu_allocator.install()
    with limited(budget_nbytes):
        found: list[Any] = []
        for step in range(2):
            found += arrays(ask(model, call, inputs[step].clone().requires_grad_()))
        call(inputs[2]).backward()
    assert not differences(found, expected)
    assert not differences(gradients(model), gradients(reference))


def test_gradients_that_are_there_count_besides_those_that_are_returned() -> None:
    """Of weights that stay on the compute tier, where both lie at once."""
    cpu_allocator.install()
    model = built()
    others = [layer.weight.detach() for layer in model.layers]  # which share their memory: they stay
    call, optimizer = compiled(model, LARGE), chunkc.optim.AdamW(model.parameters())
    call(batch()).backward()
    optimizer.step()
    before = chunkc.report(model)
    torch.autograd.grad(call(batch()), list(model.parameters()))
    report = chunkc.report(model)
    assert report.measured_peak_nbytes <= report.predicted_peak_nbytes
    assert report.predicted_peak_nbytes >= before.predicted_peak_nbytes + sum(other.nbytes for other in others)


def test_home_is_given_back_with_the_last_of_them() -> None:
    model = built()
    call = compiled(model, SMALL)
    call(batch()).backward()
    store = session_of(model).store
    before_nbytes = store.arena.nbytes, store.arena.used_nbytes
    regions = len(store.arena.home._mappings)
    for _ in range(3):
        found = torch.autograd.grad(call(batch()), list(model.parameters()))
        assert (store.arena.nbytes, store.arena.used_nbytes) == before_nbytes
        assert len(store.arena.home._mappings) == regions
        session, name = home_of(model.layers[0].weight)
        home = session.store.views.home_view(GRAD, name)
        assert home.data_ptr() == model.layers[0].weight.grad.data_ptr()
        assert found[0].data_ptr() != home.data_ptr()
        values = array(found[0])
        del found
        gc.collect()
    call(batch()).backward()
    assert not differences(array(model.layers[0].weight.grad), 2 * values)


def test_inputs_alone_send_no_gradient_home() -> None:
    model = built()
    call = compiled(model, SMALL)
    x = batch().requires_grad_()
    torch.autograd.grad(call(x), x)
    store = session_of(model).store
    assert is_managed(model.layers[0].weight)
    assert store.slots.traffic.to_home_nbytes == 0
    assert all(store.arena.is_promised(chunk) for chunk in store.arena.chunks if chunk.kind == GRAD)


def test_home_that_is_full_is_said_before_anything_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built()
    call = compiled(model, SMALL)
    call(batch()).backward()
    before: Arrays = gradients(model)
    arena = session_of(model).store.arena

    def full(nbytes: int) -> Any:
        raise chunkc.HomeError("home is full")

    with monkeypatch.context() as patch:
        patch.setattr(arena.home, "allocate", full)
        with pytest.raises(chunkc.HomeError, match="full"):
            torch.autograd.grad(call(batch(1)), list(model.parameters()))
    assert not differences(gradients(model), before)
    assert Chunk(GRAD, 0) in arena
    call(batch()).backward()
    assert not differences(gradients(model), {name: 2 * value for name, value in before.items()})


# ---------------------------------------------------------------- beside optimizers


OVERLAPS: dict[str, dict[str, Any]] = {
    "none": {},
    "forward": {"overlap": "forward", "update_on": "cpu"},
    "backward": {"overlap": "backward"},
    "backward-cpu": {"overlap": "backward", "update_on": "cpu"},
    "undoable": {"overlap": "backward", "undoable": True},
}


@pytest.mark.quick(5)
@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("ask", [_inputs, _parameters])
def test_nothing_is_updated_by_it(ask: Ask, overlap: str) -> None:
    """Adversarial training with an optimizer that begins its updates in the backward."""

    def run(budget_nbytes: int, options: dict[str, Any]) -> tuple[list[Any], Arrays]:
        torch._dynamo.reset()
        model = built()
        call = compiled(model, budget_nbytes)
        optimizer = chunkc.optim.AdamW(model.parameters(), lr=1e-2, **options)
        found: list[Any] = []
        for step in range(4):
            x = batch(step).requires_grad_()
            loss = call(x)
            if step % 2:
                found += arrays(torch.autograd.grad(loss, x, retain_graph=True))
            loss.backward()
            if options == OVERLAPS["backward"] and step > 1:  # what came before has not kept it from updating
                assert any(isinstance(p.grad, ConsumedGradient) for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
            found += arrays(ask(model, call, batch(step + 9).requires_grad_()))
        optimizer.synchronize()
        return found, weights(model)

    assert not differences(run(800 * 1024, OVERLAPS[overlap]), run(LARGE, {}))


@pytest.mark.parametrize("of_chunkc", [False, True])
def test_scaling_and_clipping_after_it(of_chunkc: bool) -> None:
    """Sums of gradients that the backward has taken stay true of them."""

    def run(budget_nbytes: int) -> tuple[list[Any], Arrays]:
        torch._dynamo.reset()
        model = built()
        call = compiled(model, budget_nbytes)
        optimizer = chunkc.optim.AdamW(model.parameters(), lr=1e-2)
        scaler = (chunkc.GradScaler if of_chunkc else torch.amp.GradScaler)("cpu", init_scale=16.0)
        norms: list[Any] = []
        for step in range(3):
            scaler.scale(call(batch(step))).backward()
            if of_chunkc:
                norms.append(array(optimizer.clip_grad_norm_(1e-2, loss_scale=scaler.get_scale())))
            torch.autograd.grad(call(batch(7)), list(model.parameters()))
            if not of_chunkc:
                scaler.unscale_(optimizer)
                norms.append(array(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2)))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return norms, weights(model)

    assert not differences(run(800 * 1024), run(LARGE))
