"""A compiled model that has run, explained: its own options, and what was measured beside what is predicted."""

from __future__ import annotations

import pytest
import torch
from harness import adamw, compile_case
from zoo import CASES

import chunkc
from chunkc.explaining.measured import measured_side
from chunkc.formats import render_text
from chunkc.runtime import cpu_allocator

BUDGET = 8_000_000


def test_an_uncompiled_model_has_no_measured_side() -> None:
    assert measured_side(torch.nn.Linear(2, 2)) == ({}, None, None)


@pytest.mark.second_tier
def test_a_compiled_model_is_explained_by_its_own_options_and_beside_what_it_measured() -> None:
    cpu_allocator.install()
    foreign_nbytes = cpu_allocator.current_nbytes()
    case = CASES["byte_gpt"]
    model, compiled = compile_case(case, memory_budget=BUDGET, whole_graph="never")
    optimizer = adamw(model.parameters())
    for step in range(2):
        batch = case.batch(step)
        loss = case.loss(compiled(**batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    found = chunkc.explain(compiled, **batch)
    assert found.model == type(model).__name__
    assert found.codegen == "eager"
    assert found.memory_budget_nbytes == BUDGET
    assert found.measured is not None
    assert found.measured.peak_nbytes is not None
    assert (
        0.9 * found.predicted_peak_nbytes < found.measured.peak_nbytes - foreign_nbytes <= found.predicted_peak_nbytes
    )
    predicted = {moment.call for moment in found.moments}
    measured = [call for call, nbytes in found.measured.moments if nbytes is not None]
    assert len(measured) > 10
    assert set(measured) <= predicted
    assert "measured peak" in render_text(found)
    other = chunkc.explain(compiled, **batch, memory_budget=2 * BUDGET)
    assert other.memory_budget_nbytes == 2 * BUDGET
