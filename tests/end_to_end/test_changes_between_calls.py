"""What users do to a model between calls: as in plain PyTorch, or refused before anything changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from harness import HUGE, adamw, array, differences, gradients, segmented, session_of, take_step, weights
from scripts import (
    CASE,
    assert_close,
    backward,
    compile_large,
    compile_small,
    sgd,
    slowly_on_disks,
    small_budget,
    three_ways,
    train_steps,
    two_alike,
    weight_of,
)
from torch import Tensor, nn

import chunkc

# ---------------------------------------------------------------- replaced data


@slowly_on_disks
@three_ways()
def test_replaced_data_is_trained(model: nn.Module, call: Callable[..., Tensor]) -> list:
    optimizer, seen = sgd(model.parameters()), []
    seen += train_steps(call, optimizer, range(1))
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5
    seen += [*train_steps(call, optimizer, range(1, 3)), weights(model)]
    return seen


@slowly_on_disks
def test_replaced_data_under_chunked_updates() -> None:
    """Replaced before the step alone: the update begins from what the user sees."""

    def script(make: Callable[..., torch.optim.Optimizer], model: nn.Module, call: Callable[..., Tensor]) -> list:
        optimizer = make(model.parameters(), lr=1e-3, eps=1e-3)
        for step in range(2):
            backward(call, step)
            for parameter in model.parameters():
                parameter.data = parameter.data * 0.5
            optimizer.step()
            optimizer.zero_grad()
        return [weights(model)]

    small = script(chunkc.optim.AdamW, *compile_small())
    plain = CASE.build(0)
    assert_close(small, script(torch.optim.AdamW, plain, plain))


@slowly_on_disks
def test_replaced_data_beside_an_update_that_has_begun_is_refused() -> None:
    model, compiled = compile_small("cpu")
    optimizer = chunkc.optim.AdamW(model.parameters(), lr=1e-3, update_on="cpu", overlap="backward")
    train_steps(compiled, optimizer, range(2))
    backward(compiled, 2)
    parameter = two_alike(model)[0]
    parameter.data = parameter.data.clone()
    with pytest.raises(chunkc.UnsupportedError, match="after its update had begun"):
        optimizer.step()


@slowly_on_disks
def test_sharpness_aware_minimisation() -> None:
    """Each step goes up, computes a second gradient, and puts the old tensors back."""

    def script(model: nn.Module, call: Callable[..., Tensor]) -> list:
        optimizer, seen = sgd(model.parameters()), []
        for step in range(2):
            seen.append(backward(call, step))
            old = {p: p.data for p in model.parameters()}
            for p in model.parameters():
                p.data = p.data + 0.01 * p.grad.sign()
            optimizer.zero_grad()
            seen.append(backward(call, step))
            for p in model.parameters():
                p.data = old[p]
            optimizer.step()
            optimizer.zero_grad()
        return [*seen, weights(model)]

    small = script(*compile_small())
    assert not differences(small, script(*compile_large()))


@slowly_on_disks
@three_ways()
def test_data_replaced_between_forward_and_backward(model: nn.Module, call: Callable[..., Tensor]) -> list:
    loss = call(**CASE.batch(0))
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    loss.backward()
    return [gradients(model), weights(model)]


@slowly_on_disks
@three_ways()
def test_vector_to_parameters(model: nn.Module, call: Callable[..., Tensor]) -> list:
    optimizer = sgd(model.parameters())
    train_steps(call, optimizer, range(1))
    vector = nn.utils.parameters_to_vector(model.parameters()).detach() * 0.9
    nn.utils.vector_to_parameters(vector, model.parameters())
    return [*train_steps(call, optimizer, range(2)), weights(model)]


def test_lower_bits_of_replaced_data_are_left_out() -> None:
    """A split master begins again from what the user put there."""
    torch._dynamo.reset()
    seen = []
    for replaced in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).bfloat16()
        compiled = segmented(chunkc.place(model), 380_000)
        optimizer = chunkc.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(3):
            torch.manual_seed(step)
            take_step(compiled(torch.randn(4, 64, dtype=torch.bfloat16)).square().mean(), optimizer)
            for p in model.parameters() if step == 1 else ():
                with torch.no_grad():
                    p.data = p.data * 2 if replaced else p.data
                    if not replaced:
                        p.mul_(2)
        seen.append({name: array(p) for name, p in model.named_parameters() if p.dim() == 2})  # what lives in chunks
    assert not differences(*seen)


@slowly_on_disks
def test_shared_memory_is_refused_until_the_parameter_has_its_own() -> None:
    model, compiled = compile_small()
    backward(compiled, 0)
    parameter = weight_of(model)
    before = array(parameter)
    parameter.share_memory_()
    with pytest.raises(chunkc.UnsupportedError, match=r"processes share"):
        compiled(**CASE.batch(0))
    assert parameter.is_shared()
    assert not differences(array(parameter), before)
    parameter.data = parameter.data.clone()
    backward(compiled, 0)


def test_a_model_in_shared_memory_stays_there() -> None:
    torch._dynamo.reset()
    model = CASE.build(0).share_memory()
    compiled = torch.compile(model, backend="chunkc", options={"memory_budget": HUGE, "codegen": "eager"})
    chunkc.place(other := CASE.build(0).share_memory())
    train_steps(compiled, adamw(model.parameters()), range(1))
    assert all(p.is_shared() for p in (*model.parameters(), *other.parameters()))


def test_memory_that_others_have_stays() -> None:
    """A `state_dict` from before the first call keeps following the parameters, and so does data that two share."""
    torch._dynamo.reset()
    model = CASE.build(0)
    state = model.state_dict()
    compiled = torch.compile(model, backend="chunkc", options={"memory_budget": HUGE, "codegen": "eager"})
    chunkc.place(model)
    train_steps(compiled, adamw(model.parameters()), range(1))
    now = model.state_dict()
    assert not differences({k: array(v) for k, v in state.items()}, {k: array(v) for k, v in now.items()})
    assert all(state[name].data_ptr() == p.data_ptr() for name, p in model.named_parameters())


@slowly_on_disks
def test_data_tied_before_the_first_call() -> None:
    def script(model: nn.Module, call: Callable[..., Tensor]) -> list:
        first, second = two_alike(model)
        second.data = first.data
        losses = train_steps(call, sgd(model.parameters()), range(2))
        assert torch.equal(first, second)
        return [*losses, weights(model)]

    torch._dynamo.reset()
    model = CASE.build(0)
    compiled = torch.compile(model, backend="chunkc", options={"memory_budget": 4 * small_budget(), "codegen": "eager"})
    plain = CASE.build(0)
    assert_close(script(model, compiled), script(plain, plain))


@slowly_on_disks
@pytest.mark.parametrize("shift", [0, 1])
def test_data_tied_after_the_first_call_is_refused(shift: int) -> None:
    """All of it, or but for one element."""
    model, compiled = compile_small()
    backward(compiled, 0)
    first, second = two_alike(model)
    memory = torch.zeros(shift + first.numel())
    first.data, second.data = (memory[begin : begin + first.numel()].view_as(first) for begin in (0, shift))
    with pytest.raises(chunkc.UnsupportedError, match="the same memory"):
        compiled(**CASE.batch(0))


@slowly_on_disks
@pytest.mark.parametrize("budget", ["small", "large"])
def test_another_dtype_is_laid_out_anew(budget: str) -> None:
    model, compiled = compile_small() if budget == "small" else compile_large()
    optimizer = adamw(model.parameters())
    train_steps(compiled, optimizer, range(2))
    former = session_of(model)
    model.to(torch.bfloat16)
    backward(compiled, 2)
    assert all(p.dtype == torch.bfloat16 and p.grad.dtype == torch.bfloat16 for p in model.parameters())
    before = weights(model)
    optimizer.step()
    assert differences(before, weights(model))
    assert session_of(model) is not former
    assert former.is_over


@slowly_on_disks
def test_a_step_right_after_a_conversion_refuses() -> None:
    model, compiled = compile_small()
    optimizer = adamw(model.parameters())
    backward(compiled, 0)
    model.to(torch.bfloat16)
    before = weights(model)
    with pytest.raises(chunkc.UnsupportedError, match=r"float32.*bfloat16"):
        optimizer.step()
    assert not differences(before, weights(model))


# ---------------------------------------------------------------- tied, frozen, written


@pytest.mark.parametrize("codegen", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_tying_after_the_first_call(codegen: str) -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))

    def script(model: nn.Sequential, call: Callable[[Tensor], Tensor]) -> list:
        optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(4, 64)
        for step in range(3):
            if step == 1:
                model[2][0].weight = model[0][0].weight
            take_step(call(x).square().mean(), optimizer)
        return [weights(model)]

    seen = []
    for budget in (150_000, HUGE):
        torch._dynamo.reset()
        model = chunkc.place(build())
        options = {"memory_budget": budget, "codegen": codegen, "whole_graph": "never"}
        seen.append(script(model, torch.compile(model, backend="chunkc", options=options)))
    assert not differences(*seen)
    plain = build()
    assert_close(seen[0], script(plain, plain))


@slowly_on_disks
@three_ways()
def test_frozen_between_forward_and_backward(model: nn.Module, call: Callable[..., Tensor]) -> list:
    seen = []
    for step in range(2):
        loss = call(**CASE.batch(step))
        chosen = [p for i, p in enumerate(model.parameters()) if i % 2 == step]
        for parameter in chosen:
            parameter.requires_grad_(False)
        loss.backward()
        seen.append(gradients(model))
        for parameter in chosen:
            parameter.requires_grad_(True)
    return seen


@slowly_on_disks
@pytest.mark.parametrize("room", [1.05, 20.0])
def test_a_write_between_forward_and_backward_is_refused(room: float) -> None:
    """By autograd, under every budget: it knows by version counters."""
    model, compiled = compile_small(room=room)
    for linear in [module for module in model.modules() if isinstance(module, nn.Linear)][1:2]:
        parameter = linear.weight
        loss = compiled(**CASE.batch(0))
        with torch.no_grad():
            parameter.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_lower_bits_of_a_replaced_parameter_s_neighbours_stay() -> None:
    """Of the chunk that gets another home since somebody has views of the one that was replaced."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8))).bfloat16()
    compiled = segmented(chunkc.place(model, chunk_size=16384), 190_000, chunk_size=16384)
    optimizer = chunkc.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(8, 64).bfloat16()
    for _ in range(2):
        take_step(compiled(x).square().mean(), optimizer)
    store = session_of(model).store
    names = {id(parameter): name for name, parameter in store.views.parameters().items()}
    replaced, other = model[6].weight, model[7].weight
    assert names[id(other)] in store.views.in_chunk_of(names[id(replaced)])
    assert store.views.is_managed(names[id(other)])
    kept, before = replaced.detach(), optimizer.state[other]["master_low"].clone()
    assert before.any()
    replaced.data = replaced.data.clone()
    compiled(x)
    assert torch.equal(optimizer.state[other]["master_low"], before)
    assert kept.any()
