"""What optimizers and others write to parameters is seen: by autograd, by split masters, by copies of an optimizer."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from optim_models import (
    MLP,
    MODES,
    assert_equal,
    assert_managed,
    backward,
    batch,
    build,
    copy_gradients,
    snapshot,
    states,
    through_a_file,
    train,
    twin_of,
)

import chunkc
from chunkc.ir.states import MASTER

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
BF16 = torch.bfloat16


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("update_on", ["device", "cpu"])
def test_a_backward_of_an_earlier_forward_is_refused_by_autograd(mode: str, update_on: str) -> None:
    """As in PyTorch: it would compute with parameters of two steps."""
    model, call = build(mode)
    optimizer = chunkc.optim.AdamW(model.parameters(), update_on=update_on)
    train(call, optimizer, range(1))
    first, second = call(batch(0)), call(batch(1))
    first.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.backward()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("overlap", ["none", "forward"])
def test_eager_code_that_saved_a_parameter_is_told(mode: str, overlap: str) -> None:
    model, call = build(mode)
    optimizer = chunkc.optim.AdamW(model.parameters(), update_on="cpu", overlap=overlap)
    train(call, optimizer, range(1))
    optimizer.synchronize()
    x = torch.ones(1, 128, requires_grad=True)
    saved = model.layers[0](x).sum()
    backward(call, 1)
    optimizer.step()
    optimizer.synchronize()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()


def written(model: MLP) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p))


@pytest.mark.parametrize("mode", ["plain", "placed"])
@pytest.mark.parametrize("copied", [copy.deepcopy, through_a_file])
@pytest.mark.parametrize("before", [True, False])
def test_copies_leave_out_lower_bits_of_other_contents(mode: str, copied: Any, before: bool) -> None:
    """Written to before it was copied, or the copy is written to."""
    model, call = build(mode, dtype=BF16)
    optimizer = chunkc.optim.AdamW(model.parameters(), lr=1e-2)
    train(call, optimizer, range(2), BF16)
    if before:
        written(model)
    other, other_optimizer = copied((model, optimizer))
    kept = [state[MASTER] for state in copied(other_optimizer).state_dict()["state"].values()]
    assert before or any(not torch.equal(m, p.float()) for p, m in zip(other.parameters(), kept, strict=True))
    if not before:
        written(other)
    for found, of in ((other, other_optimizer), *(((model, optimizer),) if before else ())):
        masters = [state[MASTER] for _, state in sorted(of.state_dict()["state"].items())]
        assert all(torch.equal(m, p.float()) for p, m in zip(found.parameters(), masters, strict=True))


def test_a_copy_s_chunks_are_laid_out_for_its_states() -> None:
    """8-bit moments want tensors at multiples of 256, which the copied model's layout can only know from the copy."""
    model = torch.nn.Sequential(torch.nn.Linear(100, 90, bias=False), torch.nn.Linear(90, 100, bias=False))
    optimizer = chunkc.optim.AdamW(model.parameters(), moments_dtype="int8")
    other, other_optimizer = copy.deepcopy((model, optimizer))
    chunkc.place(other, chunk_size="1MiB")
    for p in other.parameters():
        p.grad = torch.ones_like(p)
    other_optimizer.step()
    assert all(other_optimizer.state[p]["exp_avg"].dtype == torch.uint8 for p in other.parameters())


def test_rules_that_keep_the_same_states_may_follow_each_other() -> None:
    """Which kind of master there would be, is nothing to fp32 parameters. Each begins with states of its own."""
    model, call = build("adopted")
    shadow = twin_of(model)
    for step, make in enumerate(
        (chunkc.optim.AdamW, chunkc.optim.LAMB, partial(chunkc.optim.AdamW, master_weights="float32"))
    ):
        optimizer, twin_optimizer = make(model.parameters()), make(shadow.parameters())
        backward(call, step)
        copy_gradients(model, shadow)
        for of in (optimizer, twin_optimizer):
            of.step()
            of.zero_grad()
        assert_equal(snapshot(model), snapshot(shadow))
        assert_equal(states(model, optimizer), states(shadow, twin_optimizer))
    assert_managed(model, "adopted")


def test_a_group_that_is_refused_is_not_added() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(99, 91, bias=False), torch.nn.Linear(91, 99, bias=False))
    optimizer = chunkc.optim.AdamW([torch.nn.Parameter(torch.zeros(3))], moments_dtype="int8")
    chunkc.place(model, chunk_size="1MiB")
    with pytest.raises(chunkc.OptionsError, match="make the optimizers before"):
        optimizer.add_param_group({"params": model.parameters()})
    assert len(optimizer.param_groups) == 1
    chunkc.optim.AdamW(model.parameters())
