"""Losses, gradients and weights are the same bits under every budget and home, inside a hard limit."""

from __future__ import annotations

from itertools import product

import pytest
from harness import (
    HUGE,
    assert_same_training,
    budget_nbytes,
    differences,
    everything_fits,
    minimum_nbytes,
    train,
)
from zoo import CASES, PLAIN, TRANSFORMERS

BUDGETS = {"fits": HUGE, "60%": 60, "30%": 30, "minimum": 0}
SECOND_TIER = {
    *((name, "cpu", "eager", "minimum") for name in ("bert_dropout", "llama_tied", "mixtral")),
    ("gpt2", "cpu", "inductor", "30%"),
}


def _nbytes(budget: str, name: str, home: str, codegen: str) -> int:
    """The budget in bytes; "fits" is the very peak that was predicted where everything fits."""
    if budget == "fits":
        return everything_fits(name, codegen).predicted_peak_nbytes
    return budget_nbytes(name, BUDGETS[budget], home, codegen)


def _matrix() -> list:
    """Every transformers model, home, codegen and budget; all but a few are slow."""
    rows = product(TRANSFORMERS, ("cpu", "disk"), ("eager", "inductor"), BUDGETS)
    return [pytest.param(*row, marks=[pytest.mark.slow] * (row not in SECOND_TIER)) for row in rows]


@pytest.mark.second_tier
@pytest.mark.parametrize(("name", "home", "codegen", "budget"), _matrix())
def test_transformers_train_to_the_same_bits(name: str, home: str, codegen: str, budget: str) -> None:
    nbytes = _nbytes(budget, name, home, codegen)
    result = train(CASES[name], memory_budget=nbytes, home=home, codegen=codegen, whole_graph="never")
    assert_same_training(result, everything_fits(name, codegen))
    assert result.measured_peak_nbytes <= result.predicted_peak_nbytes
    assert result.predicted_peak_nbytes <= nbytes
    assert result.allocator_peak_nbytes <= nbytes


def _plain_matrix() -> list:
    """Graph breaks are slow here: `test_plain_losses` and `test_saved_values` train them in small budgets, too."""
    second_tier = {(name, "minimum") for name in PLAIN if name not in ("graph_breaks", "breaks_in_loop")}
    rows = product(PLAIN, ("30%", "minimum"))
    return [pytest.param(*row, marks=[pytest.mark.slow] * (row not in second_tier)) for row in rows]


@pytest.mark.second_tier
@pytest.mark.parametrize(("name", "budget"), _plain_matrix())
def test_plain_modules_train_to_the_same_bits(name: str, budget: str) -> None:
    nbytes = _nbytes(budget, name, "cpu", "eager")
    whole_step = CASES[name].num_graphs == 1  # several graphs are planned each on its own
    result = train(CASES[name], memory_budget=nbytes, limit=whole_step, whole_graph="never")
    assert_same_training(result, everything_fits(name))
    if whole_step:
        assert result.measured_peak_nbytes <= result.predicted_peak_nbytes
        assert result.predicted_peak_nbytes <= nbytes


@pytest.mark.parametrize("name", [pytest.param("gpt2", marks=pytest.mark.slow), "byte_gpt", "big_embedding"])
def test_small_budgets_are_small(name: str) -> None:
    """The other tests mean something: the minimum is well below what everything takes."""
    assert minimum_nbytes(name) < 0.7 * everything_fits(name).predicted_peak_nbytes


@pytest.mark.second_tier
@pytest.mark.parametrize("name", ["byte_gpt", pytest.param("bert_dropout", marks=pytest.mark.slow)])
def test_a_budget_is_repeatable(name: str) -> None:
    """The same budget twice gives the same bits and the same plan; another seed does not."""
    nbytes = minimum_nbytes(name)
    first, again = (train(CASES[name], memory_budget=nbytes, steps=2, whole_graph="never") for _ in range(2))
    assert_same_training(first, again)
    assert first.predicted_peak_nbytes == again.predicted_peak_nbytes
    other = train(CASES[name], memory_budget=nbytes, steps=2, seed=1, whole_graph="never")
    assert differences(first.losses, other.losses)


@pytest.mark.parametrize(
    "chunk_size", ["8KiB", *(pytest.param(size, marks=pytest.mark.second_tier) for size in ("64KiB", "1MiB"))]
)
def test_every_chunk_size_trains_to_the_same_bits(chunk_size: str) -> None:
    """With segments that run node by node, the chunk size does not matter to the arithmetic either."""
    case = CASES["byte_gpt"]
    budget = int(0.8 * everything_fits("byte_gpt").predicted_peak_nbytes)
    result = train(case, memory_budget=budget, chunk_size=chunk_size, whole_graph="never")
    assert_same_training(result, everything_fits("byte_gpt"))


def test_the_fast_path_trains_to_the_same_bits_without_code_generation() -> None:
    """Node by node, a graph run whole and the same graph in segments are the same operations."""
    result = train(CASES["byte_gpt"], memory_budget=HUGE, limit=False, whole_graph="auto")
    assert_same_training(result, everything_fits("byte_gpt"))
