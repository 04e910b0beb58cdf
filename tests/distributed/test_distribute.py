"""Two ranks train one model, in processes of their own; see `rank_cases` for what they do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from run_ranks import ranks

NUMBERS_NBYTES = 64  # as in `rank_cases`
Found = dict[str, list[dict[str, Any]]]


def check_as_one_process(found: list[dict[str, Any]]) -> None:
    for rank in found:
        for run in rank["runs"]:
            assert run["losses"] == pytest.approx(rank["expected"], abs=1e-6)
            assert run["difference"] < 1e-6
            gathered = sum(num * nbytes for num, nbytes in run["gathered"])
            others = rank["num_ranks"] - 1
            num_gathered = 2 * gathered if run["stage"] == 3 else run["trained"]
            assert run["sent"]["gathers"] == others * num_gathered, "each gather sends this rank's part"
            assert run["sent"]["scatters"] == 2 * run["lacking"], "what others have of trained parameters"
        assert len({run["bits"] for run in rank["runs"]}) == 1, "a budget or a stage changed the result"
        by_stage = {run["stage"]: run["sent"]["gathers"] for run in reversed(rank["runs"])}
        roomy, tight = [run["sent"]["gathers"] for run in rank["runs"] if run["stage"] == 3]
        assert max(by_stage.get(2, 0), by_stage.get(1, 0)) < roomy < tight
    homes = [run["home"] for rank in found for run in rank["runs"]]
    assert max(homes) < 1.25 * min(homes), "parts differ by a row at most"


@pytest.mark.second_tier
def test_ranks_train_as_one_process_does(tmp_path: Path) -> None:
    """Tied, frozen and unused parameters, accumulation, clipping, in every budget and inside a hard limit."""
    check_within_budget(ranks(tmp_path, "as_one_process")["as_one_process"])


@pytest.mark.second_tier
def test_the_plan_chooses_what_is_whole(tmp_path: Path) -> None:
    """All where there is room, and then it is the plan of stage 2; none in the smallest budget. When one rank keeps
    values, what is whole leaves on all ranks, for good. No choice changes a bit, and bytes are those that are planned.
    """
    found = ranks(tmp_path, "chosen", "leaving")
    for rank in (*found["chosen"], *found["leaving"]):
        assert len({run["bits"] for run in rank["runs"]}) == 1, "a choice changed the result"
    for rank in (*found["chosen"], found["leaving"][1]):
        for measured, predicted in (run["peaks"] for run in rank["runs"]):
            assert 0 <= measured - predicted <= NUMBERS_NBYTES
    assert all(measured <= predicted for measured, predicted in (run["peaks"] for run in found["leaving"][0]["runs"]))
    for rank in found["chosen"]:
        forced, roomy, tight = rank["runs"]
        assert roomy["plan"] == forced["plan"]
        assert roomy["whole"] == list(range(roomy["groups"]))
        assert tight["whole"] == []
        assert len({tuple(run["losses"]) for run in rank["runs"]}) == 1
    first, second = (rank["runs"][1]["whole"] for rank in found["leaving"])
    assert first == second, "ranks choose alike"
    assert [len(whole) for whole in first] == sorted((len(whole) for whole in first), reverse=True)
    assert len(first[0]) > len(first[2]) > len(first[-1]) == 0, "some were whole, and others not"


@pytest.mark.slow
def test_four_ranks_train_as_one_process_does(tmp_path: Path) -> None:
    check_within_budget(ranks(tmp_path, "as_one_process", num_ranks=4)["as_one_process"])


@pytest.mark.second_tier
def test_ranks_train_with_losses_in_tiles_as_one_process_does_without(tmp_path: Path) -> None:
    for rank in ranks(tmp_path, "loss_in_tiles")["loss_in_tiles"]:
        for run in rank["runs"]:
            assert run["losses"] == pytest.approx(rank["expected"], abs=1e-6)
        assert len({run["bits"] for run in rank["runs"]}) == 1, "a budget or a stage changed the result"


@pytest.mark.second_tier
def test_gradients_that_nobody_has_take_no_memory_at_home(tmp_path: Path) -> None:
    for rank in ranks(tmp_path, "let_go")["let_go"]:
        assert rank["used"] > 1
        assert rank["left"] == 0
        assert rank["grown"] == 0, "the backward has brought them home again"
        assert rank["kept"], "what somebody still has keeps its values"
        assert rank["values"]
        assert rank["left at last"] == 0
        peak, with_home, home = rank["peaks"]
        assert peak < with_home <= peak + home


@pytest.mark.second_tier
@pytest.mark.parametrize("num_ranks", [2, *(pytest.param(number, marks=pytest.mark.slow) for number in (3, 4))])
def test_ranks_send_what_the_formulas_say(num_ranks: int, tmp_path: Path) -> None:
    """Of the parameters (p - 1) / p twice, as plain data parallelism, in stages 1 and 2, and three times in stage 3.
    Where the plan chooses, so much for each chunk."""
    found = ranks(tmp_path, "sent", num_ranks=num_ranks)["sent"]
    whole = found[0]["whole"]
    assert 0.2 < whole < 0.8
    for stage, times in {"3": 3, "2": 2, "1": 2, "chosen": 3 - whole}.items():
        nbytes = [rank["by stage"][stage] for rank in found]
        expected = times * found[0]["parameters"] * (num_ranks - 1) / num_ranks
        within = 0.08 if stage == "chosen" else 0.03  # a block of 32 stays; next to those that are whole, a few do
        assert sum(nbytes) / num_ranks == pytest.approx(expected, rel=within)
        if num_ranks != 3:  # rows are shared evenly
            assert all(of_rank == pytest.approx(expected, rel=within) for of_rank in nbytes)


@pytest.mark.second_tier
def test_what_is_written_between_steps_counts_in_every_stage(tmp_path: Path) -> None:
    for rank in ranks(tmp_path, "written")["written"]:
        assert rank["1"] == rank["2"] == rank["3"]


@pytest.mark.second_tier
def test_a_home_on_a_disk_changes_no_bit(tmp_path: Path) -> None:
    """In every stage; parameters lie in each rank's own file, which has no name and leaves nothing behind."""
    home = tmp_path / "home"
    home.mkdir()
    for number, rank in enumerate(ranks(home, "disk_home")["disk_home"]):
        for stage in "321":
            assert rank[f"{stage} cpu"] == rank[f"{stage} disk"]
            assert rank[f"{stage} on disk"]
            assert rank[f"{stage} option"] == f"disk:{home}"
        assert rank["kept"]
        kind = "HomeError: " if number == 1 else "DistributedError: rank 1 of 2: "
        assert rank["nowhere"].startswith(kind)
    assert {path.suffix for path in home.iterdir()} <= {".json", ".store"}


