"""Training and `explain` are one policy, driven twice: what was decided in a real run is what is decided on paper. And
what `overlap="backward"` takes is what was predicted, moment by moment.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from harness import adamw, compile_case, minimum_nbytes, session_of, take_step
from zoo import CASES, MORE_CASES

import chunkc
from chunkc.explaining import predicted_step as predicted_step
from chunkc.explaining.explain import explain_step, step_on
from chunkc.explaining.predicted_step import PredictedStep
from chunkc.machines.presets import load_hardware
from chunkc.optim.step import PreparedUpdate
from chunkc.options import parse_options
from chunkc.policy.state import StepRequest, UpdateRequest
from chunkc.runtime.device import cpu_allocator
from chunkc.session.compiled_step import CompiledGraph, PlannedStep
from chunkc.session.session import Session, sessions_of
from chunkc.tracing.steps import SizedStep

ALL = CASES | MORE_CASES
NUM_STEPS = 3
CPU = load_hardware("cpu")
Request = StepRequest | UpdateRequest


@contextmanager
def recorded() -> Iterator[list[Request]]:
    """Note by which requests' plans the backend runs, and `explain` shows, a step."""
    ran: list[Request] = []
    run, run_update = CompiledGraph._run, PreparedUpdate.run
    plan, update_plan = PredictedStep._plan, predicted_step.update_plan

    def running(self: CompiledGraph, phase: str, step: SizedStep, by: PlannedStep, *args: Any, **kwargs: Any) -> Any:
        ran.append(by.request)
        return run(self, phase, step, by, *args, **kwargs)

    def updating(self: PreparedUpdate, updates: Mapping[int, Any]) -> None:
        ran.append(self.planned.request)
        run_update(self, updates)

    def showing(self: PredictedStep, captured: Any, number: int, request: StepRequest, plans: Any) -> Any:
        if request.context.cold_backward:  # instead of the one before
            ran.pop()
        ran.append(request)
        return plan(self, captured, number, request, plans)

    def showing_update(request: UpdateRequest, *args: Any) -> Any:
        if request.groups:
            ran.append(request)
        return update_plan(request, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CompiledGraph, "_run", running)
        patch.setattr(PreparedUpdate, "run", updating)
        patch.setattr(PredictedStep, "_plan", showing)
        patch.setattr(predicted_step, "update_plan", showing_update)
        yield ran


def options_of(budget_nbytes: int, whole_graph: str) -> dict[str, Any]:
    return {"codegen": "eager", "memory_budget": budget_nbytes, "whole_graph": whole_graph, "activations": "keep"}


def trained(name: str, options: dict[str, Any]) -> tuple[list[Request], Session]:
    """By which plans the last step of a real run ran, and its session."""
    torch._dynamo.reset()
    gc.collect()
    case = ALL[name]
    model = case.build()
    optimizer = adamw(model.parameters())
    call = torch.compile(model, backend="chunkc", options=options)
    with recorded() as ran:
        for _ in range(NUM_STEPS):
            ran.clear()
            batch = case.batch(0)
            take_step(loss := case.loss(call(**batch)), optimizer)
            del batch, loss
    (session,) = sessions_of(model.parameters())
    return ran, session


def told(request: Request) -> tuple[Any, ...]:
    """What is compared of a request. Which gradients the caller keeps or has hooks for only a run knows."""
    now = request.planner_state
    rest = request.context.cold_backward if isinstance(request, StepRequest) else (request.groups, request.num_stages)
    return request.external_nbytes, rest, now.budget_nbytes, sorted(now.resident), now.num_graphs, now.layout


QUICK = ("graph_breaks",)
SECOND = ("called_twice", "sometimes_unused", "checkpointed_gpt")


def rungs() -> list[Any]:
    marks = dict.fromkeys(QUICK, ()) | dict.fromkeys(SECOND, pytest.mark.second_tier)
    return [pytest.param(name, marks=marks.get(name, pytest.mark.slow)) for name in ALL if ALL[name].num_graphs]


@pytest.mark.parametrize("name", rungs())
@pytest.mark.parametrize(
    ("whole_graph", "percent"),
    [("never", 115), *(pytest.param("auto", percent, marks=pytest.mark.slow) for percent in (100, 150, 250, 400))],
)
def test_training_does_what_the_policy_says_and_explain_says_so_too(name: str, whole_graph: str, percent: int) -> None:
    step = step_on(CPU, ALL[name].build(), (), ALL[name].batch(0), parse_options(options_of(1, whole_graph)))
    smallest = PredictedStep(step, parse_options(options_of(1, whole_graph)), CPU)
    options = options_of(smallest.fitting(1).budget_nbytes * percent // 100, whole_graph)
    ran, session = trained(name, options)
    with recorded() as shown:
        assert explain_step(PredictedStep(step, parse_options(options), CPU), name).fits
    assert [told(request) for request in ran] == [told(request) for request in shown]
    assert session.store.resident == ran[-1].planner_state.resident


# ---------------------------------------------------------------- updates in the backward, inside a hard limit

NAME = "byte_gpt"


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


@pytest.mark.second_tier
@pytest.mark.timeout(300)
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
