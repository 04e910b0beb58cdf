"""Between calls, parameters and gradients under a small budget are ordinary tensors."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from harness import HUGE, Arrays, adamw, array, compile_case, differences, gradients, weights
from scripts import CASE, assert_close, backward, compile_small, run_three_ways, sgd, three_ways, train_steps
from torch import Tensor, nn


@pytest.mark.parametrize("home", ["cpu", "disk"])
def test_state_dict_round_trip(home: str) -> None:
    model, compiled = compile_small(home)
    optimizer = adamw(model.parameters())
    train_steps(compiled, optimizer, range(2))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plain = CASE.build(1)
    assert list(state) == list(plain.state_dict())
    plain.load_state_dict(state)
    assert not differences(weights(model), weights(plain))
    train_steps(compiled, optimizer, range(2, 3))
    assert differences(weights(model), weights(plain))
    model.load_state_dict(state)
    assert not differences(weights(model), weights(plain))


@pytest.mark.parametrize("home", ["cpu", "disk"])
def test_every_parameter_is_saved_with_its_own_bytes_only(home: str) -> None:
    model, compiled = compile_small(home)
    backward(compiled, 0)
    for name, parameter in model.named_parameters():
        for tensor in (parameter, parameter.detach(), parameter.grad):
            file = io.BytesIO()
            torch.save(tensor, file)
            nbytes = tensor.numel() * tensor.element_size()
            assert file.tell() <= nbytes + 4096, f"{name}: {file.tell()} bytes for {nbytes}"
            file.seek(0)
            assert torch.equal(torch.load(file), tensor)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    state = model.state_dict()
    assert file.tell() <= sum(t.nbytes for t in state.values()) + 1024 * len(state) + 4096
    file.seek(0)
    loaded = torch.load(file)
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name], state[name]) for name in state)


@pytest.mark.parametrize("home", ["cpu", "disk"])
def test_a_deep_copy_trains_on_its_own(home: str) -> None:
    model, compiled = compile_small(home)
    optimizer = adamw(model.parameters())
    train_steps(compiled, optimizer, range(2))
    before = weights(model)
    clone = copy.deepcopy(model)
    assert not differences(weights(clone), before)
    losses = [float(loss) for loss in train_steps(clone, sgd(clone.parameters()), range(4))]
    repeated = clone(**CASE.batch(3)).detach()
    assert float(repeated) < losses[3]
    assert not differences(weights(model), before)
    reference = copy.deepcopy(clone)
    backward(compiled, 7)
    optimizer.step()
    assert differences(weights(model), before)
    assert not differences(weights(clone), weights(reference))


def test_a_parameter_reads_as_a_plain_tensor_between_all_calls() -> None:
    """After the forward, the backward and the update alike."""

    def script(model: nn.Module, call: Callable[..., Tensor]) -> list[Arrays]:
        optimizer, seen = sgd(model.parameters()), []
        for step in range(2):
            loss = call(**CASE.batch(step))
            seen.append(weights(model))
            loss.backward()
            seen += [weights(model), gradients(model)]
            optimizer.step()
            seen.append(weights(model))
            optimizer.zero_grad()
        return seen

    seen = run_three_ways(script)
    assert not differences(seen[0], seen[1])
    assert differences(seen[1], seen[3])


# ---------------------------------------------------------------- optimizers and gradients


OPTIMIZERS = {
    "chunkc.AdamW": adamw,
    "SGD": sgd,
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1),
}


@pytest.mark.quick(3, second=1)
@pytest.mark.parametrize("home", ["cpu", "disk"])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_optimizers_give_the_same_bits_under_every_budget(optimizer: str, home: str) -> None:
    make = OPTIMIZERS[optimizer]

    def script(model: nn.Module, call: Callable[..., Tensor]) -> list:
        return [*train_steps(call, make(model.parameters()), range(3)), weights(model)]

    small = script(*compile_small(home))
    assert not differences(small, script(*compile_case(CASE, memory_budget=HUGE, whole_graph="never")))
    plain = CASE.build(0)  # torch's own optimizer stands for chunkc's, which wants a compiled model
    make = OPTIMIZERS[optimizer.removeprefix("chunkc.")]
    assert_close(small[:-1], script(plain, plain)[:-1])


def test_clip_grad_norm_equals_eager() -> None:
    def script(model: nn.Module, call: Callable[..., Tensor]) -> tuple:
        optimizer, seen = sgd(model.parameters()), []
        for step in range(2):
            backward(call, step)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            assert float(norm) > 0.1
            seen += [array(norm), gradients(model)]
            optimizer.step()
            optimizer.zero_grad()
        return seen, weights(model)

    (seen, _) = run_three_ways(script)
    total = math.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in seen[1].values()))
    assert total == pytest.approx(0.1, rel=1e-3)


@pytest.mark.quick(1)
@pytest.mark.parametrize("home", ["cpu", "disk"])
def test_gradients_accumulate_over_micro_batches(home: str) -> None:
    def script(model: nn.Module, call: Callable[..., Tensor]) -> tuple:
        optimizer, seen = sgd(model.parameters()), []
        for step in range(2):
            seen += [backward(call, 2 * step), gradients(model), backward(call, 2 * step + 1)]
            seen.append(gradients(model))
            optimizer.step()
            optimizer.zero_grad()
            assert all(p.grad is None for p in model.parameters())
        return seen, weights(model)

    seen, _ = run_three_ways(script, home=home)
    assert differences(seen[1], seen[3])


@three_ways()
def test_zero_grad_to_zeros(model: nn.Module, call: Callable[..., Tensor]) -> tuple:
    optimizer, seen = sgd(model.parameters()), []
    for step in range(3):
        seen += [backward(call, step), gradients(model)]
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    return seen, weights(model)


@three_ways()
def test_a_user_replaces_gradients(model: nn.Module, call: Callable[..., Tensor]) -> tuple:
    optimizer, seen = sgd(model.parameters()), []
    backward(call, 0)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    seen.append(weights(model))
    seen += [backward(call, 1), gradients(model)]  # adds to the user's tensors
    optimizer.step()
    optimizer.zero_grad()
    first = next(model.parameters())
    first.grad = torch.ones_like(first)
    seen += [backward(call, 2), gradients(model)]  # only one gradient was there
    return seen, weights(model)


@three_ways()
def test_a_user_writes_into_gradients(model: nn.Module, call: Callable[..., Tensor]) -> tuple:
    optimizer = sgd(model.parameters())
    backward(call, 0)
    for parameter in model.parameters():
        parameter.grad.mul_(-2.0)
    seen = gradients(model)
    optimizer.step()
    return seen, weights(model)


def test_backward_twice_with_retain_graph_accumulates() -> None:
    def script(model: nn.Module, call: Callable[..., Tensor]) -> list:
        loss = call(**CASE.batch(0))
        loss.backward(retain_graph=True)
        once = gradients(model)
        loss.backward()
        return [once, gradients(model)]

    once, twice = run_three_ways(script, room=1.4)  # autograd keeps what was saved
    assert not differences({name: 2 * gradient for name, gradient in once.items()}, twice)


def test_a_gradient_is_kept_when_the_next_one_comes() -> None:
    """A tensor the user took from `p.grad` is not overwritten after `zero_grad`."""
    model, compiled = compile_small()
    optimizer = adamw(model.parameters())
    backward(compiled, 0)
    kept, before = [p.grad for p in model.parameters()], gradients(model)
    optimizer.step()
    optimizer.zero_grad()
    backward(compiled, 1)
    assert not differences([array(g) for g in kept], list(before.values()))
