"""Checkpoints and weights of models with tensor parallelism; see `tensor_file_cases` for what ranks do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from run_ranks import ranks
from safetensors.torch import load_file


def found_by(folder: Path, *cases: str, num_ranks: int) -> dict[str, list[dict[str, Any]]]:
    return ranks(folder, *cases, num_ranks=num_ranks, script="tensor_file_cases.py")


@pytest.mark.second_tier
def test_ranks_of_layers_resume_and_any_others_load_what_they_have_saved(tmp_path: Path) -> None:
    """From 2 x 2 ranks onto the same, onto 1 x 2, onto ranks without tensor parallelism and back, onto one process."""
    saved = found_by(tmp_path, "goes_on", num_ranks=4)["goes_on"]
    whole, drawn = saved[0]["whole"], [rank["drawn"] for rank in saved]
    for number, rank in enumerate(found_by(tmp_path, "loaded", num_ranks=2)["loaded"]):
        assert rank["layers"] == {"whole": whole, "drawn": drawn[number]}
        assert rank["flat"] == {"whole": whole, "drawn": drawn[2 * number]}, "of the row that had this data"
        assert (rank["step"], rank["back"]) == (5, whole)
    (alone,) = found_by(tmp_path, "alone", num_ranks=1)["alone"]
    assert (alone["step"], alone["whole"]) == (1, whole)


@pytest.mark.slow
def test_states_of_an_optimizer_of_pytorch(tmp_path: Path) -> None:
    found_by(tmp_path, "goes_on_with_an_optimizer_of_pytorch", num_ranks=4)


@pytest.mark.second_tier
def test_weights_in_files_are_whole_tensors(tmp_path: Path) -> None:
    """Of rows and columns that ranks cannot share evenly; the library of safetensors reads them as they stand."""
    whole = found_by(tmp_path, "weights", num_ranks=4)["weights"][0]["whole"]
    of_library = {name: tensor.tolist() for name, tensor in load_file(tmp_path / "one.safetensors").items()}
    assert of_library == {name: value for name, value in whole if name != "tied.weight"}
    for rank in found_by(tmp_path, "weights_elsewhere", num_ranks=2)["weights_elsewhere"]:
        assert rank["whole"] == whole
