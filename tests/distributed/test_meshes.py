"""Meshes of two dimensions, scalars, models from the meta device: see `mesh_cases` for what they do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from run_ranks import ranks


def check_copies(found: list[dict[str, Any]], num_ranks: int) -> None:
    for rank in found:
        for run in rank["runs"]:
            assert run["losses"] == pytest.approx(rank["expected"], rel=1e-6)
            assert run["difference"] < 2e-6
        first, second, flat = rank["runs"]
        assert first["bits"] == second["bits"], "a budget or a stage changed the result"
        assert first["parts"] >= 1.5 * flat["parts"], "a part of a copy, instead of one of all"
        assert (first["sent"] == 0) == (num_ranks == 2), "one rank in a row has everything"
        assert rank["saved 3"] == rank["saved 1"] == rank["loaded"]
        assert rank["step"] == 1
        assert rank["from meta"] == first["parts"]
        assert rank["weights"] == first["bits"]
        assert rank["evaluated"][0] == pytest.approx(rank["evaluated"][1], rel=1e-6)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """All cases in one go: importing PyTorch takes longer than each of them."""
    cases = ("copies", "drops", "overflow_behind_a_scalar")
    return ranks(tmp_path_factory.mktemp("meshes"), *cases, script="mesh_cases.py")


@pytest.mark.second_tier
def test_ranks_with_copies_train_as_one_process_does(found: dict[str, list[dict[str, Any]]]) -> None:
    """With LAMB and a scalar, saved on this mesh and loaded on a flat one, and from the meta device."""
    check_copies(found["copies"], 2)


@pytest.mark.slow
def test_two_rows_of_two_ranks_train_as_one_process_does(tmp_path: Path) -> None:
    check_copies(ranks(tmp_path, "copies", num_ranks=4, script="mesh_cases.py")["copies"], 4)


@pytest.mark.second_tier
def test_ranks_draw_their_own_random_numbers_the_same_in_every_stage(found: dict[str, list[dict[str, Any]]]) -> None:
    first, second = found["drops"]
    for rank in (first, second):
        for runs in (rank["runs"][:2], rank["runs"][2:]):
            assert len({(run["bits"], *run["losses"]) for run in runs}) == 1
    assert first["runs"][0]["losses"] != second["runs"][0]["losses"]
    assert first["runs"][2]["losses"] != second["runs"][2]["losses"]
    assert first["runs"][0]["bits"] == second["runs"][0]["bits"], "copies stay copies"


@pytest.mark.second_tier
def test_an_overflow_that_only_one_rank_knows_of_is_an_error(found: dict[str, list[dict[str, Any]]]) -> None:
    for rank in found["overflow_behind_a_scalar"]:
        assert "ranks differ in whether a gradient overflowed" in rank["message"]
        assert rank["kept"]
