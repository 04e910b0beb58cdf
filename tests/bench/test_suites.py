"""The suites `fits`, `disk` and `adam` in small form, for real: fresh processes, and no failure of chunkc."""

from pathlib import Path

import pytest
from measuring.small_run import medians, run_small
from peers.specs import CHUNKC, DDP, FSDP2_RANKS, PLAIN
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
