"""What users do to a model and its gradients between calls: as in plain PyTorch, or refused before anything changes.

Views of gradients keep their bytes, own tensors are added to. Most of what users do: `test_every_cell`.
"""

from __future__ import annotations

import io

import pytest
import torch
from harness import HUGE, adamw, array, compile_case, differences, segmented, session_of, take_step, weights
from scripts import (
    CASE,
    backward,
    compile_large,
    compile_small,
    slowly_on_disks,
    small_budget,
    train_steps,
    two_alike,
    weight_of,
)
from torch import nn

import chunkc

# ---------------------------------------------------------------- replaced data


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


# ---------------------------------------------------------------- written


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


# ---------------------------------------------------------------- gradients


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
def test_views_of_a_gradient_outlive_a_new_home_of_its_chunk() -> None:
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


# ---------------------------------------------------------------- saved


@pytest.mark.parametrize("home", ["cpu", "disk"])
def test_every_parameter_is_saved_with_its_own_bytes_only(home: str) -> None:
    model, compiled = compile_small(home)
    backward(compiled, 0)
    tensors = {
        f"{name}{kind}": tensor
        for name, p in model.named_parameters()
        for kind, tensor in (("", p), (" detached", p.detach()), (" gradient", p.grad))
    }
    for name, tensor in tensors.items():
        file = io.BytesIO()
        torch.save(tensor, file)
        assert file.tell() <= tensor.nbytes + 4096, f"{name}: {file.tell()} bytes for {tensor.nbytes}"
        file.seek(0)
        assert torch.equal(torch.load(file), tensor)
    state, file, plain = model.state_dict(), io.BytesIO(), CASE.build(1)
    torch.save(state, file)
    assert file.tell() <= sum(t.nbytes for t in state.values()) + 1024 * len(state) + 4096
    file.seek(0)
    plain.load_state_dict(torch.load(file))
    assert list(state) == list(plain.state_dict())
    assert not differences(weights(model), weights(plain))
