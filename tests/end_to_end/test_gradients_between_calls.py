"""What users do to gradients between calls: as in plain PyTorch. Views keep their bytes, own tensors are added to."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from harness import adamw, array, compile_case, differences, gradients, segmented, session_of, weights
from scripts import (
    CASE,
    assert_close,
    backward,
    compile_small,
    slowly_on_disks,
    small_budget,
    two_alike,
)
from torch import Tensor, nn

import chunkc


@pytest.mark.quick(4)
@slowly_on_disks
@pytest.mark.parametrize("home", ["cpu", "disk"])
@pytest.mark.parametrize("view", ["detach", "view", "numpy", "grad"])
def test_views_of_a_gradient_keep_their_values(view: str, home: str) -> None:
    take = {
        "detach": lambda g: g.detach(),
        "view": lambda g: g.view(-1),
        "numpy": lambda g: g.numpy(),
        "grad": lambda g: g,
    }[view]
    model, compiled = compile_small(home)
    optimizer = adamw(model.parameters())
    for step in range(3):
        backward(compiled, step)
        kept = {name: take(p.grad) for name, p in model.named_parameters()}
        before = {name: array(torch.as_tensor(value)) for name, value in kept.items()}
        optimizer.step()
        optimizer.zero_grad()
        backward(compiled, step + 1)
        assert differences(before, {n: g.reshape(before[n].shape) for n, g in gradients(model).items()})
        assert not differences(before, {name: array(torch.as_tensor(value)) for name, value in kept.items()})
        optimizer.zero_grad()


@slowly_on_disks
def test_views_of_a_gradient_that_moved_home_keep_their_values() -> None:
    """The gradient is the user's own tensor when its parameter moves home, at the first call."""
    model, compiled = compile_case(CASE, memory_budget=small_budget(room=1.5), place=False, whole_graph="never")
    parameter, other = two_alike(model)
    parameter.grad = torch.full_like(parameter, 0.25)
    loss = compiled(**CASE.batch(0))
    kept = parameter.grad.detach()
    model.zero_grad()
    other.grad = torch.full_like(other, 0.5)
    loss.backward()
    assert (kept == 0.25).all()
    assert parameter.grad.data_ptr() != kept.data_ptr()


def test_a_gradient_that_is_its_own_transposed_view() -> None:
    def script(make: Callable[..., torch.optim.Optimizer], model: nn.Module, call: Callable[[Tensor], Tensor]) -> list:
        optimizer = make(model.parameters(), lr=0.1, eps=1e-3)
        call(torch.linspace(-1, 1, 256).reshape(4, 64)).square().mean().backward()
        for linear in model:
            linear.weight.grad = linear.weight.grad.t()
        optimizer.step()
        return [weights(model)]

    torch._dynamo.reset()
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))))
    compiled = segmented(chunkc.place(models[0]), 200_000)
    small = script(chunkc.optim.AdamW, models[0], compiled)
    store = session_of(models[0]).store
    assert any(store.views.is_managed(name) for name in store.views.parameters())
    assert_close(small, script(torch.optim.AdamW, models[1], models[1]))


@slowly_on_disks
def test_kept_views_do_not_grow_home() -> None:
    model, compiled = compile_small()
    sizes = []
    for step in range(6):
        backward(compiled, step)
        kept = [p.grad.detach() for p in model.parameters()]
        model.zero_grad()
        sizes.append(session_of(model).store.arena.nbytes)
    assert len(kept) > 1
    assert len(set(sizes)) == 1


@slowly_on_disks
def test_one_tensor_as_the_gradient_of_several_in_a_chunked_update() -> None:
    def script(make: Callable[..., torch.optim.Optimizer], model: nn.Module, call: Callable[..., Tensor]) -> list:
        optimizer = make(model.parameters(), lr=1e-3, eps=1e-3)
        first, second = two_alike(model)
        for step in range(2):
            if step == 0:
                first.grad = second.grad = torch.ones_like(first)
            backward(call, step)
            optimizer.step()
            assert first.grad is second.grad
        return [weights(model)]

    small = script(chunkc.optim.AdamW, *compile_small(room=2.0))
    plain = CASE.build(0)
    assert_close(small, script(torch.optim.AdamW, plain, plain))


@slowly_on_disks
def test_views_of_a_gradient_whose_chunk_gets_another_home() -> None:
    """Views of one parameter's gradient are kept, which is none any more; another's is still one, and has views too."""
    model, compiled = compile_small(room=2.0)
    backward(compiled, 0)
    store = session_of(model).store
    group = next(g for g in store.layout.groups if g.index not in store.resident and len(g.slices) > 1)
    dropped, held = (store.views.parameter(where.spec.name) for where in group.slices[:2])
    of_dropped, of_held = dropped.grad.detach(), held.grad.view(-1)
    before = array(of_dropped.clone()), array(of_held.clone())
    dropped.grad = None
    backward(compiled, 0)
    assert torch.equal(of_held.view(held.shape), held.grad)
    assert not differences(before, [array(of_dropped), array(of_held / 2)])
    held.grad.zero_()
    assert not of_held.any()


@slowly_on_disks
def test_a_gradient_that_is_held_while_its_group_moves() -> None:
    """A larger budget brings the parameter back to the compute tier; the user still has the gradient of before."""
    model, compiled = compile_small(room=2.0)
    backward(compiled, 0)
    held = {name: (p.grad, array(p.grad.clone())) for name, p in model.named_parameters()}
    store = session_of(model).store
    store.place(store.layout, store.views.parameters(), frozenset(group.index for group in store.layout.groups))
    backward(compiled, 0)
    for name, parameter in model.named_parameters():
        grad, before = held[name]
        assert parameter.grad is grad
        assert not differences(2 * before, array(grad))
