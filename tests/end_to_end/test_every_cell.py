"""What users do between calls, one after the other to one model, in every cell: code generators, homes, budgets.

Budgets agree in every bit; with eager code, they agree so with the backend `aot_eager` too, as far as it goes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle, product, starmap
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import HUGE, array, differences, gradients, session_of, weights
from scripts import Way, assert_close, sgd
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.utils import prune

import chunkc
from chunkc.session.session import managing

WIDTH = 64
SMALL = 300_000
"""Bytes: a budget in which most weights move, with room for gradients of the user's own."""

Call = Callable[[Tensor], Tensor]


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)))


def loss_of(call: Call, seed: int = 0, rows: int = 4) -> Tensor:
    return (call(torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))) - 1).square().mean()


def step(model: nn.Module, call: Call, optimizer: torch.optim.Optimizer, seed: int = 0) -> list:
    """A whole step: its loss and gradients, and the weights in between."""
    loss = loss_of(call, seed)
    seen = [array(loss), weights(model)]
    loss.backward()
    seen += [weights(model), gradients(model)]
    optimizer.step()
    optimizer.zero_grad()
    return seen


# ---------------------------------------------------------------- what users do


def sharpness_aware(model: nn.Sequential, call: Call, optimizer: torch.optim.Optimizer) -> list:
    loss_of(call).backward()
    old = {p: p.data for p in model.parameters()}
    for p in model.parameters():
        p.data = p.data + 0.01 * p.grad
    optimizer.zero_grad()
    loss_of(call).backward()
    for p in model.parameters():
        p.data = old[p]
    seen = gradients(model)
    optimizer.step()
    optimizer.zero_grad()
    return [seen]


def own_gradients(model: nn.Sequential, call: Call, optimizer: torch.optim.Optimizer) -> list:
    """A tensor of two parameters, a view of a flat one, one that is held and one that is not."""
    first, second, third, fourth, fifth = (model[index][0].weight for index in range(5))
    flat = torch.full((2, WIDTH, WIDTH), 0.25)
    first.grad = second.grad = torch.ones(WIDTH, WIDTH)
    third.grad, fourth.grad, fifth.grad = flat[1], torch.ones(WIDTH, WIDTH), torch.ones(WIDTH, WIDTH)
    held = fourth.grad
    seen = []
    for seed in range(2):
        loss_of(call, seed).backward()
        assert first.grad is second.grad
        assert fourth.grad is held
        seen += [gradients(model), array(flat.clone()), array(held.clone())]
    optimizer.step()
    optimizer.zero_grad()
    return seen


def kept_views(model: nn.Sequential, call: Call, optimizer: torch.optim.Optimizer) -> list:
    """Of each kind, beyond a step and the next backward."""
    loss_of(call).backward()
    takes = cycle([lambda g: g.detach(), lambda g: g.view(-1), lambda g: g.numpy(), lambda g: g])
    kept = [take(p.grad) for p, take in zip(sorted(model.parameters(), key=Tensor.dim), takes) if p.grad is not None]
    optimizer.step()
    optimizer.zero_grad()
    loss_of(call, 1).backward()
    seen = [array(torch.as_tensor(view)) for view in kept] + [gradients(model)]
    optimizer.zero_grad()
    return seen


def flat_gradients(model: nn.Sequential, call: Call, optimizer: torch.optim.Optimizer) -> list:
    """As Apex and Megatron do it: one buffer, of which each parameter's `.grad` is a view."""
    parameters = list(model.parameters())
    flat, seen = torch.zeros(sum(p.numel() for p in parameters)), []
    for p, part in zip(parameters, flat.split([p.numel() for p in parameters])):
        p.grad = part.view_as(p)
    for seed in range(2):
        loss_of(call, seed).backward()
        seen.append(array(flat.clone()))
        optimizer.step()
        flat.zero_()
    optimizer.zero_grad()
    return seen


def replaced_in_between(model: nn.Sequential, call: Call, optimizer: torch.optim.Optimizer) -> list:
    loss = loss_of(call)
    for p in model.parameters():
        p.data = p.data * 0.5
    loss.backward()
    seen = gradients(model)
    optimizer.zero_grad()
    return [seen]


