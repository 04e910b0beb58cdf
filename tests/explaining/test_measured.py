"""A compiled model that has run, explained: its own options, and what was measured beside what is predicted."""

from __future__ import annotations

import gc

import pytest
import torch
from harness import adamw, compile_case, take_step
from torch import nn
from zoo import CASES

import chunkc
from chunkc.explaining.formats import render_text
from chunkc.explaining.measured import measured_side
from chunkc.runtime.device import cpu_allocator

BUDGET, ROOMY = 8_000_000, 1 << 30
EAGER = {"codegen": "eager", "whole_graph": "never"}


def test_an_uncompiled_model_has_no_measured_side() -> None:
    assert measured_side(torch.nn.Linear(2, 2)) == ({}, None, None)


@pytest.mark.second_tier
def test_a_compiled_model_is_explained_by_its_own_options_and_beside_what_it_measured() -> None:
    cpu_allocator.install()
    case = CASES["byte_gpt"]
    held = torch.zeros(1 << 20)
    model, compiled = compile_case(case, memory_budget=BUDGET, whole_graph="never")
    optimizer = adamw(model.parameters())
    for step in range(2):
        batch = case.batch(step)
        loss = case.loss(compiled(**batch))
        take_step(loss, optimizer)
    found = chunkc.explain(compiled, **batch)
    assert found.model == type(model).__name__
    assert found.codegen == "eager"
    assert found.memory_budget_nbytes == BUDGET
    assert 0.9 * found.predicted_peak_nbytes < found.measured.peak_nbytes <= found.predicted_peak_nbytes
    assert found.measured.unplanned_nbytes >= held.nbytes
    predicted = {moment.call for moment in found.moments}
    measured = [call for call, nbytes in found.measured.moments if nbytes is not None]
    assert len(measured) > 10
    assert set(measured) <= predicted
    assert max(nbytes for _, nbytes in found.measured.moments if nbytes is not None) <= found.measured.peak_nbytes
    text = render_text(found)
    assert "measured peak" in text
    assert "in no plan" in text
    other = chunkc.explain(compiled, **batch, memory_budget=2 * BUDGET)
    assert other.memory_budget_nbytes == 2 * BUDGET


class Weighed(nn.Module):
    """Has a number and a row in its code."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        row = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
        return torch.where(x > 0, self.map(x) * row, torch.tensor(0.5)).sum()


def test_constants_of_compiled_code_count_for_as_long_as_it_is_there() -> None:
    cpu_allocator.install()
    foreign_nbytes = cpu_allocator.current_nbytes()
    x = torch.ones(4, 8)
    least = chunkc.explain(Weighed(), x, memory_budget=1).minimum_budget_nbytes
    for budget in (ROOMY, least):
        torch._dynamo.reset()
        gc.collect()
        said = chunkc.explain(Weighed(), x, memory_budget=budget, whole_graph="never")
        gc.collect()
        model = Weighed()
        run = torch.compile(model, backend="chunkc", options={"memory_budget": budget, **EAGER})
        optimizer = chunkc.optim.AdamW(model.parameters())
        for _ in range(3):
            loss = run(x)
            take_step(loss, optimizer)
        found = chunkc.report(model)
        assert found.predicted_peak_nbytes == found.measured_peak_nbytes - foreign_nbytes == said.predicted_peak_nbytes
        assert found.minimum_budget_nbytes == said.minimum_budget_nbytes == least
        del model, run, optimizer, loss
