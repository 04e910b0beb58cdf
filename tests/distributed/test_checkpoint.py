"""Ranks save their training together, and resume it; see `checkpoint_cases` for what they do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from run_ranks import ranks
from safetensors.torch import load_file

import chunkc

Found = dict[str, list[dict[str, Any]]]


def found_by(folder: Path, *cases: str, num_ranks: int = 2) -> Found:
    return ranks(folder, *cases, num_ranks=num_ranks, script="checkpoint_cases.py")


@pytest.mark.second_tier
@pytest.mark.parametrize("case", ["goes_on", "forms", "meanwhile"])
def test_resumed_ranks_have_the_bits_of_those_that_went_on(case: str, tmp_path: Path) -> None:
    found_by(tmp_path, case)


@pytest.mark.second_tier
@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_what_one_rank_lacks_is_an_error_of_all(num_ranks: int, tmp_path: Path) -> None:
    """What it cannot write, or has otherwise; a damaged checkpoint is left out by all alike. All that compiles nothing
    in one go: importing PyTorch takes longer than each of them."""
    found_by(tmp_path, "faults", "elsewhere", "damaged", num_ranks=num_ranks)


@pytest.mark.second_tier
def test_any_number_of_ranks_loads_what_others_have_saved(tmp_path: Path) -> None:
    """From 2 ranks to 4, from these to 1, and from it to 2; weights and states to the bit."""
    saved = found_by(tmp_path, "saved")["saved"]
    whole, own, step = saved[0]["bits"]["whole"], [rank["bits"]["own"] for rank in saved], 2
    for num_ranks in (4, 1, 2):
        folder = tmp_path / str(num_ranks)
        folder.mkdir()
        (folder / "steps").symlink_to(tmp_path / "steps")
        loaded = found_by(folder, "loaded", num_ranks=num_ranks)["loaded"]
        for number, rank in enumerate(loaded):
            assert (rank["step"], rank["bits"]["whole"]) == (step, whole)
            if number < len(own):
                assert rank["bits"]["own"] == own[number], "what this rank had for itself"
            else:
                assert rank["bits"]["own"][:2] == own[0][:2], "what rank 0 had"
            assert rank["kept"] == (number >= len(own)), "generators that were not saved"
        whole, own, step = loaded[0]["after"]["whole"], [rank["after"]["own"] for rank in loaded], step + 1


@pytest.mark.second_tier
def test_one_process_reads_what_ranks_have_saved(tmp_path: Path) -> None:
    """The files are those of one process, and the library of safetensors reads the model."""
    found = found_by(tmp_path, "plain")["plain"]
    weights = load_file(tmp_path / "plain" / "step-000000000002" / "model.safetensors")
    assert {name: tensor.tolist() for name, tensor in weights.items()} == found[0]["whole"]
    model = torch.nn.Sequential(torch.nn.Linear(8, 7), torch.nn.BatchNorm1d(7))
    assert chunkc.Checkpoint(tmp_path / "plain", model=model).load_latest() == 2
    assert {name: tensor.tolist() for name, tensor in model.state_dict().items()} == found[0]["whole"]


@pytest.mark.second_tier
@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", ["killed", "hung"])
def test_a_rank_that_ends_while_it_writes(case: str, num_ranks: int, tmp_path: Path) -> None:
    """The others are told in time, and the checkpoint before is as it was. Rank 0, which tidies up, knows who ended."""
    found = ranks(tmp_path, case, num_ranks=num_ranks, script="checkpoint_cases.py")[case]
    ended, first = found.pop(1), found[0]
    for rank in found:
        seconds = re.match(r"CheckpointError after (\d+) s: .*step 2 ", rank["told"])
        assert seconds is not None
        assert int(seconds[1]) < 20
        assert "step-000000000001" in rank["names"]
        assert re.match("CheckpointError|DistributedError", rank["again"]), "until all are started anew"
    assert "rank 1 was gone" in first["told"]
    late = [".writing-000000000003"] if case == "hung" else []  # begun by the one that hung, once it goes on
    assert [name for name in first["names"] if name not in late] == ["step-000000000001"]
    assert ended == {"error": "killed"} if case == "killed" else ended["told"].startswith("CheckpointError")
