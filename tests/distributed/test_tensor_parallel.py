"""Layers that ranks compute together, cut over others by chunkc: see `tensor_cases` for what they do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from run_ranks import ranks

SCRIPT = "tensor_cases.py"
NUMBERS_NBYTES = 256  # as in `tensor_cases`


def check_as_one_process(found: list[dict[str, Any]]) -> None:
    for rank in found:
        by_way: dict[str, set[str]] = {}
        for run in rank["runs"]:
            assert run["losses"] == pytest.approx(rank["expected"], abs=1e-6)
            assert run["difference"] < 1e-6
            _, plan, codegen, clip = run["how"].split()
            by_way.setdefault(f"{plan in ('rows', 'copies') and plan} {codegen} {clip}", set()).add(run["bits"])
            measured, predicted, budget = run["peaks"]
            assert measured - NUMBERS_NBYTES <= predicted <= budget
            off = sorted(run["off"])
            assert off[0] >= 0
            assert off[-1] <= NUMBERS_NBYTES
            if codegen == "eager":
                assert off[len(off) * 3 // 4] - off[0] <= 16, "exact to the byte, beside the loop's own collectives"
        assert all(len(bits) == 1 for bits in by_way.values()), "a budget or a stage changed the result"
    weights = [[run["weights"] for run in rank["runs"]] for rank in found]
    assert all(of_rank == weights[0] for of_rank in weights), "what ranks have alike stays alike"


@pytest.mark.second_tier
def test_ranks_of_a_layer_train_as_one_process_does(tmp_path: Path) -> None:
    """With columns, rows and parts of the batch, with room for all and with none to spare inside a hard limit."""
    check_as_one_process(ranks(tmp_path, "as_one_process", script=SCRIPT)["as_one_process"])


@pytest.mark.second_tier
def test_lamb_trains_as_in_one_process(tmp_path: Path) -> None:
    """Its norms are of whole tensors: of columns and rows, and of what ranks of a layer have alike once."""
    check_as_one_process(ranks(tmp_path, "lamb_as_one_process", script=SCRIPT)["lamb_as_one_process"])


@pytest.mark.second_tier
def test_copies_of_the_parts_of_layers(tmp_path: Path) -> None:
    """A mesh of three dimensions: copies, parts, and ranks that compute a layer together."""
    check_as_one_process(ranks(tmp_path, "copies", num_ranks=4, script=SCRIPT)["copies"])


@pytest.mark.slow
def test_a_cube_of_ranks(tmp_path: Path) -> None:
    """Two copies of two parts of what each of two ranks of a layer has."""
    check_as_one_process(ranks(tmp_path, "copies", num_ranks=8, script=SCRIPT)["copies"])


@pytest.mark.slow
def test_lamb_in_all_ways(tmp_path: Path) -> None:
    """In slots and at home, beside other work; on two rows of layers, with copies, with plans of each rank's own."""
    check_as_one_process(ranks(tmp_path, "lamb_in_all_ways", num_ranks=4, script=SCRIPT)["lamb_in_all_ways"])


@pytest.mark.slow
def test_what_does_not_go_with_tensor_parallelism_is_refused(tmp_path: Path) -> None:
    found = ranks(tmp_path, "refused", script=SCRIPT)
    expected = {
        "another mesh": "UnsupportedError: embed.weight is a DTensor over ranks that have no mesh in common",
        "not distributed": "UnsupportedError: the model takes a DTensor that chunkc.distribute has not made",
        "a DTensor returned": "UnsupportedError: the model returns a DTensor: return its to_local()",
        "a buffer": "UnsupportedError: the buffer 0.mean is a DTensor",
        "fully_shard": "UnsupportedError: the model is cut by fully_shard already",
        "dynamic": "UnsupportedError: dynamic=True of torch.compile makes symbols of the model's numbers",
        "twice": "UnsupportedError: scale is distributed or compiled already",
    }
    for rank in found["refused"]:
        for name, message in expected.items():
            assert rank[name].startswith(message), name


@pytest.mark.slow
def test_two_rows_of_layers_train_as_one_process_does(tmp_path: Path) -> None:
    """In every stage, with activation checkpoints, and as Inductor compiles it."""
    check_as_one_process(ranks(tmp_path, "in_all_ways", num_ranks=4, script=SCRIPT)["in_all_ways"])


@pytest.mark.slow
def test_many_equal_layers_are_traced_as_few(tmp_path: Path) -> None:
    check_as_one_process(ranks(tmp_path, "many_layers", script=SCRIPT)["many_layers"])


@pytest.mark.slow
def test_sizes_that_change_are_compiled_each_for_itself(tmp_path: Path) -> None:
    for rank in ranks(tmp_path, "other_sizes", script=SCRIPT)["other_sizes"]:
        assert rank["losses"] == pytest.approx(rank["expected"], abs=1e-6)


@pytest.mark.slow
def test_an_overflow_on_one_rank_of_a_layer_is_one_of_all_or_an_error(tmp_path: Path) -> None:
    """chunkc's scaler asks all ranks, and PyTorch's only those over which an optimizer's first gradient is cut."""
    for rank in ranks(tmp_path, "overflow", script=SCRIPT)["overflow"]:
        assert rank["chunkc.optim.gradient_scaling"] == [True, 2.0]
        assert rank["torch.amp.grad_scaler"][0], "nothing was updated"
        assert "whether a gradient overflowed (take chunkc.GradScaler" in rank["message"]


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_pytorchs_checkpoints_save_and_load_it(num_ranks: int, tmp_path: Path) -> None:
    for rank in ranks(tmp_path, "saved", num_ranks=num_ranks, script=SCRIPT)["saved"]:
        assert rank["same"]
        assert rank["again"] == rank["losses"]
