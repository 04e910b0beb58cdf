"""Batches whose shapes differ between ranks: see `shape_cases` for what they do."""

from __future__ import annotations

import re
from typing import Any

import pytest
from run_ranks import ranks

NUMBERS_NBYTES = 64  # as in `rank_cases`


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """All cases in one go: importing PyTorch takes longer than each of them."""
    cases = ("uneven", "sliced", "another_graph", "too_large_on_one")
    return ranks(tmp_path_factory.mktemp("shapes"), *cases, num_ranks=request.param, script="shape_cases.py")


def check_as_one_process(of_ranks: list[dict[str, Any]]) -> None:
    for rank in of_ranks:
        for run in rank["runs"]:
            assert run["losses"] == pytest.approx(rank["expected"], rel=1e-6)
            measured, predicted, budget = run["peaks"]
            assert measured <= predicted + NUMBERS_NBYTES, "predicted for the largest of any rank"
            assert predicted <= budget
        assert len({run["bits"] for run in rank["runs"]}) == 1, "a budget or a stage changed the result"


@pytest.mark.second_tier
def test_each_rank_has_shapes_of_its_own(found: dict[str, list[dict[str, Any]]]) -> None:
    """A smaller last batch on one rank alone, and then other lengths; evaluations between, of other sizes again."""
    check_as_one_process(found["uneven"])
    renewed = [[run["renewed"] for run in rank["runs"]] for rank in found["uneven"]]
    assert all(of_rank == renewed[0] for of_rank in renewed)


@pytest.mark.second_tier
def test_ranks_take_slices_of_a_batch_whose_size_changes(found: dict[str, list[dict[str, Any]]]) -> None:
    check_as_one_process(found["sliced"])


@pytest.mark.second_tier
def test_another_program_or_a_batch_that_does_not_fit_is_an_error_of_all_ranks(
    found: dict[str, list[dict[str, Any]]],
) -> None:
    num_ranks = len(found["another_graph"])
    for rank in found["another_graph"]:
        assert f"ranks differ in the program of the model: rank 1 of {num_ranks}" in rank["message"]
    for rank in found["too_large_on_one"]:
        assert re.match("BudgetError: |DistributedError: rank . of [24] cannot go on. BudgetError", rank["message"])
        assert rank["seconds"] < 60
