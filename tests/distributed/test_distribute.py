"""Two ranks train one model, in processes of their own; see `rank_cases` for what they do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from run_ranks import ranks

Found = dict[str, list[dict[str, Any]]]

CASES = {
    **dict.fromkeys(("as_one_process", "let_go", "loss_in_tiles", "written", "announced"), pytest.mark.second_tier),
    "as_one_process_inductor": pytest.mark.slow,
}
"""What ranks check by themselves."""


@pytest.mark.parametrize("case", [pytest.param(case, marks=mark) for case, mark in CASES.items()])
def test_ranks_train_as_one_process_does(case: str, tmp_path: Path) -> None:
    """Tied, frozen and unused parameters, accumulation, clipping, in every budget and inside a hard limit."""
    ranks(tmp_path, case)


@pytest.mark.slow
def test_four_ranks_train_as_one_process_does(tmp_path: Path) -> None:
    ranks(tmp_path, "as_one_process", num_ranks=4)


@pytest.mark.second_tier
def test_the_plan_chooses_what_is_whole(tmp_path: Path) -> None:
    ranks(tmp_path, "chosen", "leaving")


@pytest.mark.second_tier
def test_a_home_on_a_disk_changes_no_bit(tmp_path: Path) -> None:
    """Files have no names and leave nothing behind."""
    ranks(tmp_path, "disk_home")
    assert {path.suffix for path in tmp_path.iterdir()} <= {".json", ".store"}


@pytest.mark.slow
def test_any_number_of_ranks_loads_what_others_have_saved(tmp_path: Path) -> None:
    """With PyTorch's own checkpoints: weights and states to the bit, and training goes on alike."""
    saved = ranks(tmp_path, "saved", num_ranks=2)["saved"]
    losses = []
    for num_ranks in (1, 2, 4):
        folder = tmp_path / str(num_ranks)
        folder.mkdir()
        (folder / "checkpoint").symlink_to(tmp_path / "checkpoint")
        for rank in ranks(folder, "loaded", num_ranks=num_ranks)["loaded"]:
            assert rank["whole"] == saved[0]["whole"]
            losses.append(rank["losses"])
    assert all(found == pytest.approx(losses[0], abs=1e-6) for found in losses)


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def faults(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """All that end in an error, in one go: importing PyTorch takes longer than each of them."""
    refused = ("not_exchanged", "refused")
    return ranks(tmp_path_factory.mktemp("faults"), *WHAT_RANKS_SAY, *refused, num_ranks=request.param)


WHAT_RANKS_SAY: dict[str, tuple[str | None, ...]] = {
    "killed": ("rank 1 was gone", None),
    "hung": ("rank 1 was gone, or did not come within 10 s", "rank [023] was gone"),
    "another_phase": ("differ in the phase: rank 1 of N", "differ in the phase: rank 1 of N"),
    "another_step": ("differ in the optimizer's steps, or in their hyper-parameters: rank 1 of N", "rank 1 of N"),
    "hooked_on_one": ("rank 1 was gone", "the gradient of embed.weight is looked at on its way"),
    "too_small_on_one": (
        "rank 1 of N cannot go on. BudgetError: memory_budget is 512 bytes",
        "the smallest that works",
    ),
    "another_model": ("differ in the parameters of the model: rank 1 of N", "rank 1 of N"),
    "another_stage": ("differ in zero_stage: rank 1 of N", "rank 1 of N"),
    "announced_on_one": ("differ in accumulating\\(\\): rank 1 of N", "rank 1 of N"),
    "another_budget": ("differ in the options: rank 1 of N", "rank 1 of N"),
    "refused_on_one": (
        "^DistributedError: rank 1 of N: weight shares its memory.*\nUnsupportedError: weight shares its memory.*\n"
        "OptionsError: option 'home' is 'nowhere'.*\nOptionsError: timeout_s is 0.*\n"
        "OptionsError: mesh must be a DeviceMesh.*\nDistributedError: rank 1 of N: mesh must.*\nDistributedError: "
        "ranks differ in the mesh: rank 1 of N.*\nOptionsError: option 'memory_budget' is 'a lot'.*$",
        "^UnsupportedError: weight shares its memory.*\nDistributedError: rank 0 of N: weight shares its memory.*\n"
        "DistributedError: rank 0 of N: option 'home' is 'nowhere'.*\n"
        "DistributedError: rank 0 of N: timeout_s is 0.*\nDistributedError: rank 0 of N: mesh must.*\nOptionsError: "
        "mesh must be.*\nDistributedError: ranks differ in the mesh.*\nDistributedError: rank 0 of N cannot go on. "
        "OptionsError: option 'memory_budget' is 'a lot'.*$",
        "^DistributedError: rank 1 of N: weight shares its memory.*\nDistributedError: rank 0 of N: weight shares .*\n"
        "DistributedError: rank 0 of N: option 'home' is 'nowhere'.*\n"
        "DistributedError: rank 0 of N: timeout_s is 0.*\nDistributedError: rank 0 of N: mesh must.*\n"
        "DistributedError: rank 1 of N: mesh must.*\nDistributedError: ranks differ in the mesh: rank 1 of N.*\n"
        "DistributedError: rank 0 of N cannot go on. OptionsError: option 'memory_budget' is 'a lot'.*$",
    ),
}
"""Of rank 0, of rank 1, and of more than two the others, if not what rank 0 says. None: it was killed."""


@pytest.mark.second_tier
@pytest.mark.parametrize("case", WHAT_RANKS_SAY)
def test_all_ranks_raise_an_error_in_time(case: str, faults: Found) -> None:
    first, second, *other = WHAT_RANKS_SAY[case]
    num_ranks = len(faults[case])
    for found, expected in zip(faults[case], [first, second] + (other or [first]) * (num_ranks - 2), strict=True):
        if expected is None:
            assert found == {"error": "killed"}
            continue
        assert re.search(expected.replace("of N", f"of {num_ranks}"), found["message"]), found
        assert found.get("took", 0) < 30
        assert found.get("kept", True), "the model is what it was"


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_rank_that_stays_after_an_error_keeps_nobody_waiting(num_ranks: int, tmp_path: Path) -> None:
    found = ranks(tmp_path, "out_of_memory", "interrupted", "another_code", num_ranks=num_ranks)
    for case, error in (("out_of_memory", "MemoryError"), ("interrupted", "KeyboardInterrupt")):
        failed = found[case].pop(1)
        assert failed["error"] == error
        assert all("rank 1 was gone" in rank["message"] for rank in found[case])
    differs = f"differ in the program of the model: rank 1 of {num_ranks}"
    assert all(differs in rank["message"] for rank in found["another_code"])
    assert all(rank.get("took", 0) < 15 for of_ranks in found.values() for rank in of_ranks), "nobody waited for 30 s"