def frozen_in_between(model: nn.Sequential, call: Call, optimizer: torch.optim.Optimizer) -> list:
    loss = loss_of(call)
    model[3].requires_grad_(False)
    loss.backward()
    seen = gradients(model)
    model[3].requires_grad_(True)
    optimizer.zero_grad()
    return [seen]


def written_in_between(model: nn.Sequential, call: Call, optimizer: torch.optim.Optimizer) -> list:
    loss = loss_of(call)
    with torch.no_grad():
        model[3][0].weight.mul_(0.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    optimizer.zero_grad()
    return step(model, call, optimizer)


def gradients_of_inputs(model: nn.Sequential, call: Call, optimizer: torch.optim.Optimizer) -> list:
    model.requires_grad_(False)
    x = torch.ones(4, WIDTH, requires_grad=True)
    (gradient,) = torch.autograd.grad(call(x).square().sum(), x)
    (call(x).sum() + call(2 * x).square().sum()).backward(inputs=[x])
    model.requires_grad_(True)
    assert all(p.grad is None for p in model.parameters())
    return [array(gradient), array(x.grad), *step(model, call, optimizer)]


def hooked(model: nn.Sequential, call: Call, optimizer: torch.optim.Optimizer) -> list:
    """On tensors, on their nodes, and after accumulation."""
    watched: list = []

    def halve(p: Tensor) -> None:
        p.grad.mul_(0.5)

    handles = [
        get_gradient_edge(model[2][0].weight).node.register_prehook(lambda gradients: (gradients[0] * 2,)),
        model[3][0].weight.register_hook(lambda gradient: watched.append(array(gradient)) or 2 * gradient),
        model[4][0].weight.register_hook(lambda gradient: watched.append(array(gradient))),
        model[4][0].weight.register_post_accumulate_grad_hook(halve),
    ]
    seen = step(model, call, optimizer)
    assert len(watched) == 2
    for handle in handles:
        handle.remove()
    return seen + step(model, call, optimizer) + watched


def on_the_meta_device(model: nn.Sequential, call: Call, optimizer: torch.optim.Optimizer) -> list:
    loss = loss_of(call)
    with torch.device("meta"):
        loss.backward()
        optimizer.step()
    optimizer.zero_grad()
    return [weights(model)]


def evaluated(model: nn.Sequential, call: Call, optimizer: torch.optim.Optimizer) -> list:
    """With another shape, between forward and backward, and as it is in between steps."""
    model.eval()
    with torch.no_grad():
        seen = [array(loss_of(call))]
    model.train()
    loss = loss_of(call)
    with torch.no_grad():
        seen.append(array(loss_of(call, rows=7)))
    loss.backward()
    loss_of(call, rows=3).backward()
    seen += gradients(model).values()
    optimizer.zero_grad()
    return seen


def two_forwards(model: nn.Sequential, call: Call, optimizer: torch.optim.Optimizer) -> list:
    """Their backwards in either order, and together; a third forward never gets its own."""
    seen = []
    for first, second in ((0, 1), (1, 0)):
        losses = [loss_of(call, seed) for seed in (0, 1, 2)]
        losses[first].backward()
        seen.append(gradients(model))
        losses[second].backward()
        seen.append(gradients(model))
        optimizer.zero_grad()
    (loss_of(call) + 2 * loss_of(call, 1)).backward()
    seen.append(gradients(model))
    optimizer.zero_grad()
    return seen


def written(model: nn.Sequential, call: Call, optimizer: torch.optim.Optimizer) -> list:
    """Past version counters, in place, and by loading all or one layer."""
    state = {name: 0.5 * value for name, value in model.state_dict().items()}
    seen = []
    for p in model.parameters():
        p.data.mul_(0.5)
    seen += step(model, call, optimizer)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    seen += step(model, call, optimizer)
    model.load_state_dict(state)
    seen += step(model, call, optimizer)
    model[1].load_state_dict({"0.weight": state["2.0.weight"], "0.bias": state["2.0.bias"]})
    return seen + step(model, call, optimizer)


def written_unseen(model: nn.Sequential, call: Call, optimizer: torch.optim.Optimizer) -> list:
    """Old code decays and clamps through `.data`, which raises no version counter: a step that began with what the
    backward left in slots would lose it."""
    own, managed, seen = chunkc.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), managing(model[1][0].weight), []
    for seed in range(2):
        loss_of(call, seed).backward()
        for p in model.parameters():
            versions = p._version, p.grad._version
            p.data.mul_(0.9)
            p.grad.data.clamp_(-0.01, 0.01)
            assert versions == (p._version, p.grad._version)
        assert managed is None or not managed[0].store.slots.present
        own.step()
        assert managed is None or not managed[0].store.slots.present
        model[0][0].weight.data.mul_(0.5)
        own.zero_grad()
        seen.append(weights(model))
    return seen


