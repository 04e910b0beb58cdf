"""What stays, and what is whole, under every budget from the smallest on: in `explain` as in training."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
from harness import adamw
from torch import Tensor, nn
from zoo import CASES

import chunkc
from chunkc.explaining.dry_run import run_dry
from chunkc.explaining.explain import explain_step, step_on
from chunkc.explaining.offline import OfflineStep
from chunkc.explaining.predicted_step import PredictedStep
from chunkc.ir.errors import BudgetError
from chunkc.machines.presets import load_hardware
from chunkc.options import parse_options

CPU = load_hardware("cpu")


class Shrinking(nn.Module):
    """Its first graph has most of the parameters, its second most of the activations."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)))
        self.wide = nn.Linear(64, 2048)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.narrow(x[:1]).expand(len(x), -1)
        torch._dynamo.graph_break()
        return self.wide(hidden).tanh().exp().square().mean()


class ExternalBytes(nn.Module):
    """Its second graph fits whole by itself, and not beside all that the first has saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.blocks = nn.Sequential(*(nn.Linear(64, 64) for _ in range(24)))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        for _ in range(12):
            hidden = hidden.exp().tanh()
        rows = hidden[:4] * 2
        torch._dynamo.graph_break()
        return self.blocks(rows).square().mean()


MODELS = {
    "graph_breaks": lambda: (CASES["graph_breaks"].build(), CASES["graph_breaks"].batch(0)),
    "breaks_in_loop": lambda: (CASES["breaks_in_loop"].build(), CASES["breaks_in_loop"].batch(0)),
    "shrinking": lambda: (Shrinking(), {"x": torch.ones(256, 64)}),
    "held": lambda: (ExternalBytes(), {"x": torch.ones(192, 64)}),
}


@cache
def captured(name: str, whole_graph: str) -> tuple[OfflineStep, PredictedStep]:
    options = parse_options({"codegen": "eager", "whole_graph": whole_graph, "activations": "keep"})
    model, inputs = MODELS[name]()
    step = step_on(CPU, model, (), inputs, options)
    return step, PredictedStep(step, options, CPU)


def fits(name: str, whole_graph: str, budget_nbytes: int) -> bool:
    try:
        run_dry(captured(name, whole_graph)[1].training, budget_nbytes)
    except BudgetError:
        return False
    return True


QUICK = (("graph_breaks", "never"), ("held", "auto"))


@pytest.mark.second_tier
@pytest.mark.parametrize(
    ("name", "whole_graph"),
    [
        pytest.param(name, whole, marks=() if (name, whole) in QUICK else pytest.mark.slow)
        for name in MODELS
        for whole in ("never", "auto")
    ],
)
def test_what_fits_fits_in_every_larger_budget(name: str, whole_graph: str) -> None:
    minimum = captured(name, whole_graph)[1].fitting(1).budget_nbytes
    step = max(1, minimum // 120)
    refused = [budget for budget in range(minimum, 3 * minimum, step) if not fits(name, whole_graph, budget)]
    assert not refused, [round(budget / minimum, 3) for budget in refused]
    for less in (1, step, 5 * step):
        assert not fits(name, whole_graph, minimum - less)


def test_it_comes_to_something_else_only_where_residents_have_to_leave() -> None:
    """That the tests above are about something: some budgets are too small for all that each graph would keep."""
    predicted = captured("shrinking", "never")[1]
    first = run_dry(predicted.training, 3 * predicted.fitting(1).budget_nbytes)
    assert first.planner_state.resident
    second = predicted.fitting(1)
    assert not second.planner_state.resident


def test_a_graph_that_was_whole_is_cut_where_it_does_not_fit_beside_what_is_held() -> None:
    predicted = captured("held", "auto")[1]
    budget = predicted.fitting(1).budget_nbytes * 165 // 100
    assert predicted.graphs[1].captured(budget, can_skip_segmentation=True).whole
    assert not run_dry(predicted.training, budget).captured[1].whole


@pytest.mark.second_tier
@pytest.mark.parametrize(
    ("name", "whole_graph", "percent"),
    [
        ("shrinking", "never", 100),
        ("shrinking", "never", 130),
        ("held", "auto", 165),
        *(pytest.param("shrinking", "auto", percent, marks=pytest.mark.slow) for percent in (100, 115, 150, 190, 240)),
        *(pytest.param("held", "auto", percent, marks=pytest.mark.slow) for percent in (100, 130, 180, 200)),
    ],
)
def test_training_comes_to_the_same(name: str, whole_graph: str, percent: int) -> None:
    """Also where residents leave, or a whole graph is cut, between the first graph's run and the last's."""
    step, predicted = captured(name, whole_graph)
    minimum = predicted.fitting(1).budget_nbytes
    budget = minimum * percent // 100
    options = parse_options({"codegen": "eager", "memory_budget": budget, "whole_graph": whole_graph})
    explained = explain_step(PredictedStep(step, options, CPU), name)
    assert explained.fits
    assert explained.minimum_budget_nbytes == minimum
    report = trained(name, budget, whole_graph)
    assert explained.chunks.resident == report.num_resident_chunks
    assert explained.predicted_peak_nbytes == report.predicted_peak_nbytes <= budget


def test_training_refuses_one_byte_less() -> None:
    minimum = captured("shrinking", "never")[1].fitting(1).budget_nbytes
    with pytest.raises(BudgetError) as error:
        trained("shrinking", minimum - 1, "never")
    assert error.value.minimum_nbytes == minimum


def trained(name: str, budget_nbytes: int, whole_graph: str) -> chunkc.Report:
    """Three steps, of the same bits as plain PyTorch's."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    plain = deepcopy(model)
    options: dict[str, Any] = {"codegen": "eager", "memory_budget": budget_nbytes, "whole_graph": whole_graph}
    compiled = torch.compile(model, backend="chunkc", options=options)
    optimizer = adamw(model.parameters())
    for _ in range(3):
        batch = {key: value.clone() for key, value in inputs.items()}
        with torch.no_grad():
            for mine, its in zip(plain.parameters(), model.parameters(), strict=True):
                mine.copy_(its)
        loss = compiled(**batch)
        loss.backward()
        plain.zero_grad()
        expected = plain(**batch)
        expected.backward()
        assert torch.equal(loss, expected)
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
        del expected
        optimizer.step()
        optimizer.zero_grad()
        del loss, batch
    return chunkc.report(model)
