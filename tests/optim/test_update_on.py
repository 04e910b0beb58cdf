"""`update_on`: the same bits at home as in slots, nothing moved, and errors where home is no memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from harness import TINY, array, compile_case, differences, refuse, session_of
from overlap_cases import case
from torch import nn
from zoo import Case

import chunkc
from chunkc.machines.presets import preset
from chunkc.optim.update_mode import UpdateMode


def subject(of: Case, home: str = "cpu") -> tuple[nn.Module, nn.Module, Any]:
    nbytes = refuse(of, memory_budget=TINY, home=home).minimum_nbytes
    model, compiled = compile_case(of, memory_budget=nbytes, home=home, whole_graph="never")
    return model, compiled, session_of(model)


def train(of: Case, update_on: str, steps: int = 3) -> list[Any]:
    model, compiled, session = subject(of)
    groups = [
        {"params": list(model.layers[:2].parameters())},
        {"params": list(model.layers[2:].parameters()), "lr": 0.1},
    ]
    optimizer = chunkc.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, update_on=update_on)
    results = []
    for step in range(steps):
        loss = compiled(**of.batch(step))
        loss.backward()
        if step == 1:  # gradients that the user replaced, and one that is missing
            model.layers[0].weight.grad = model.layers[0].weight.grad.clone() * 2
            model.layers[3].weight.grad = None
        moved = session.store.slots.traffic.to_device_nbytes, session.store.slots.traffic.to_home_nbytes
        optimizer.step()
        after = session.store.slots.traffic.to_device_nbytes, session.store.slots.traffic.to_home_nbytes
        assert (moved == after) == (update_on == "cpu")
        results += [array(loss), *(array(p) for p in model.parameters())]
        results += [array(t) for state in optimizer.state.values() for t in state.values()]
        optimizer.zero_grad()
    return results


@pytest.mark.second_tier
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_at_home_as_in_slots(dtype: torch.dtype) -> None:
    expected = train(case(dtype), "device")
    assert not differences(train(case(dtype), "cpu"), expected)
    assert not differences(train(case(dtype), "auto"), expected)


def test_a_disk_is_no_memory_to_update() -> None:
    of = case()
    model, compiled, _ = subject(of, home="disk")
    optimizer = chunkc.optim.AdamW(model.parameters(), update_on="cpu")
    compiled(**of.batch(0)).backward()
    before = [array(p) for p in model.parameters()]
    with pytest.raises(chunkc.OptionsError, match='home="cpu", or update_on="device"'):
        optimizer.step()
    assert not differences(before, [array(p) for p in model.parameters()])


def test_auto_divides_by_cost_on_a_gpu_and_leaves_disks_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    of = case()
    _, compiled, session = subject(of)
    compiled(**of.batch(0))
    groups = session.store.layout.groups
    monkeypatch.setattr(session, "hardware", preset("h200"))

    def at_home(update_on: str) -> frozenset[int]:
        return UpdateMode(update_on=update_on).at_home(groups, session.hardware, home=session.options.home)

    assert at_home("auto")
    assert at_home("device") == frozenset()
    assert at_home("cpu") == frozenset(group.index for group in groups)
    on_disk = session.options.model_copy(update={"home": "disk"})
    session.agree(replace(session.terms, options=on_disk))
    assert at_home("auto") == frozenset()
