"""Several GPUs made of RAM train one model, through PyTorch's own NCCL group; see `device_rank_cases`."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from types import ModuleType
from typing import Any

import device_lightning
import device_trainer
import pytest
from device_overhead import MOST_LEFT_NBYTES
from device_ranks import all_well, on_ranks

pytestmark = pytest.mark.arithmetic


def cases(name: str, num_ranks: int = 2, *, arithmetic: bool = True, choices: str = "late=7") -> list[dict[str, Any]]:
    """What each rank of a case came to."""
    script = f"import device_rank_cases; device_rank_cases.main({name!r})"
    ended = on_ranks(script, num_ranks, choices=choices, arithmetic=arithmetic)
    return [json.loads(said.splitlines()[-1]) for said in all_well(ended)]


def check(found: dict[str, Any], within: float = 1e-6, *, is_exact: bool = True) -> None:
    """As on CPUs, and to the bit the same in every budget and stage; predicted bytes are those that were measured, or
    the most that there may be."""
    assert len({(run["bits"], *run["losses"]) for run in found["runs"]}) == 1, "a budget or a stage changed the result"
    assert found["difference"] < within
    for run in found["runs"]:
        assert run["losses"] == pytest.approx(found["cpu"]["losses"], abs=within)
        assert run["scale"] == found["cpu"]["scale"]
        assert min(run["left"]) > 0
        if is_exact:
            assert len(set(run["left"])) == 1, "each moment takes what was predicted, but for what is set aside"
            assert run["left"][0] < MOST_LEFT_NBYTES + 512


def test_ranks_train_as_on_cpus_in_every_stage_and_budget() -> None:
    for rank in cases("stages"):
        check(rank)


def test_ranks_train_in_other_ways_as_on_cpus() -> None:
    for rank in cases("ways"):
        for name, found in rank.items():
            check(found, 2e-3 if "fp16" in name else 1e-6, is_exact="fp16" not in name and name != "LAMB")


@pytest.mark.parametrize(("case", "num_ranks"), [("layers", 4), ("layers_by_lamb", 2)])
def test_ranks_of_a_layer_train_as_on_cpus(case: str, num_ranks: int) -> None:
    """By tensor parallelism, through a communicator of their own."""
    for rank in cases(case, num_ranks=num_ranks):
        check(rank, is_exact=False)
        if case == "layers":
            assert all(max(run["left"]) - min(run["left"]) < 2048 for run in rank["runs"]), "as predicted"


def test_the_only_rank_trains_through_nccl() -> None:
    (found,) = cases("one", num_ranks=1)
    check(found)


def test_ranks_of_two_rows_train_as_on_cpus() -> None:
    for rank in cases("rows", num_ranks=4):
        check(rank)


def test_ranks_keep_states_on_disks() -> None:
    """To the bit as in RAM, and with the same peak."""
    for rank in cases("on_disk"):
        check(rank)
        in_ram, in_ram_tight, on_disk, on_disk_tight, *_ = rank["runs"]
        for of_disk, of_ram in ((on_disk, in_ram), (on_disk_tight, in_ram_tight)):
            assert "from_disk" in of_disk["plan"]
            plan = of_disk["plan"].replace("from_disk", "to_device").replace("to_disk", "to_home")
            assert plan == of_ram["plan"], "all but the link"
        assert rank["files"] == [], "files have no names"


def test_ranks_keep_everything_on_disks_that_the_device_reads_in_place() -> None:
    """To the bit as in RAM."""
    for rank in cases("all_on_disk", choices="late=7,attribute.88=1"):
        check(rank, is_exact=False)
        assert rank["files"] == [], "files have no names"
        assert rank["exchanged"] == {"gather": ["cuda"], "scatter_sums": ["cuda"]}, "by the device's views of the file"
        nbytes, is_seen = rank["parts"]
        assert is_seen
        assert rank["grown"] > nbytes, "room for parameters and gradients"
        in_ram, on_disk = rank["written"]
        assert in_ram == on_disk, "what the user enqueues is in time for a gather"
    for rank in cases("not_in_reach"):
        assert "needs a device that reads files in place" in rank["message"]
        assert rank["kept"]


def test_an_engine_trains_as_on_cpus() -> None:
    for rank in cases("engine"):
        roomy, tight, on_disk, on_cpu = rank["runs"]
        assert roomy == tight == on_disk
        for key, expected in on_cpu.items():
            assert roomy[key] == pytest.approx(expected, abs=1e-5), key


def trained_by(module: ModuleType, folder: Path, **where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The run of a trainer of another library, in any budget and as on a CPU; and resumed."""
    script = f"import {module.__name__}; {module.__name__}.main({str(folder)!r})"
    where |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    first, second = (json.loads(said.splitlines()[-1]) for said in all_well(on_ranks(script, arithmetic=True, **where)))
    assert first == second
    roomy, tight, resumed = first["runs"]
    assert roomy == tight
    for key, values in module.plain(folder / "plain").items():
        assert roomy[key] == pytest.approx(values, rel=1e-5), key
    return roomy, resumed