def interrupted(model: nn.Sequential, call: Call, optimizer: torch.optim.Optimizer) -> list:
    def raising(gradient: Tensor) -> None:
        raise KeyboardInterrupt

    handle = model[2][0].weight.register_hook(raising)
    with pytest.raises(KeyboardInterrupt):
        loss_of(call).backward()
    handle.remove()
    optimizer.zero_grad()
    return step(model, call, optimizer)


def copied(model: nn.Sequential, call: Call, optimizer: torch.optim.Optimizer) -> list:
    shadow = copy.deepcopy(model)
    seen = step(model, call, optimizer)
    assert differences(weights(shadow), weights(model))
    model.load_state_dict(shadow.state_dict())
    for p in shadow.parameters():
        p.data.zero_()
    return [*seen, *step(model, call, optimizer)]


def pruned(model: nn.Sequential, call: Call, optimizer: torch.optim.Optimizer) -> list:
    for block in model:
        prune.l1_unstructured(block[0], "weight", 0.5)
        prune.remove(block[0], "weight")
    assert all((block[0].weight == 0).any() for block in model)
    return step(model, call, optimizer)


def tied(model: nn.Sequential, call: Call, optimizer: torch.optim.Optimizer) -> list:
    model[4][0].weight = model[1][0].weight
    return step(model, call, sgd(model.parameters()))


def converted(model: nn.Sequential, call: Call, optimizer: torch.optim.Optimizer) -> list:
    model.to(torch.float64)
    x = torch.ones(4, WIDTH, dtype=torch.float64)
    call(x).square().mean().backward()
    return [gradients(model)]


ACTIONS = [
    step, sharpness_aware, own_gradients, flat_gradients, kept_views, replaced_in_between,
    frozen_in_between, written_in_between, gradients_of_inputs, hooked, on_the_meta_device, evaluated, two_forwards,
    written, written_unseen, interrupted, copied, pruned, tied, converted,
]  # fmt: skip
"""The last two leave another model behind."""


@contextmanager
def compiled(backend: str, **options: Any) -> Iterator[tuple[nn.Sequential, Call]]:
    torch._dynamo.reset()
    model = build()
    if backend == "chunkc":
        yield model, torch.compile(model, backend=backend, options=options)
    else:
        yield model, torch.compile(model, backend=backend)
    torch._dynamo.reset()


def play(model: nn.Sequential, call: Call) -> dict[str, list]:
    optimizer = sgd(model.parameters())
    seen = {}
    for action in ACTIONS:
        seen[action.__name__] = [*action(model, call, optimizer), weights(model)]
    return seen


TIERS = {Way("cpu", "eager"): [], Way("disk", "eager"): [pytest.mark.second_tier]}
CELLS = [
    pytest.param(way, marks=TIERS.get(way, [pytest.mark.slow]))
    for way in starmap(Way, product(["cpu", "disk"], ["eager", "inductor"]))
]


@pytest.mark.parametrize("way", CELLS, ids=str)
def test_every_action_in_every_cell(way: Way, tmp_path: Path) -> None:
    seen = []
    home = "cpu" if way.home == "cpu" else f"disk:{tmp_path}"
    for budget in (SMALL, HUGE):
        options = {"memory_budget": budget, "home": home, "codegen": way.codegen, "whole_graph": "never", "debug": True}
        with compiled("chunkc", chunk_size=4 * WIDTH * WIDTH, **options) as (model, call):
            step(model, call, sgd(model.parameters()))
            store = session_of(model).store
            assert any(map(store.views.is_managed, store.views.parameters())) == (budget == SMALL)
            seen.append(play(model, call))
    assert not differences(*seen)
    with compiled("aot_eager") as (model, call):
        step(model, call, sgd(model.parameters()))
        plain = play(model, call)
    for action in plain:
        if way.codegen == "eager":
            assert not differences(seen[0][action], plain[action]), action
        else:
            assert_close(seen[0][action], plain[action])
