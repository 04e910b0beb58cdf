"""Ranks save weights into files and load them; see `file_cases` for what they do."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from run_ranks import ranks
from safetensors.torch import load_file


def found_by(folder: Path, *cases: str, num_ranks: int = 2) -> dict[str, list[dict[str, Any]]]:
    return ranks(folder, *cases, num_ranks=num_ranks, script="file_cases.py")


@pytest.mark.second_tier
def test_any_number_of_ranks_loads_weights_that_others_have_saved(tmp_path: Path) -> None:
    """From 4 ranks; tied weights are there once, and the library reads the files as they stand."""
    whole = found_by(tmp_path, "saved", num_ranks=4)["saved"][0]["whole"]
    weights = load_file(tmp_path / "one.safetensors")
    assert {name: tensor.tolist() for name, tensor in weights.items()} == {
        name: value for name, value in whole if name != "head.weight"
    }
    index = json.loads((tmp_path / "several" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3
    for num_ranks in (1, 2):
        folder = tmp_path / str(num_ranks)
        folder.mkdir()
        for name in ("one.safetensors", "several"):
            (folder / name).symlink_to(tmp_path / name)
        for rank in found_by(folder, "loaded", num_ranks=num_ranks)["loaded"]:
            assert rank["one.safetensors"] == rank["several"] == whole


@pytest.mark.second_tier
def test_what_one_rank_cannot_write_or_read_is_an_error_of_all(tmp_path: Path) -> None:
    first, other = found_by(tmp_path, "refused")["refused"]
    assert re.match(
        "FileError .* cannot save to .*: No space left on device; weights that were saved there before are unchanged",
        first["full"],
    )
    assert re.match("FileError .* rank 0 of 2: No space left on device", other["full"])
    assert first["left"] == ["model.safetensors"]
    assert first["as it was"]
    assert re.match("FileError .* rank 1 of 2: cannot read .*nowhere", first["not there"])
    assert re.match("FileError .* cannot read .*nowhere", other["not there"])
    for rank in (first, other):
        assert rank["after"].startswith("IncompatibleKeys(missing_keys=[], unexpected_keys=[])")
