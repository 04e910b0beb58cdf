"""`overlap="backward"` on the device, inside a hard limit: the bits of `"none"`, and the bytes that were predicted."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import numpy as np
import pytest
import torch
from harness import Arrays, array, compile_case, differences, minimum_nbytes, weights
from zoo import CASES

import chunkc
from chunkc.runtime.device import cpu_allocator
from chunkc.session.session import owner

pytestmark = [pytest.mark.second_tier, pytest.mark.timeout(300)]

NUM_STEPS = 3


@dataclasses.dataclass(frozen=True)
class Trained:
    """`updated`: groups that backwards of the last step updated. `moments`: (predicted, measured) bytes of them."""

    losses: list[np.ndarray]
    weights: Arrays
    updated: frozenset[int]
    moments: dict[str, tuple[int, int]]
    traffic_nbytes: dict[str, int]
    measured_peak_nbytes: int
    report: chunkc.Report


def train(name: str, budget_nbytes: int, overlap: str) -> Trained:
    cpu_allocator.install()
    gc.collect()
    foreign_nbytes = cpu_allocator.current_nbytes()
    case = CASES[name]
    model, compiled = compile_case(case, memory_budget=budget_nbytes, whole_graph="never")
    optimizer = chunkc.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, overlap=overlap)
    losses: list[np.ndarray] = []
    updated: set[int] = set()
    moments: dict[str, tuple[int, int]] = {}
    traffic: dict[str, int] = {}
    torch.manual_seed(0)
    for step in range(NUM_STEPS):
        updated.clear()
        moments.clear()
        if losses:
            traffic = dict(chunkc.report(model).traffic_nbytes)
        batch = case.batch(step)
        limit = foreign_nbytes + budget_nbytes if step else None  # Dynamo traces in the first step
        with cpu_allocator.hard_limit(limit):
            loss = case.loss(compiled(**batch))
            loss.backward()
            optimizer.step()
        losses.append(array(loss))
        (session,) = {found[0] for p in model.parameters() if (found := owner(p)) is not None}
        record = session.records.latest["backward"]
        updated |= {group for phase in record.plan.phases for group in phase.updated}
        predicted = {m.name: m.nbytes for m in record.plan.moments if m.phase == "backward"}
        for label, measured in record.measurement.peaks:
            assert measured is not None
            moments[label] = predicted[label], measured - foreign_nbytes
        optimizer.zero_grad()
        del batch, loss
    report = chunkc.report(compiled)
    assert report.measured_peak_nbytes is not None
    moved = {way: report.traffic_nbytes[way] - traffic[way] for way in traffic}
    peak_nbytes = report.measured_peak_nbytes - foreign_nbytes
    return Trained(losses, weights(model), frozenset(updated), dict(moments), moved, peak_nbytes, report)


@pytest.mark.parametrize(
    "name",
    [
        *("graph_breaks", "called_twice"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama_tied", "gpt2_dropout", "sometimes_unused")),
    ],
)
def test_the_same_bits_within_the_limit(name: str) -> None:
    budget = minimum_nbytes(name) * 6 // 5
    found, expected = train(name, budget, "backward"), train(name, budget, "none")
    assert not differences([found.losses, found.weights], [expected.losses, expected.weights])
    assert found.updated or name == "sometimes_unused", "of which no chunk has all its gradients in one backward"
    assert found.report.predicted_peak_nbytes <= budget
    assert found.measured_peak_nbytes <= budget


@pytest.mark.parametrize("percent", [100, pytest.param(130, marks=pytest.mark.slow), 300])
def test_what_is_explained_is_measured(percent: int) -> None:
    """Of a model in one graph: bytes at each moment of the backward, peak and copies of a step. At the last budget all
    stays that moves without `overlap`, and none of its gradients."""
    name, case = "byte_gpt", CASES["byte_gpt"]
    budget = minimum_nbytes(name) * percent // 100
    found = train(name, budget, "backward")
    for label, (predicted, measured) in found.moments.items():
        assert predicted == measured, label
    options: dict[str, Any] = {"memory_budget": budget, "whole_graph": "never", "hardware": "cpu", "codegen": "eager"}
    explanation = chunkc.explain(case.build(), **case.batch(0), **options, overlap="backward")
    assert dataclasses.asdict(explanation.traffic_nbytes) == found.traffic_nbytes
    assert any(moment.call.startswith("update.") and moment.phase == "backward" for moment in explanation.moments) == (
        bool(found.updated)
    )
    without = chunkc.explain(case.build(), **case.batch(0), **options)
    assert explanation.minimum_budget_nbytes == without.minimum_budget_nbytes
    if found.updated:
        assert explanation.traffic_nbytes.to_device < without.traffic_nbytes.to_device
        assert explanation.traffic_nbytes.to_home < without.traffic_nbytes.to_home
        assert any("the backward updates" in note for note in explanation.notes)
