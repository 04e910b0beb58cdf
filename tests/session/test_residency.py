"""Residents that leave the compute tier take their optimizer's states home with them."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from harness import adamw, segmented, take_step
from plain_modules import Residual
from torch import Tensor, nn

import chunkc
from chunkc.ir.errors import HomeError
from chunkc.runtime.device import cpu_allocator
from chunkc.session import residency as moving
from chunkc.session.residency import stay
from chunkc.session.session import owner, sessions_of

WIDTH = 64


def rows(num_rows: int) -> Tensor:
    return torch.randn(num_rows, 16, WIDTH, generator=torch.Generator().manual_seed(num_rows))


OPTIMIZERS = {
    "adamw": adamw,
    "int8": lambda parameters: chunkc.optim.AdamW(parameters, moments_dtype="int8"),
    "lamb": lambda parameters: chunkc.optim.LAMB(parameters, weight_decay=0.1),
}


def trained_model(optimizer: str = "adamw", dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any, Any]:
    """A model in which everything stays, after a step; what calls it, and its optimizer."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Residual().to(dtype)
    made = OPTIMIZERS[optimizer](model.parameters())
    call = segmented(model, 1 << 30)
    step(call, made, dtype)
    return model, call, made


def step(call: Any, optimizer: Any, dtype: torch.dtype = torch.float32) -> None:
    take_step(call(rows(4).to(dtype)), optimizer)


@pytest.mark.second_tier
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_states_go_home_and_training_goes_on_with_the_same_bits(optimizer: str, dtype: torch.dtype) -> None:
    finals = []
    for leaves in (False, True):
        model, call, made = trained_model(optimizer, dtype)
        (session,) = sessions_of(model.parameters())
        assert session.store.resident
        if leaves:
            stay(session, replace(session.planner_state, resident=frozenset({0})))
            for parameter in model.parameters():
                name = owner(parameter)[1]
                for kind, state in made.state[parameter].items():
                    if kind != "step" and session.store.views.is_managed(name):
                        assert state.data_ptr() == session.store.views.home_view(kind, name).data_ptr()
        for _ in range(2):
            step(call, made, dtype)
        finals.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*finals, strict=True))


def test_what_leaves_no_longer_counts() -> None:
    cpu_allocator.install()
    model, _, _ = trained_model()
    (session,) = sessions_of(model.parameters())
    gc.collect()
    before = cpu_allocator.current_nbytes()
    leaving = sum(s.spec.nbytes + s.spec.optimizer_nbytes for g in session.store.layout.groups for s in g.slices)
    stay(session, replace(session.planner_state, resident=frozenset()))
    gc.collect()
    assert cpu_allocator.current_nbytes() == before - leaving


def test_a_step_that_stays_out_of_the_way_of_a_larger_batch() -> None:
    """The room that residents make for a larger batch is there at its first call: states do not wait for the step."""
    cpu_allocator.install()
    torch._dynamo.reset()
    gc.collect()
    foreign_nbytes = cpu_allocator.current_nbytes()
    model = Residual()
    call = segmented(model, 3_600_000)
    optimizer = adamw(model.parameters())
    for num_rows in (3, 4, 3, 20):
        cpu_allocator.reset_peak()
        call(rows(num_rows)).backward()
        peak_nbytes = cpu_allocator.peak_nbytes() - foreign_nbytes
        optimizer.step()
        optimizer.zero_grad()
    assert chunkc.report(model).num_resident_chunks == 0
    assert peak_nbytes <= 3_600_000


def test_where_home_has_no_room_nothing_has_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    model, call, optimizer = trained_model()
    (session,) = sessions_of(model.parameters())
    resident, states = session.store.resident, dict(optimizer.state[next(model.parameters())])

    def full(*args: Any) -> None:
        raise HomeError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(session.store, "place", full)
        with pytest.raises(HomeError):
            stay(session, replace(session.planner_state, resident=frozenset()))
    assert session.store.resident == resident
    assert all(optimizer.state[next(model.parameters())][kind] is state for kind, state in states.items())
    assert not session.store.arena.chunks
    stay(session, replace(session.planner_state, resident=frozenset()))
    step(call, optimizer)


def test_nobody_s_states() -> None:
    """Of an optimizer that is gone, or of torch's, nothing moves but parameters and gradients."""
    model, call, optimizer = trained_model()
    (session,) = sessions_of(model.parameters())
    del optimizer
    gc.collect()
    stay(session, replace(session.planner_state, resident=frozenset()))
    assert not moving.declared(next(model.parameters())).keeper()
    call(rows(4)).backward()
