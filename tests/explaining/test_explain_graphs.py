"""Models of several graphs: what is explained is what training does, and, but for the batch, what the meter reads."""

from __future__ import annotations

import dataclasses
import gc
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from harness import HUGE, adamw, compile_case
from torch import Tensor, nn
from zoo import CASES

import chunkc
from chunkc.explaining import whole_step
from chunkc.explaining.explain import explain_step, step_on
from chunkc.explaining.formats import json_, render_graph, render_html, render_json, render_text, render_trace
from chunkc.explaining.offline import OfflineStep
from chunkc.explaining.predicted_step import PredictedStep
from chunkc.ir.errors import BudgetError, UnsupportedError
from chunkc.ir.explanation import Explanation
from chunkc.machines.presets import load_hardware
from chunkc.options import parse_options
from chunkc.runtime.device import cpu_allocator
from chunkc.session.compiled_step import CompiledGraph
from chunkc.session.session import owner
from chunkc.tracing.caller import CalledModule

SEVERAL = ("graph_breaks", pytest.param("breaks_in_loop", marks=pytest.mark.slow))
NAMES = (*SEVERAL, "sometimes_unused")

BATCH_NBYTES = 2 * 2 * 32 * 8
"""Of the zoo's tokens and labels: what no graph has taken yet is not counted."""


@cache
def captured(name: str) -> OfflineStep:
    case = CASES[name]
    options = parse_options({"codegen": "eager"})
    return step_on(load_hardware("cpu"), case.build(), (), case.batch(0), options)


def explained(name: str, budget_nbytes: int, **options: Any) -> Explanation:
    settings = parse_options({"codegen": "eager", "whole_graph": "never", "memory_budget": budget_nbytes, **options})
    step = captured(name)
    return explain_step(PredictedStep(step, settings, load_hardware("cpu")), name)


Moments = dict[str, tuple[int, int]]
"""Call, named as in an explanation -> predicted and measured bytes."""


