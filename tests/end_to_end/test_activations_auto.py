"""`activations="auto"`: where all fits, nothing is done for it; elsewhere, the same bits in less."""

from __future__ import annotations

from typing import Any

import pytest
from harness import HUGE, TINY, adamw, array, compile_case, counted, differences, refuse, session_of, weights
from zoo import LADDER

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


def test_it_needs_less_than_what_keeps_all_to_the_same_bits() -> None:
    case = LADDER["short_gpt"]
    least = {way: refuse(case, memory_budget=TINY, activations=way).minimum_nbytes for way in ("auto", "keep")}
    assert least["auto"] < least["keep"]
    kept, _ = trained("short_gpt", memory_budget=HUGE, whole_graph="never", activations="keep")
    results, model = trained("short_gpt", memory_budget=least["auto"], activations="auto")
    assert not differences(results, kept)
    assert session_of(model).minimum_nbytes <= least["auto"]
