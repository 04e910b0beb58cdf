"""Suites in small form, for real: fresh processes, and no failure of chunkc. They keep to their time: what would begin
late does not begin.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from measuring.context import Context
from measuring.small_run import medians, run_small
from measuring.subject_process import Turn, interleave
from peers.specs import CHECKPOINTING, CHUNKC, DDP, DEEPSPEED, FSDP2, FSDP2_RANKS, PLAIN, TORCHAO
from suites import disk, least_budget, prediction
from suites.ranks import AS_FSDP2, LEAST, ROOMY

pytestmark = pytest.mark.timeout(600)


@pytest.mark.slow
def test_fits(tmp_path: Path):
    steps, compilation, deep, second = map(medians, run_small("fits", tmp_path))
    names = [PLAIN, "chunkc fast path", "chunkc segmented"]
    assert list(compilation) == list(deep) == list(second) == list(steps) == names
    assert compilation[PLAIN]["to plain"] == steps[PLAIN]["to plain"] == 1
    assert all(row["compilation"] > 0 for row in compilation.values())
    fast, segmented = (steps[name]["moments"] for name in names[1:])
    assert fast < segmented  # the fast path really is one


@pytest.mark.slow
def test_ranks(tmp_path: Path):
    (section,) = run_small("ranks", tmp_path)
    rows = medians(section)
    assert list(rows) == [DDP, FSDP2_RANKS, ROOMY, AS_FSDP2, LEAST]
    ddp, fsdp2, roomy, as_fsdp2, least = rows.values()
    assert fsdp2["to FSDP2"] == ddp["to DDP"] == 1
    assert roomy["sent per rank and step"] == pytest.approx(ddp["sent per rank and step"], rel=0.2)
    assert least["sent per rank and step"] > roomy["sent per rank and step"]
    assert least["with home"] <= as_fsdp2["with home"] <= max(fsdp2["with home"], least["with home"])


@pytest.mark.slow
def test_disk(tmp_path: Path):
    reads, *sections = run_small("disk", tmp_path)
    assert reads["title"] == "Reads of a disk home"
    assert [section["setting"]["home"] for section in sections] == ["cpu", "disk"]
    for section in sections:
        _, *limited = section["rows"]
        for row in limited:
            metrics = row["metrics"]
            assert metrics["measured peak"]["median"] <= metrics["bytes"]["median"]


@pytest.mark.slow
def test_adam(tmp_path: Path):
    sections = run_small("adam", tmp_path)
    assert [section["title"] for section in sections] == ["Adam on CPU, fp32", "Adam on CPU, bf16 with fp32 master"]
    for section in sections:
        rows = medians(section)
        assert rows[CHUNKC]["difference from torch"] < 1e-6
        assert 0 < rows[CHUNKC]["of bound"] < 3
        assert max(row["of bound"] for name, row in rows.items() if name.startswith("bound")) <= 1


@pytest.mark.slow
def test_checkpoint(tmp_path: Path):
    (section,) = run_small("checkpoint", tmp_path)
    assert all(row["to no saving"] > 0 for row in medians(section).values())


@pytest.mark.slow
def test_budget(tmp_path: Path):
    machine, tight, roomy = run_small("budget", tmp_path)
    assert medians(machine)["rate"]["matrix products"] > 0
    rows = medians(tight)
    assert list(rows) == [CHUNKC, FSDP2, DEEPSPEED, TORCHAO, CHECKPOINTING, PLAIN]
    assert rows[CHUNKC]["measured peak"] <= tight["setting"]["budget_nbytes"]
    assert rows[CHUNKC]["moved in"] > 0
    assert rows[CHUNKC]["of bound"] > 0
    assert rows[FSDP2]["loss difference"] < 1e-3
    assert "out of memory" in rows[PLAIN]["note"]
    assert "installed" in rows[DEEPSPEED]["note"] or "step" in rows[DEEPSPEED]
    assert medians(roomy)[PLAIN]["loss difference"] < 1e-3


@pytest.mark.slow
def test_scale(tmp_path: Path):
    (section,) = run_small("scale", tmp_path)
    rows = medians(section)
    assert rows[CHUNKC]["parameters"] > rows[PLAIN]["parameters"]
    assert rows[CHUNKC]["measured peak"] <= section["setting"]["budget_nbytes"]


class Counting:
    def __init__(self) -> None:
        self.num_turns = 0

    def step(self, num_steps: int) -> Turn:
        self.num_turns += 1
        return Turn((1.0,) * num_steps, (1.0,) * num_steps, (2.0,) * num_steps, (3.0,) * num_steps, {})


def test_rounds_end_with_the_time_but_one_is_complete():
    subjects = {"a": Counting(), "b": Counting()}
    turns = interleave(subjects, num_rounds=5, num_steps=2, is_over=lambda: True)
    assert {name: len(of) for name, of in turns.items()} == {"a": 1, "b": 1}
    left = iter([False, True])
    turns = interleave(subjects, num_rounds=5, num_steps=2, is_over=lambda: next(left))
    assert len(turns["a"]) == 2


@pytest.mark.parametrize("suite", [disk, prediction])
def test_no_section_begins_when_the_time_is_up(suite, monkeypatch):
    def begun(*arguments: object) -> None:
        raise AssertionError("a section began")

    monkeypatch.setattr(suite, "_section", begun)
    context = Context(True, "cpu", lambda *shown: None, deadline_s=time.monotonic() - 1)
    assert list(suite.run(context)) == []


@pytest.mark.slow
def test_a_rehearsal_compares_all_three(tmp_path: Path):
    sections = run_small("prediction", tmp_path)
    assert [section["setting"]["name"] for section in sections] == ["tiny-3", "hf-tiny"]
    for section in sections:
        rows = medians(section)
        assert list(rows) == list(prediction.PHASES)
        for phase, row in rows.items():
            if phase == "update" and section["setting"]["name"] == "hf-tiny":
                assert set(row) == {"note"}  # all of it fits: updates are of no plan
                continue
            # On a CPU, compiled eagerly: to the byte, but for the loss's own gradient and a buffer that no graph reads.
            assert abs(row["measured"] - row["plan"]) <= 64, phase
            assert row["plan"] == row["CPU fakes"], phase
            assert row["CPU to CUDA fakes"] == row["CPU fakes"] / row["CUDA fakes"]


def test_the_gpu_is_known_by_the_driver_s_name(monkeypatch: pytest.MonkeyPatch):
    found = {"gpu": "NVIDIA H200", "gpu_memory_nbytes": 140 << 30}
    monkeypatch.setattr(least_budget.machine, "hardware", lambda: found)
    gpu = least_budget.hardware_here("cuda")
    assert (gpu.name, gpu.device_memory_nbytes) == ("h200", 140 << 30)