@contextmanager
def _noting_moments(foreign_nbytes: int, several: bool) -> Iterator[Moments]:
    found: Moments = {}
    pending: list[int] = []
    numbers = iter(range(10**6))

    def noting(phase: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(graph: CompiledGraph, arguments: list[Any]) -> Any:
            if phase == "forward":
                pending.append(next(numbers))
                number = pending[-1]
            else:
                number = pending.pop()
            outputs = method(graph, arguments)
            record = graph.session.records.latest[phase]
            predicted = {moment.name: moment.nbytes for moment in record.plan.moments if moment.phase == phase}
            for label, measured in record.measurement.peaks:
                name = label.replace(phase, f"{phase}.{number}", 1) if several else label
                found[name] = predicted[label], measured - foreign_nbytes
            return outputs

        return run

    with (
        mock.patch.object(CompiledGraph, "forward", noting("forward", CompiledGraph.forward)),
        mock.patch.object(CompiledGraph, "backward", noting("backward", CompiledGraph.backward)),
    ):
        yield found


@dataclasses.dataclass(frozen=True)
class Trained:
    moments: Moments
    report: chunkc.Report
    traffic_nbytes: dict[str, int]
    peak_nbytes: int


def trained(name: str, budget_nbytes: int, activations: str = "auto") -> Trained:
    """Three steps; moments and traffic of the last. `activations` is said, as the harness has a default of its own."""
    cpu_allocator.install()
    torch._dynamo.reset()
    gc.collect()
    foreign_nbytes = cpu_allocator.current_nbytes()
    case = CASES[name]
    options = {"whole_graph": "never", "activations": activations}
    model, compiled = compile_case(case, memory_budget=budget_nbytes, place=False, **options)
    optimizer = adamw(model.parameters())
    traffic = []
    for step in range(3):
        if step == 2:  # in the first, parameters of graphs to come are still where the model was made
            for parameter in model.parameters():
                if (found := owner(parameter)) is not None:
                    found[0].records.peak_nbytes = None
        batch = case.batch(0)
        with _noting_moments(foreign_nbytes, several=len(captured(name).calls) > 1) as moments:
            loss = case.loss(compiled(**batch))
            loss.backward()
        optimizer.step()  # beside both, as it is planned
        optimizer.zero_grad()
        del batch, loss
        gc.collect()
        traffic.append(dict(chunkc.report(model).traffic_nbytes))
    report = chunkc.report(model)
    moved = {way: traffic[2][way] - traffic[1][way] for way in traffic[2]}
    foreign_nbytes += sum(p.nbytes for p in model.parameters() if owner(p) is None)  # of which no graph knows
    return Trained(moments, report, moved, report.measured_peak_nbytes - foreign_nbytes)


def by_call(explanation: Explanation) -> dict[str, int]:
    found: dict[str, int] = {}
    for moment in explanation.moments:
        found[moment.call] = max(found.get(moment.call, 0), moment.nbytes)
    return found


@pytest.mark.second_tier
@pytest.mark.parametrize(
    ("fits_whole", "activations"), [(True, "auto"), (True, "offload"), (False, "auto"), (False, "keep")]
)
@pytest.mark.parametrize("name", NAMES)
def test_as_trained_and_as_measured(name: str, fits_whole: bool, activations: str) -> None:
    budget = HUGE if fits_whole else explained(name, 1, activations=activations).minimum_budget_nbytes
    explanation, real = explained(name, budget, activations=activations), trained(name, budget, activations)
    assert explanation.fits
    assert sum(explanation.peak.contents.values()) == explanation.predicted_peak_nbytes
    assert all(nbytes >= 0 for moment in explanation.moments for nbytes in moment.contents.values())
    calls = by_call(explanation)
    assert {call: calls[call] for call in real.moments} == {call: n for call, (n, _) in real.moments.items()}
    assert explanation.predicted_peak_nbytes == real.report.predicted_peak_nbytes == real.peak_nbytes
    chunks, report = explanation.chunks, real.report
    assert (chunks.size_nbytes, chunks.count, chunks.resident) == (
        *(report.chunk_size_nbytes, report.num_chunks, report.num_resident_chunks),
    )
    assert explanation.home_nbytes == report.home_nbytes
    assert dataclasses.asdict(explanation.traffic_nbytes) == real.traffic_nbytes


@pytest.mark.second_tier
@pytest.mark.parametrize("name", SEVERAL)
def test_the_curve_is_the_meter_s(name: str) -> None:
    """Backwards to the byte; a forward is predicted with the call's outputs of the step before, and without that part
    of the batch which no graph has taken yet."""
    for call, (predicted, measured) in trained(name, HUGE).moments.items():
        if call.startswith("backward"):
            assert predicted == measured, call
        else:
            assert predicted >= measured - BATCH_NBYTES, call


# --- what one explanation says ---


def test_the_order_is_that_of_the_step() -> None:
    found = explained("graph_breaks", HUGE)
    runs = list(dict.fromkeys(moment.call.rpartition(".")[0] for moment in found.moments))
    assert runs == [*(f"forward.{i}" for i in range(3)), *(f"backward.{i}" for i in (2, 1, 0))]
    assert list(found.graphs) == runs
    starts = [moment.start_s for moment in found.moments]
    assert starts == sorted(starts)
    assert any("3 graphs run one after the other" in note for note in found.notes)


def test_on_a_gpu_saved_values_wait_for_their_backward() -> None:
    """Its operators save other values than the CPU's, on which the step ran on paper."""
    case, hardware = CASES["graph_breaks"], load_hardware("rtx3090")
    options = parse_options({"codegen": "eager", "whole_graph": "never", "memory_budget": 64 << 20})
    step = step_on(hardware, case.build(), (), case.batch(0), options)
    held: dict[str, int] = {}
    for moment in explain_step(PredictedStep(step, options, hardware), "on a GPU").moments:
        held.setdefault(moment.call.rpartition(".")[0], moment.contents["others"])
    assert 0 < held["forward.1"] < held["forward.2"]
    assert held["backward.2"] > held["backward.1"] > held["backward.0"]


def test_formats() -> None:
    found = explained("graph_breaks", 5_500_000)
    assert json_.parse_json(render_json(found)) == found
    assert "the peak: " in render_text(found)
    assert "backward.2.0" in render_html(found)
    slices = [e["name"] for e in json.loads(render_trace(found))["traceEvents"] if e["ph"] == "X"]
    assert next(n for n in slices if n.startswith("backward")) == "backward.2.0"
    code = render_graph(found)
    for run in found.graphs:
        assert f"# {run}\n# calls: " in code
    assert found.plan_text.count("plan: budget") == len(found.graphs) + 1


# --- what a model may do ---


class Between(nn.Module):
    """Code between two graphs."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.first, self.second = how, nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        torch._dynamo.graph_break()
        if self.how == "value":
            hidden = hidden * hidden.sum().item()
        return self.second(hidden).sum()


def test_code_between_graphs_that_needs_values() -> None:
    with pytest.raises(UnsupportedError, match="needs the values of tensors"):
        chunkc.explain(Between("value"), torch.ones(4, 8), memory_budget=HUGE)


@pytest.mark.parametrize("codegen", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_what_comes_before_values_are_needed_is_named(codegen: str) -> None:
    """And training refuses one byte less than they need."""
    with pytest.raises(UnsupportedError) as told:
        chunkc.explain(Between("value"), torch.ones(4, 8), memory_budget=HUGE, codegen=codegen)
    assert "The 2 before that, from first.weight to first.bias, need a budget of" in str(told.value)
    assert "what comes after depends on the values" in str(told.value)
    needed = int(re.findall(r"([0-9,]+) bytes", str(told.value))[-1].replace(",", ""))
    torch._dynamo.reset()
    options = {"memory_budget": needed - 1, "codegen": codegen}
    with pytest.raises(BudgetError) as refused:
        torch.compile(Between("value"), backend="chunkc", options=options)(torch.ones(4, 8))
    assert refused.value.minimum_nbytes == needed


def test_where_values_are_needed_at_once_there_is_nothing_to_name() -> None:
    class Routed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return x * int(x)

    with pytest.raises(UnsupportedError) as told:
        chunkc.explain(Routed(), torch.ones(()), memory_budget=HUGE)
    assert str(told.value).endswith("only what torch.compile captures can be explained")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(512, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sum()


class Sliced(nn.Module):
    """Its second graph is called with a tensor of its own, and with a view of a larger one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(8, 512), Block()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        total = torch.zeros(())
        for rows in (hidden[:1].clone(), hidden[:1]):
            torch._dynamo.graph_break()
            total = total + self.block(rows)
        return total


def test_a_view_that_is_handed_on_holds_all_of_its_storage() -> None:
    found = by_call(chunkc.explain(Sliced(), torch.ones(64, 8), memory_budget=HUGE, whole_graph="never"))
    cpu_allocator.install()
    torch._dynamo.reset()
    options = {"memory_budget": HUGE, "whole_graph": "never", "codegen": "eager"}
    model = Sliced()
    compiled = torch.compile(model, backend="chunkc", options=options)
    optimizer = adamw(model.parameters())
    for _ in range(3):
        with _noting_moments(0, several=True) as moments:
            compiled(torch.ones(64, 8)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert found == {call: predicted for call, (predicted, _) in moments.items()}


def test_dimensions_in_symbols_are_refused() -> None:
    x = torch.ones(4, 8)
    torch._dynamo.mark_dynamic(x, 0)
    with pytest.raises(UnsupportedError, match="2 graphs; dimensions marked as dynamic are for models in one graph"):
        chunkc.explain(Between(""), x, memory_budget=HUGE)


def test_without_gradients() -> None:
    with torch.no_grad():
        found = chunkc.explain(Between(""), torch.ones(4, 8), memory_budget=HUGE)
    assert {moment.phase for moment in found.moments} == {"forward"}
    assert len(found.graphs) == 2


# ---------------------------------------------------------------- what completes a BudgetError hides none


def test_a_model_on_several_devices_gets_the_error_that_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Like a model with embeddings on the CPU: its step cannot be traced, and the budget is what is wrong."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    error = BudgetError(minimum_nbytes=2, budget_nbytes=1, moment="", module="", contents=(), covers="the first graph")
    monkeypatch.setattr(whole_step, "compiled_call", lambda: CalledModule(model, (), {}))
    assert whole_step.completed(error, parse_options({})) is error
