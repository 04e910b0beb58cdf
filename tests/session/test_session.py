"""What a session counts of earlier calls. Residents that leave the compute tier take their optimizer's states home with
them. The pass history: in the log for who asks for it, as artifacts for who traces, and made for nobody else.
"""

from __future__ import annotations

import gc
import logging
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import HUGE, adamw, compile_case, counted, segmented, session_of, take_step
from overlap_cases import case
from plain_modules import Residual
from torch import Tensor, nn

import chunkc
from chunkc.ir.errors import HomeError
from chunkc.policy.live_values import RealValues
from chunkc.runtime.device import cpu_allocator
from chunkc.session import compiled_step as graph
from chunkc.session.declared_states import declared_states, keeper_of
from chunkc.session.residency import stay
from chunkc.session.session import owner, sessions_of
from chunkc.torch_private import engine
from chunkc.torch_private.aot import LazyGraphModule

GRANULE = 512


def test_values_alive_take_whole_blocks_of_the_allocator() -> None:
    live = RealValues(GRANULE)
    values = [torch.zeros(n, dtype=torch.uint8) for n in (1, GRANULE, GRANULE + 1)]
    live.watch([*values, values[2][7:], torch.zeros(0)])
    assert live.nbytes() == (1 + 1 + 2) * GRANULE
    assert live.nbytes(leaving_out=values[2:]) == (1 + 1) * GRANULE
    del values[0]
    assert live.nbytes() == (1 + 2) * GRANULE


def test_what_stands_for_others_counts_as_is_said() -> None:
    """A plan's own figure: a sum of blocks, or, where blocks are bytes, any number."""
    live = RealValues(GRANULE)
    value = torch.zeros(3)
    live.watch([value], 5 * GRANULE)
    assert live.nbytes() == 5 * GRANULE


def test_what_one_graph_hands_to_the_next_is_held_by_who_has_it() -> None:
    """Beside an update, what the caller gave counts even if it is gone, but no value that a graph returned."""

    def captured(nbytes: int) -> Any:
        own = SimpleNamespace(user_outputs=[0], saved=[])
        return SimpleNamespace(own_memory=own, saved_nbytes=0, caller_nbytes=nbytes)

    live = RealValues()
    batch, hidden, loss = (torch.zeros(n, dtype=torch.uint8) for n in (10, 100, 1))
    live.forward_ran(captured(110), [batch], [hidden])
    live.forward_ran(captured(101), [hidden], [loss])
    assert live.external_to_update() == 111
    live.forward_ran(captured(111), [batch, hidden], [loss])
    del batch, hidden, loss
    assert live.external_to_update() == 11


@pytest.mark.parametrize("granule_nbytes", [1, GRANULE])
def test_outputs_that_are_kept_count_in_the_blocks_of_the_session_s_device(
    granule_nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chunkc.session.session.granule_of", lambda device: granule_nbytes)
    model, compiled = compile_case(case(), memory_budget=HUGE)
    session = session_of(model)
    kept = []
    with torch.no_grad():
        for step in range(3):
            kept.append(compiled(**case().batch(step)))
            assert session.live.nbytes() == len(kept) * max(4, granule_nbytes)


def test_the_plan_that_is_verified_before_anything_moves_is_the_first_call_s(monkeypatch: pytest.MonkeyPatch) -> None:
    made = counted(monkeypatch, graph, "step_plan")
    _, compiled = compile_case(case(), memory_budget=HUGE, place=False)
    with torch.no_grad():
        compiled(**case().batch(0))
        assert made.calls == 1
        compiled(**case().batch(1))
    assert made.calls == 1


@pytest.mark.parametrize("is_early", [False, True])
def test_decisions_know_the_stages_of_the_optimizer_s_updates(is_early: bool) -> None:
    model, compiled = compile_case(case(), memory_budget=HUGE)
    with torch.no_grad():
        made = chunkc.optim.LAMB(model.parameters()) if is_early else None
        compiled(**case().batch(0))
    assert session_of(model).planner_state.num_stages == (2 if is_early else 1)
    made = made or chunkc.optim.LAMB(model.parameters())
    assert session_of(model).planner_state.num_stages == 2


def test_an_optimizer_that_is_made_waits_for_a_phase_of_another_thread() -> None:
    """Its states make the layout another one, by which a phase must end as it began."""
    model, compiled = compile_case(case(), memory_budget=HUGE)
    with torch.no_grad():
        compiled(**case().batch(0))
    session = session_of(model)
    options = {"master_weights": False, "moments_dtype": torch.bfloat16}
    making = threading.Thread(target=lambda: chunkc.optim.AdamW(model.parameters(), **options))
    with session.entered():
        before = session.store.layout
        making.start()
        making.join(timeout=0.5)
        assert making.is_alive()
        assert session.store.layout is before
        assert declared_states(next(model.parameters())) is None
    making.join()
    assert session.store.layout.version != before.version


def test_a_session_ends_after_the_call_under_way_when_its_model_is_gone() -> None:
    torch._dynamo.reset()
    model, compiled = compile_case(case(), memory_budget=HUGE)
    with torch.no_grad():
        compiled(**case().batch(0))
    session = session_of(model)
    with session.entered():
        del model, compiled
        torch._dynamo.reset()
        gc.collect()
        assert not session.is_over
    assert session.is_over


# ---------------------------------------------------------------- residents that leave

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


@pytest.mark.quick(0, second=3)
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
    assert keeper_of(next(model.parameters())) is None
    call(rows(4)).backward()


# ---------------------------------------------------------------- the pass history

PHASES = ("chunkc_forward", "chunkc_backward")


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the graphs whose code is generated."""
    names: list[str] = []
    generate = LazyGraphModule._real_recompile

    def noting(module: Any) -> Any:
        names.append(type(module).__name__)
        return generate(module)

    monkeypatch.setattr(LazyGraphModule, "_real_recompile", noting)
    return names


def train() -> None:
    torch._dynamo.reset()
    segmented(nn.Linear(64, 64), HUGE)(torch.ones(2, 64)).sum().backward()


def test_a_log_of_everything_shows_captured_and_rewritten_graphs(
    generated: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "chunkc"):
        train()
    for phase in ("forward", "backward"):
        assert f"captured {phase}:\n" in caplog.text
        assert f"{phase} with chunk nodes:\n" in caplog.text
        assert f"{phase} after pass hoist:\n" in caplog.text
    assert re.search(r"pass hoist: \d+\.\d ms, \d+ nodes -> \d+\n", caplog.text)
    assert set(PHASES) <= set(generated)


def test_a_trace_has_the_plan_and_each_rewritten_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, str] = {}

    def trace(
        kind: str, *, metadata_fn: Callable[[], dict[str, str]], payload_fn: Callable[[], str], expect_trace_id: bool
    ) -> None:
        found[metadata_fn()["name"]] = payload_fn()

    monkeypatch.setattr(engine, "trace_structured", trace)
    train()
    after_passes = {name for name in found if name.startswith("chunkc_pass_")}
    assert set(found) - after_passes == {"chunkc_plan", *PHASES}
    assert {"chunkc_pass_regions_graph", "chunkc_pass_partition_forward", "chunkc_pass_hoist_backward"} <= after_passes
    assert found["chunkc_plan"].startswith("plan: budget")
    assert "tangents_1" not in found["chunkc_forward"]
    assert "tangents_1" in found["chunkc_backward"]


def test_no_code_is_generated_that_nobody_reads(generated: list[str]) -> None:
    train()
    assert not set(PHASES) & set(generated)
