"""Models under a small budget may be called, written to and hooked in every way that PyTorch allows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from harness import HUGE, array, compile_case, differences, gradients, weights
from scripts import CASE, assert_close, backward, run_three_ways, sgd, small_budget, three_ways, train_steps
from torch import Tensor, nn
from zoo import byte_batch

import chunkc
from chunkc.session.session import managing


@three_ways()
def test_evaluation_in_between(model: nn.Module, call: Callable[..., Tensor]) -> tuple:
    optimizer, seen = sgd(model.parameters()), []
    for step in range(2):
        seen += train_steps(call, optimizer, range(step, step + 1))
        before = weights(model)
        model.eval()
        with torch.no_grad():
            loss = call(**CASE.batch(10 + step))
        assert not loss.requires_grad
        seen.append(array(loss))
        model.train()
        assert not differences(before, weights(model))
    return seen, weights(model)


@three_ways()
def test_evaluation_between_forward_and_backward(model: nn.Module, call: Callable[..., Tensor]) -> list:
    loss = call(**CASE.batch(0))
    with torch.no_grad():
        other = call(**CASE.batch(1))
    loss.backward()
    return [array(loss), array(other), gradients(model)]


@pytest.mark.second_tier
def test_new_input_shapes() -> None:
    def script(model: nn.Module, call: Callable[..., Tensor]) -> tuple:
        optimizer, losses = sgd(model.parameters()), []
        for step, length in enumerate((32, 24, 32, 17, 40)):
            loss = call(**byte_batch(step, length))
            loss.backward()
            losses.append(array(loss))
            optimizer.step()
            optimizer.zero_grad()
        return losses, weights(model)

    small = script(*compile_case(CASE, memory_budget=2 * small_budget(), whole_graph="never"))
    large = script(*compile_case(CASE, memory_budget=HUGE, whole_graph="never"))
    assert not differences(small, large)
    model = CASE.build(0)
    assert_close(small, script(model, model))


@three_ways(room=1.6)
def test_two_forwards_before_one_backward(model: nn.Module, call: Callable[..., Tensor]) -> list:
    loss = call(**CASE.batch(0)) + 2 * call(**CASE.batch(1))
    loss.backward()
    return [array(loss), gradients(model)]


@three_ways(room=1.6)
def test_two_forwards_then_two_backwards_in_either_order(model: nn.Module, call: Callable[..., Tensor]) -> list:
    seen = []
    for first, second in ((0, 1), (1, 0)):
        losses = [call(**CASE.batch(0)), call(**CASE.batch(1))]
        losses[first].backward()
        seen.append(gradients(model))
        losses[second].backward()
        seen.append(gradients(model))
        model.zero_grad()
    return seen


@three_ways()
def test_a_forward_without_backward_is_forgotten(model: nn.Module, call: Callable[..., Tensor]) -> list:
    dropped = array(call(**CASE.batch(5)))
    return [dropped, *train_steps(call, sgd(model.parameters()), range(2)), weights(model)]


# ---------------------------------------------------------------- writes between steps


def _scale_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(0.5)


def _scale_in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def _load_state(model: nn.Module) -> None:
    model.load_state_dict(CASE.build(3).state_dict())


def _load_state_of_one_layer(model: nn.Module) -> None:
    model.get_submodule("blocks.1.up").load_state_dict(CASE.build(3).blocks[1].up.state_dict())


@three_ways()
def test_what_nothing_sees_between_backward_and_step_counts(model: nn.Module, call: Callable[..., Tensor]) -> list:
    """Old code decays and clamps through `.data`, which raises no version counter: a step that began with what the
    backward left in slots would lose it."""
    optimizer, seen = chunkc.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), []
    for step in range(2):
        loss = call(**CASE.batch(step))
        loss.backward()
        for parameter in model.parameters():
            versions = parameter._version, parameter.grad._version
            parameter.data.mul_(0.9)
            parameter.grad.data.clamp_(-0.01, 0.01)
            assert versions == (parameter._version, parameter.grad._version)
        if (managed := managing(next(model.parameters()))) is not None:
            assert not managed[0].store.slots.present
        optimizer.step()
        if managed is not None:
            assert not managed[0].store.slots.present
        model.get_submodule("blocks.0.up").weight.data.mul_(0.5)
        optimizer.zero_grad()
        seen.append(array(loss))
    return [*seen, weights(model)]


WRITES = (_scale_data, _scale_in_place, _load_state, _load_state_of_one_layer)


@pytest.mark.second_tier
@pytest.mark.parametrize(
    ("write", "home"),
    [
        pytest.param(write, home, id=f"{write.__name__.strip('_')}-{home}", marks=[pytest.mark.slow] * ((at + on) % 2))
        for at, write in enumerate(WRITES)
        for on, home in enumerate(("cpu", "disk"))
    ],
)
def test_a_write_between_steps_is_seen(write: Callable[[nn.Module], None], home: str) -> None:
    def script(model: nn.Module, call: Callable[..., Tensor]) -> list:
        optimizer = sgd(model.parameters())
        seen = train_steps(call, optimizer, range(1))
        before = weights(model)
        write(model)
        assert differences(before, weights(model))
        seen += train_steps(call, optimizer, range(1, 3))
        return [*seen, weights(model)]

    run_three_ways(script, home=home)


# ---------------------------------------------------------------- hooks


def test_gradient_hooks_fire_and_may_change_the_gradient() -> None:
    def script(model: nn.Module, call: Callable[..., Tensor]) -> list:
        weight, untouched = model.blocks[1].up.weight, model.blocks[1].down.weight
        seen: list = []
        doubling = weight.register_hook(lambda gradient: seen.append(array(gradient)) or 2 * gradient)
        watching = untouched.register_hook(lambda gradient: seen.append(array(gradient)))
        backward(call, 0)
        assert len(seen) == 2
        doubling.remove()
        watching.remove()
        result = [gradients(model)]
        model.zero_grad()
        backward(call, 0)
        assert len(seen) == 2
        return [*result, gradients(model)]

    doubled, plain = run_three_ways(script)
    name = "blocks.1.up.weight"
    assert not differences(doubled.pop(name), 2 * plain.pop(name))
    assert not differences(doubled, plain)


@three_ways()
def test_post_accumulate_hooks_fire_with_the_gradient_in_place(model: nn.Module, call: Callable[..., Tensor]) -> list:
    seen: dict[str, list] = {}
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p, name=name: seen.setdefault(name, []).append(array(p.grad))
        )
    backward(call, 0)
    once = gradients(model)
    backward(call, 1)
    assert {name: len(arrays) for name, arrays in seen.items()} == dict.fromkeys(once, 2)
    assert not differences({name: arrays[0] for name, arrays in seen.items()}, once)
    assert not differences({name: arrays[1] for name, arrays in seen.items()}, gradients(model))
    return [once, gradients(model)]


@three_ways()
def test_optimizer_in_the_backward(model: nn.Module, call: Callable[..., Tensor]) -> list:
    """The step of a plain optimizer inside a post-accumulate hook, and the gradient dropped there."""

    def update(parameter: nn.Parameter) -> None:
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.05)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    losses = [backward(call, step) for step in range(3)]
    assert all(p.grad is None for p in model.parameters())
    return [losses, weights(model)]
