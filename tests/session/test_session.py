"""What a session counts of earlier calls."""

from __future__ import annotations

import gc
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import HUGE, compile_case, counted, session_of
from overlap_cases import case

import chunkc
from chunkc.policy.live_values import RealValues
from chunkc.session import compiled_step as graph
from chunkc.session.declared_states import declared_states

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
