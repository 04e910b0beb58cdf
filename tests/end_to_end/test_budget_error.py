"""A budget that is too small: the error names what would do, and the model is as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import TINY, array, compile_case, differences, minimum_nbytes, refuse, train, weights
from zoo import CASES

import chunkc

NAMES = ("byte_gpt", "convnet", "frozen_mlp", "big_embedding", "encoder")


@pytest.mark.second_tier
@pytest.mark.parametrize("name", NAMES)
def test_the_minimum_works_and_one_byte_less_does_not(name: str) -> None:
    minimum = minimum_nbytes(name)
    assert minimum > TINY
    result = train(CASES[name], memory_budget=minimum, whole_graph="never")
    assert result.measured_peak_nbytes <= result.predicted_peak_nbytes <= minimum
    assert refuse(CASES[name], memory_budget=minimum - 1).minimum_nbytes == minimum


@pytest.mark.second_tier
@pytest.mark.parametrize(
    ("name", "home"),
    [
        ("gpt2", "disk"),
        *(pytest.param(*other, marks=pytest.mark.slow) for other in (("gpt2", "cpu"), ("t5", "cpu"), ("t5", "disk"))),
    ],
)
def test_the_minimum_of_a_transformer_is_exact(name: str, home: str) -> None:
    minimum = minimum_nbytes(name, home)
    assert refuse(CASES[name], memory_budget=minimum - 1, home=home).minimum_nbytes == minimum


def test_the_error_says_where_and_what() -> None:
    error = refuse(CASES["byte_gpt"], memory_budget=TINY)
    assert error.budget_nbytes == TINY
    assert error.moment
    sizes = [nbytes for _, nbytes in error.contents]
    assert sizes == sorted(sizes, reverse=True)
    assert 0 < sum(sizes) <= error.minimum_nbytes
    assert all(label.strip() for label, _ in error.contents)
    for part in (error.moment, error.module, f"{error.minimum_nbytes:,}", f"{TINY:,}", error.contents[0][0]):
        assert part in str(error)


@pytest.mark.second_tier
@pytest.mark.parametrize(
    ("home", "place"),
    [
        pytest.param("cpu", False, id="cpu-not placed"),
        pytest.param("disk", True, id="disk-placed", marks=pytest.mark.slow),
        pytest.param("cpu", True, id="cpu-placed", marks=pytest.mark.slow),
        pytest.param("disk", False, id="disk-not placed", marks=pytest.mark.slow),
    ],
)
def test_the_model_is_untouched_and_trains_on_with_a_larger_budget(home: str, place: bool) -> None:
    case = CASES["short_gpt"]
    # Without place() chunks follow the order of use, so the minimum may be another one.
    minimum = refuse(case, memory_budget=TINY, home=home, place=place).minimum_nbytes
    segmented = {"whole_graph": "never", "home": home, "place": place}
    model, compiled = compile_case(case, memory_budget=minimum - 1, **segmented)
    before, addresses = weights(model), [p.data_ptr() for p in model.parameters()]
    for _ in range(2):  # a second call fails in the same way
        with pytest.raises(chunkc.BudgetError) as caught:
            compiled(**case.batch(0))
        assert caught.value.minimum_nbytes == minimum
    assert not differences(weights(model), before)
    assert [p.data_ptr() for p in model.parameters()] == addresses
    assert all(p.grad is None for p in model.parameters())

    torch._dynamo.reset()
    options = {"memory_budget": minimum, "home": home, "codegen": "eager", "whole_graph": "never"}
    larger = torch.compile(model, backend="chunkc", options=options)
    optimizer = chunkc.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    losses = []
    for step in range(2):
        loss = larger(**case.batch(step))
        loss.backward()
        losses.append(array(loss))
        optimizer.step()
        optimizer.zero_grad()
    reference = train(case, memory_budget=minimum, home=home, steps=2, place=place, whole_graph="never", limit=place)
    assert not differences(losses, list(reference.losses))
    assert not differences(weights(model), reference.weights)


def test_nothing_is_left_on_disk(tmp_path: Path) -> None:
    """Refused before anything is moved: not even the home's file exists."""
    case = CASES["byte_gpt"]
    _, compiled = compile_case(case, memory_budget=TINY, home=f"disk:{tmp_path}", place=False)
    with pytest.raises(chunkc.BudgetError):
        compiled(**case.batch(0))
    assert list(tmp_path.iterdir()) == []


def test_an_untrained_model_still_runs_eagerly_after_the_error() -> None:
    case = CASES["convnet"]
    model, compiled = compile_case(case, memory_budget=TINY)
    with pytest.raises(chunkc.BudgetError):
        compiled(**case.batch(0))
    loss = model(**case.batch(0))
    loss.backward()
    expected = case.build(0)(**case.batch(0))
    assert torch.equal(loss, expected)
    assert all(p.grad is not None for p in model.parameters())
