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

NEWEST = "step-000000000002"
Found = dict[str, list[dict[str, Any]]]


def found_by(folder: Path, *cases: str, num_ranks: int = 2) -> Found:
    return ranks(folder, *cases, num_ranks=num_ranks, script="checkpoint_cases.py")


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def faults(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """All that compile nothing, in one go: importing PyTorch takes longer than each of them."""
    return found_by(tmp_path_factory.mktemp("faults"), "faults", "elsewhere", "damaged", num_ranks=request.param)


@pytest.mark.second_tier
def test_resumed_ranks_have_the_bits_of_those_that_went_on(tmp_path: Path) -> None:
    """In every stage: losses, weights, states, buffers, schedulers and random generators of each rank."""
    for rank in found_by(tmp_path, "goes_on")["goes_on"]:
        for stage in "321":
            resumed, expected = rank[stage]
            assert resumed == expected


@pytest.mark.second_tier
def test_every_form_of_states(tmp_path: Path) -> None:
    for rank in found_by(tmp_path, "forms")["forms"]:
        for name in ("split masters", "bf16 moments", "momentum", "plain"):
            resumed, expected = rank[name]
            assert resumed == expected, name


@pytest.mark.second_tier
def test_the_next_step_waits_until_ranks_have_read_their_parts(tmp_path: Path) -> None:
    for rank in found_by(tmp_path, "meanwhile")["meanwhile"]:
        assert rank["loaded"] == rank["saved"]
        assert re.search("CheckpointError .* was changed while it was being saved", rank["without"])


@pytest.mark.second_tier
def test_any_number_of_ranks_loads_what_others_have_saved(tmp_path: Path) -> None:
    """From 2 ranks to 4, from these to 1, and from it to 2; weights and states to the bit."""
    saved = found_by(tmp_path, "saved")["saved"]
    whole, own, step = saved[0]["bits"]["whole"], [rank["bits"]["own"] for rank in saved], 2
    assert [name for name in saved[0]["files"] if not name.startswith("rank-1.")] == [
        "manifest.json",
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
        "state.safetensors",
    ]
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
    weights = load_file(tmp_path / "plain" / NEWEST / "model.safetensors")
    assert {name: tensor.tolist() for name, tensor in weights.items()} == found[0]["whole"]
    model = torch.nn.Sequential(torch.nn.Linear(8, 7), torch.nn.BatchNorm1d(7))
    assert chunkc.Checkpoint(tmp_path / "plain", model=model).load_latest() == 2
    assert {name: tensor.tolist() for name, tensor in model.state_dict().items()} == found[0]["whole"]


FAILS = {
    "full disk": (1, "No space left on device"),
    "full disk of rank 0": (0, "No space left on device"),
    "read-only": (1, "Read-only file system"),
    "no name": (0, "Input/output error"),
    "no directory": (0, "Read-only file system"),
}


@pytest.mark.second_tier
@pytest.mark.parametrize("name", FAILS)
def test_what_one_rank_cannot_write_is_an_error_of_all(name: str, faults: Found) -> None:
    failing, reason = FAILS[name]
    for number, rank in enumerate(faults["faults"]):
        told, before, after = rank[name]
        assert re.match(r"CheckpointError after \d s: ", told)
        assert reason in told
        assert (number == failing) != (f"rank {failing} of {len(faults['faults'])}: " in told), "which rank it was"
        assert before == ["step-000000000001"]
        assert after == ["step-000000000001", NEWEST]


@pytest.mark.second_tier
def test_a_damaged_checkpoint_is_left_out_by_all_ranks_alike(faults: Found) -> None:
    one, *others = faults["damaged"]
    assert len(one["files"]) == 1 + 3 * len(faults["damaged"])
    for name in one["files"]:
        assert all(one[name] == other[name] for other in others)
        step, values, told = one[name]
        assert (step, values) == (1, [1.0])
        assert re.search(f"{NEWEST} is damaged and left out: {re.escape(name)} is damaged", told[0])
    for rank in faults["damaged"]:
        assert re.search(r"(?s)CheckpointError .* is whole:.*step-0*2 .*step-0*1 ", rank["none"])
        assert rank["kept"], "nothing has changed"


SAYS = {
    "nothing yet": "None after",
    "two": "1 after",
    "two alike": r"\[True, True\]",
    "model": "CheckpointError .* cannot be loaded: the checkpoint is of another model: ",
    "directory": "CheckpointError .* is not there as rank 0 has it: all ranks save to one directory",
    "step": r"DistributedError .* ranks differ in the phase: rank 1 of . .*save\(2\) instead of Checkpoint.save\(1\)",
    "plain": "UnsupportedError .* there are several processes, and the model is not distributed over them",
    "mixed": "UnsupportedError .* b/weight is not distributed as a/0.weight is",
}


@pytest.mark.second_tier
def test_ranks_that_differ(faults: Found) -> None:
    for rank in faults["elsewhere"]:
        for name, expected in SAYS.items():
            assert re.match(expected, rank[name]), rank[name]


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
