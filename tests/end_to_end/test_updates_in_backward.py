"""`overlap="backward"` on the device, inside a hard limit: the bytes that were predicted, moment by moment.

The bits are those of every cell of `tests/properties/test_ladder.py`.
"""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import pytest
import torch
from harness import compile_case, minimum_nbytes, session_of
from zoo import CASES

import chunkc
from chunkc.runtime.device import cpu_allocator

pytestmark = [pytest.mark.second_tier, pytest.mark.timeout(300)]

NAME, NUM_STEPS = "byte_gpt", 3


def last_step(budget_nbytes: int) -> tuple[frozenset[int], dict[str, tuple[int, int]], dict[str, int]]:
    """Groups that the backward of the last step updated, (predicted, measured) bytes of its moments, and bytes that the
    step copied."""
    cpu_allocator.install()
    gc.collect()
    foreign_nbytes, case = cpu_allocator.current_nbytes(), CASES[NAME]
    model, compiled = compile_case(case, memory_budget=budget_nbytes, whole_graph="never")
    optimizer = chunkc.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, overlap="backward")
    before: dict[str, int] = {}
    torch.manual_seed(0)
    for step in range(NUM_STEPS):
        before = dict(chunkc.report(model).traffic_nbytes) if step else {}
        batch = case.batch(step)
        with cpu_allocator.hard_limit(foreign_nbytes + budget_nbytes if step else None):  # Dynamo traces in the first
            case.loss(compiled(**batch)).backward()
            optimizer.step()
        optimizer.zero_grad()
        del batch
    record, traffic = session_of(model).records.latest["backward"], chunkc.report(compiled).traffic_nbytes
    predicted = {moment.name: moment.nbytes for moment in record.plan.moments if moment.phase == "backward"}
    moments = {}
    for label, measured in record.measurement.peaks:
        moments[label] = predicted[label], measured - foreign_nbytes
    updated = frozenset(group for phase in record.plan.phases for group in phase.updated)
    return updated, moments, {way: traffic[way] - before[way] for way in before}


@pytest.mark.parametrize("percent", [100, pytest.param(130, marks=pytest.mark.slow), 300])
def test_what_is_explained_is_measured(percent: int) -> None:
    """Of a model in one graph: bytes at each moment of the backward, peak and copies of a step. At the last budget all
    stays that moves without `overlap`, and none of its gradients."""
    case, budget = CASES[NAME], minimum_nbytes(NAME) * percent // 100
    updated, moments, traffic_nbytes = last_step(budget)
    for label, (predicted, measured) in moments.items():
        assert predicted == measured, label
    options: dict[str, Any] = {"memory_budget": budget, "whole_graph": "never", "activations": "keep"}
    options |= {"hardware": "cpu", "codegen": "eager"}
    explanation = chunkc.explain(case.build(), **case.batch(0), **options, overlap="backward")
    assert dataclasses.asdict(explanation.traffic_nbytes) == traffic_nbytes
    assert any(moment.call.startswith("update.") and moment.phase == "backward" for moment in explanation.moments) == (
        bool(updated)
    )
    without = chunkc.explain(case.build(), **case.batch(0), **options)
    assert explanation.minimum_budget_nbytes == without.minimum_budget_nbytes
    if updated:
        assert explanation.traffic_nbytes.to_device < without.traffic_nbytes.to_device
        assert explanation.traffic_nbytes.to_home < without.traffic_nbytes.to_home
        assert any("the backward updates" in note for note in explanation.notes)