@pytest.mark.second_tier
def test_announced_accumulation_exchanges_in_the_last_backward_alone(tmp_path: Path) -> None:
    """What was announced and then dropped leaves nothing behind."""
    for rank in ranks(tmp_path, "announced")["announced"]:
        for run in rank["runs"]:
            assert run["losses"] == pytest.approx(rank["expected"], abs=1e-6)
            assert run["scattered"] == run["lacking"], "once in a step of two micro-batches"
        assert len({run["bits"] for run in rank["runs"]}) == 1, "the budget changed the result"
        assert rank["after dropping"] == rank["alone"]


def check_within_budget(found: list[dict[str, Any]]) -> None:
    check_as_one_process(found)
    for rank in found:
        for measured, predicted, budget in (run["peaks"] for run in rank["runs"]):
            assert 0 <= measured - predicted <= NUMBERS_NBYTES
            assert predicted <= budget


@pytest.mark.slow
def test_ranks_train_as_one_process_does_with_inductor(tmp_path: Path) -> None:
    check_as_one_process(ranks(tmp_path, "as_one_process_inductor")["as_one_process_inductor"])


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
    cases = (
        "killed",
        "hung",
        "another_phase",
        "another_step",
        "hooked_on_one",
        "too_small_on_one",
        "another_model",
        "another_stage",
        "refused_on_one",
    )
    others = ("announced_on_one", "not_exchanged", "another_budget", "refused")
    return ranks(tmp_path_factory.mktemp("faults"), *cases, *others, num_ranks=request.param)


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


@pytest.mark.second_tier
def test_what_distributed_models_do_not_do_is_refused(faults: Found) -> None:
    expected = {
        "8 bits": "UnsupportedError: AdamW updates distributed parameters with fp32 or bf16 moments",
        "twice": "UnsupportedError: 0.weight is distributed or compiled already",
        "tensor parallel": "UnsupportedError: 0.weight is a DTensor over ranks that have no mesh in common",
        "plain gradient": "UnsupportedError: the gradient of a distributed parameter must be cut",
        "copied": "UnsupportedError: the model takes a DTensor that chunkc.distribute has not made",
        "meta": "UnsupportedError: the buffer numbers is on the meta device, and no file of weights has it",
        "stage": "OptionsError: zero_stage is 4; allowed: ",
        "timeout": "OptionsError: timeout_s is 0",
        "mesh": "OptionsError: mesh must be a DeviceMesh of one or two dimensions",
        "other ranks' mesh": "OptionsError: mesh must be .*; this process is in none",
        "shared": "UnsupportedError: this rank's part of 0.weight shares its memory",
        "home": "OptionsError: option 'home' is 'nowhere'",
    }
    for rank in faults["refused"]:
        assert rank.keys() - {"seconds"} == expected.keys()
        for name, message in expected.items():
            assert re.match(message, rank[name]), name


@pytest.mark.second_tier
def test_gradients_that_were_not_exchanged_are_refused(faults: Found) -> None:
    for rank in faults["not_exchanged"]:
        for name in ("clipped", "read", "stepped"):
            assert rank[name].startswith("UnsupportedError: ranks have not exchanged the gradient of "), name
        assert "has a gradient, which ranks have exchanged already: call optimizer.zero_grad()" in rank["added"]