def test_a_trainer_of_hugging_face_trains_as_one_process_on_a_cpu(tmp_path: Path) -> None:
    """accelerate makes the process group, which is NCCL's alone."""
    roomy, resumed = trained_by(device_trainer, tmp_path)
    assert roomy == resumed


def test_a_trainer_of_lightning_trains_as_one_process_on_a_cpu(tmp_path: Path) -> None:
    """Started as by torchrun."""
    where = {"TORCHELASTIC_RUN_ID": "of a test", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    roomy, resumed = trained_by(device_lightning, tmp_path, **where)
    assert resumed["sums"] == roomy["sums"]
    assert resumed["losses"] == roomy["losses"][4:]


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def test_fused_code_takes_no_more_than_predicted() -> None:
    """Compiled by Triton, on the device without arithmetic."""
    for rank in cases("fused", arithmetic=False):
        assert min(rank["left"]) > 0
        assert max(rank["left"]) < MOST_LEFT_NBYTES + 512


def test_ranks_plan_what_was_explained() -> None:
    first, second = cases("explained")
    for rank, other in zip(first["runs"], second["runs"], strict=True):
        assert rank["explained"] == rank["least"] == other["least"]
        said, planned = (re.sub("[0-9,]+ = [0-9,]+ resident", "", plan).splitlines()[1:] for plan in rank["plans"])
        assert said == planned, "all but the bytes that include workspaces"


def test_who_waits_for_a_killed_rank_is_told_in_time() -> None:
    first, second = on_ranks("import device_rank_cases; device_rank_cases.main('killed')", arithmetic=True)
    assert second.code == -9
    found = json.loads(first.said.splitlines()[-1])
    assert "did not come within 5 s" in found["message"]
    assert "cannot go on" in found["again"], "nothing is updated by what never came"
    assert found["waited_s"] < 10


@pytest.mark.parametrize(
    ("case", "code"),
    [
        ("killed_beside_layers", -9),
        ("killed_in_a_layer", -9),
        ("hung_beside_layers", 9),
        ("hung_in_a_layer", 9),
        ("failed_in_a_layer", 0),
    ],
)
def test_all_ranks_of_layers_are_told_in_time(case: str, code: int) -> None:
    """Those that compute with the faulty one, those that plan with it, and those that do neither. No GPU stays busy."""
    ended = on_ranks(f"import device_rank_cases; device_rank_cases.main({case!r})", 4, arithmetic=True)
    assert ended[1].code == code, ended[1].errors[-3000:]
    for rank in (0, 2, 3):
        assert ended[rank].code == 0, f"rank {rank}: {ended[rank].errors[-3000:]}"
        found = json.loads(ended[rank].said.splitlines()[-1])
        assert "cannot go on" in found["message"] or "in a collective of a layer" in found["message"], (rank, found)
        assert "cannot go on" in found["again"], "nothing is updated by what never came"
        assert found["waited_s"] < 15, (rank, found)
        assert found["busy_s"] < 1, (rank, found)


def test_parts_that_cannot_be_pinned_are_refused_before_anything_moves() -> None:
    for found in cases("unpinned", choices="late=7,attribute.88=1,pinnable=8192"):
        assert "could not be pinned" in found["message"]
        assert found["is_as_before"]


def test_a_disk_that_one_rank_does_not_have_is_refused_on_all() -> None:
    for rank, found in enumerate(cases("without_disk")):
        assert ("HomeError" if rank == 1 else "DistributedError: rank 1 of 2") in found["message"]
        assert "does not exist" in found["message"]
        assert found["is_as_before"]


def test_a_missing_wait_changes_results() -> None:
    for found in cases("waits"):
        expected = found.pop("all")
        assert all(run != expected for run in found.values()), found
