"""Training and `explain` are one policy, driven twice: what was decided in a real run is what is decided on paper."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from harness import adamw
from zoo import CASES, MORE_CASES

from chunkc import compile as compilation
from chunkc.explaining import dry_run as dry_run_state
from chunkc.explaining import predicted_step as predicted_step
from chunkc.explaining.explain import explain_step, step_on
from chunkc.explaining.offline import OfflineStep
from chunkc.explaining.predicted_step import PredictedStep
from chunkc.machines.presets import load_hardware
from chunkc.optim import step as optimizer_step
from chunkc.optim.step import PreparedUpdate
from chunkc.options import Options, parse_options
from chunkc.policy import decide as policy
from chunkc.policy.state import (
    Event,
    PhaseCalled,
    PlannerState,
    StepDecision,
    StepRequest,
    UpdateDecision,
    UpdateRequest,
)
from chunkc.session import compiled_step as graph
from chunkc.session.compiled_step import CompiledGraph, PlannedStep
from chunkc.session.session import Session, sessions_of
from chunkc.tracing.steps import SizedStep

ALL = CASES | MORE_CASES
NUM_STEPS = 3
CPU = load_hardware("cpu")
Request = StepRequest | UpdateRequest


@dataclass
class Recording:
    """What was asked of the policy, and the requests by whose plans phases ran."""

    asked: list[tuple[PlannerState, Event, StepDecision | UpdateDecision]] = field(default_factory=list)
    ran: list[Request] = field(default_factory=list)


@contextmanager
def recorded(*modules: Any) -> Iterator[Recording]:
    """Note what these modules ask, and by which plans the backend runs and `explain` shows a step."""
    found = Recording()
    run, run_update = CompiledGraph._run, PreparedUpdate.run
    plan, update_plan = PredictedStep._plan, predicted_step.update_plan

    def deciding(planner_state: PlannerState, event: Any) -> Any:
        decision = policy.decide(planner_state, event)
        found.asked.append((planner_state, event, decision))
        return decision

    def running(self: CompiledGraph, phase: str, step: SizedStep, by: PlannedStep, *args: Any, **kwargs: Any) -> Any:
        found.ran.append(by.request)
        return run(self, phase, step, by, *args, **kwargs)

    def updating(self: PreparedUpdate, updates: Mapping[int, Any]) -> None:
        found.ran.append(self.planned.request)
        run_update(self, updates)

    def showing(self: PredictedStep, captured: Any, number: int, request: StepRequest, plans: Any) -> Any:
        if request.context.cold_backward:  # instead of the one before
            found.ran.pop()
        found.ran.append(request)
        return plan(self, captured, number, request, plans)

    def showing_update(request: UpdateRequest, *args: Any) -> Any:
        if request.groups:
            found.ran.append(request)
        return update_plan(request, *args)

    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            patch.setattr(module, "decide", deciding)
        patch.setattr(CompiledGraph, "_run", running)
        patch.setattr(PreparedUpdate, "run", updating)
        patch.setattr(PredictedStep, "_plan", showing)
        patch.setattr(predicted_step, "update_plan", showing_update)
        yield found


def options_of(budget_nbytes: int, whole_graph: str) -> dict[str, Any]:
    return {"codegen": "eager", "memory_budget": budget_nbytes, "whole_graph": whole_graph, "activations": "keep"}


def trained(name: str, options: dict[str, Any]) -> tuple[Recording, list[Request], Session]:
    """A real run, by which plans its last step ran, and its session."""
    torch._dynamo.reset()
    gc.collect()
    case = ALL[name]
    model = case.build()
    optimizer = adamw(model.parameters())
    call = torch.compile(model, backend="chunkc", options=options)
    begin = 0
    with recorded(compilation, graph, optimizer_step) as found:
        for _ in range(NUM_STEPS):
            begin = len(found.ran)
            batch = case.batch(0)
            loss = case.loss(call(**batch))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del batch, loss
    (session,) = sessions_of(model.parameters())
    return found, found.ran[begin:], session


def captured(name: str, options: Options) -> OfflineStep:
    return step_on(CPU, ALL[name].build(), (), ALL[name].batch(0), options)


def explained(step: OfflineStep, options: Options, name: str) -> Recording:
    """The same on paper."""
    with recorded(dry_run_state, predicted_step) as found:
        assert explain_step(PredictedStep(step, options, CPU), name).fits
    return found


def followed(asked: list[tuple[PlannerState, Event, StepDecision | UpdateDecision]]) -> PlannerState:
    """Drive recorded events through the machine: what comes out is what was recorded, and what was asked next with.

    Where somebody would have to leave, training first collects garbage, and asks again: only that answer counts.
    """
    now = PlannerState(asked[0][0].budget_nbytes, asked[0][0].layout)
    for (planner_state, event, decision), following in zip(asked, [*asked[1:], None], strict=True):
        assert planner_state == now
        again = policy.decide(now, event)
        assert again == decision
        if again.planner_state == now or following is None or not _asks_again(event, following[1]):
            now = again.planner_state
    return now


def _asks_again(event: Event, following: Event) -> bool:
    """Whether an event is the one before it, beside no more of others' values."""
    if not isinstance(event, PhaseCalled) or not isinstance(following, PhaseCalled):
        return False
    same = event.forms.captured is following.forms.captured and event.context == following.context
    return same and following.external_nbytes <= event.external_nbytes


def told(request: Request) -> tuple[Any, ...]:
    """What is compared of a request. Which gradients the caller keeps or has hooks for only a run knows."""
    now = request.planner_state
    rest = request.context.cold_backward if isinstance(request, StepRequest) else (request.groups, request.num_stages)
    return request.external_nbytes, rest, now.budget_nbytes, sorted(now.resident), now.num_graphs, now.layout


QUICK = ("graph_breaks",)
SECOND = ("frozen_mlp", "called_twice", "sometimes_unused", "checkpointed_gpt", "big_embedding")


def rungs() -> list[Any]:
    marks = dict.fromkeys(QUICK, ()) | dict.fromkeys(SECOND, pytest.mark.second_tier)
    return [pytest.param(name, marks=marks.get(name, pytest.mark.slow)) for name in ALL if ALL[name].num_graphs]


@pytest.mark.parametrize("name", rungs())
@pytest.mark.parametrize(
    ("whole_graph", "percent"),
    [("never", 115), *(pytest.param("auto", percent, marks=pytest.mark.slow) for percent in (100, 150, 250, 400))],
)
def test_training_does_what_the_policy_says_and_explain_says_so_too(name: str, whole_graph: str, percent: int) -> None:
    step = captured(name, parse_options(options_of(1, whole_graph)))
    smallest = PredictedStep(step, parse_options(options_of(1, whole_graph)), CPU)
    budget = smallest.fitting(1).budget_nbytes * percent // 100
    options = options_of(budget, whole_graph)

    real, ran, session = trained(name, options)
    now = followed(real.asked)
    assert (now.resident, now.layout) == (session.store.resident, session.store.layout)
    assert (now.num_graphs, now.trained) == (session.num_graphs, session.trained)

    paper = explained(step, parse_options(options), name)
    assert [told(request) for request in ran] == [told(request) for request in paper.ran]
