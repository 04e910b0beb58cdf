"""`activations="auto"`: where all fits, nothing is done for it; elsewhere, the same bits in less."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from harness import HUGE, adamw, array, compile_case, counted, differences, gradients, session_of, weights
from saved_cases import compiled_gpt, least_nbytes, ways_taken
from torch import Tensor, nn
from zoo import LADDER, Case, floats

import chunkc
from chunkc.policy import activation_search, captured_step, decide

SECOND = pytest.mark.second_tier

SEARCHES = (
    (activation_search, "leanest"),
    (activation_search, "leanest_activation_plan"),
    (activation_search, "quickest"),
    (decide, "first_or_quickest"),
    (decide, "SearchSpace"),
)


def trained(name: str, **options: Any) -> tuple[list[Any], Any]:
    """The results of two steps, and the model."""
    case = LADDER[name]
    model, compiled = compile_case(case, **options)
    optimizer = adamw(model.parameters())
    losses = []
    for step in range(2):
        loss = case.loss(compiled(**case.batch(step)))
        loss.backward()
        losses.append(array(loss))
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, weights(model)], model


@pytest.mark.parametrize(
    ("name", "whole_graph"),
    [
        ("byte_gpt", "never"),
        ("byte_gpt", "auto"),
        pytest.param("convnet", "auto", marks=SECOND),
        pytest.param("graph_breaks", "auto", marks=SECOND),
    ],
)
def test_where_all_fits_it_is_what_keep_is_and_nothing_is_searched_for(
    name: str, whole_graph: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches = [counted(monkeypatch, module, function) for module, function in SEARCHES]
    profiles = counted(monkeypatch, captured_step, "_profile")
    found = {}
    for activations in ("keep", "auto"):
        for count in (*searches, profiles):
            count.calls = 0
        results, model = trained(name, memory_budget=HUGE, whole_graph=whole_graph, activations=activations)
        assert activations == "keep" or [count.calls for count in searches] == [0] * len(searches)
        found[activations] = results, profiles.calls, chunkc.report(model).plan_text
    (kept, kept_profiles, kept_plan), (results, num_profiles, plan) = found["keep"], found["auto"]
    assert plan == kept_plan
    assert not differences(results, kept)
    assert num_profiles <= kept_profiles


# --- several graphs ---


class FewParametersFirst(nn.Module):
    """Its first graph has few of the parameters, and most of the saved values."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.lift = nn.Linear(32, 256)
        self.back = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.front:
            x = torch.tanh(layer(x))
        torch._dynamo.graph_break()
        x = self.lift(x.mean(1))
        for layer in self.back:
            x = torch.tanh(layer(x))
        return x.square().mean()


FEW_FIRST = Case("few_first", FewParametersFirst, lambda seed: {"x": floats(seed, (16, 256, 32))}, num_graphs=2)


def plans_of_steps(budget_nbytes: int, whole_graph: str, activations: str) -> tuple[list[str], list[Any], Any]:
    """The plans of three steps, the parameters after them, and the model."""
    options = {"memory_budget": budget_nbytes, "whole_graph": whole_graph, "activations": activations}
    model, compiled = compile_case(FEW_FIRST, place=False, **options)
    optimizer, plans = adamw(model.parameters()), []
    for step in range(3):
        compiled(**FEW_FIRST.batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        plans.append(chunkc.report(model).plan_text)
    return plans, weights(model), model


@pytest.mark.parametrize("whole_graph", ["never", "auto"])
def test_of_several_graphs_each_keeps_its_values_once_the_step_is_known_to_fit(whole_graph: str) -> None:
    """While the first step runs it is not known that the second graph, with all the parameters, saves little."""
    _, _, model = plans_of_steps(HUGE, "never", "keep")
    budget_nbytes = 2 * chunkc.report(model).predicted_peak_nbytes
    kept, kept_weights, _ = plans_of_steps(budget_nbytes, whole_graph, "keep")
    plans, found, model = plans_of_steps(budget_nbytes, whole_graph, "auto")
    assert plans[0] != kept[0]
    assert plans[1] == plans[2]
    assert not any(word in plans[2] for word in ("prefetch", "evict", "offload", "reload", "recomputed"))
    if whole_graph == "never":
        assert plans[1:] == kept[1:]
    assert not differences(found, kept_weights)
    assert session_of(model).store.resident == frozenset(range(len(session_of(model).store.layout.groups)))


def test_of_several_graphs_nothing_is_away_from_the_first_step_on_where_there_is_room_for_as_much_of_each() -> None:
    kept, *_ = plans_of_steps(HUGE, "auto", "keep")
    assert plans_of_steps(HUGE, "auto", "auto")[0] == kept


@pytest.mark.parametrize("part", [1.0, 0.9])
def test_explain_says_of_several_graphs_what_training_comes_to(part: float) -> None:
    _, _, model = plans_of_steps(HUGE, "never", "keep")
    budget_nbytes = int(part * chunkc.report(model).predicted_peak_nbytes)
    _, _, model = plans_of_steps(budget_nbytes, "never", "auto")
    options = {"memory_budget": budget_nbytes, "whole_graph": "never", "codegen": "eager"}
    explained = chunkc.explain(FEW_FIRST.build(), **FEW_FIRST.batch(0), **options)
    assert explained.predicted_peak_nbytes == chunkc.report(model).predicted_peak_nbytes


# --- hooks on saved tensors ---


def copying() -> AbstractContextManager[None]:
    return torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved)


def test_hooks_that_copy_get_the_values_where_all_can_be_kept() -> None:
    """Without hooks, the first graph's values are away in this budget."""
    _, _, model = plans_of_steps(HUGE, "never", "keep")
    budget_nbytes = 2 * chunkc.report(model).predicted_peak_nbytes

    def step(activations: str, hooks: AbstractContextManager[Any]) -> tuple[list[Any], set[str]]:
        options = {"memory_budget": budget_nbytes, "whole_graph": "never", "activations": activations}
        model, compiled = compile_case(FEW_FIRST, place=False, **options)
        with hooks:
            loss = compiled(**FEW_FIRST.batch(0))
        loss.backward()
        return gradients(model), ways_taken(model)

    kept, _ = step("keep", copying())
    for hooks, away in ((nullcontext(), True), (copying(), False), (torch.autograd.graph.save_on_cpu(), False)):
        found, ways = step("auto", hooks)
        assert bool(ways) == away
        assert not differences(found, kept)


def test_hooks_that_copy_are_refused_where_values_have_to_leave() -> None:
    nbytes = least_nbytes("short_gpt", "auto")
    assert nbytes < least_nbytes("short_gpt", "keep")
    _, compiled = compiled_gpt("auto", nbytes)
    with copying():
        loss = compiled(**LADDER["short_gpt"].batch(0))
    with pytest.raises(chunkc.UnsupportedError, match=r'activations="keep", or under "auto" a larger memory_budget'):
        loss.backward()
