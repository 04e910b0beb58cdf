"""The suites `budget`, `bound` and `scale` in small form, for real: fresh processes, and no failure of chunkc."""

from pathlib import Path

import pytest
from measuring.small_run import medians, run_small
from peers.specs import CHECKPOINTING, CHUNKC, DEEPSPEED, FSDP2, PLAIN, TORCHAO

pytestmark = pytest.mark.timeout(600)


@pytest.mark.slow
def test_budget(tmp_path: Path):
    tight, roomy = run_small("budget", tmp_path)
    rows = medians(tight)
    assert list(rows) == [CHUNKC, FSDP2, DEEPSPEED, TORCHAO, CHECKPOINTING, PLAIN]
    assert rows[CHUNKC]["measured peak"] <= tight["setting"]["budget_nbytes"]
    assert rows[CHUNKC]["moved in"] > 0
    assert rows[FSDP2]["loss difference"] < 1e-3
    assert "out of memory" in rows[PLAIN]["note"]
    assert "installed" in rows[DEEPSPEED]["note"] or "step" in rows[DEEPSPEED]
    assert medians(roomy)[PLAIN]["loss difference"] < 1e-3


@pytest.mark.slow
def test_bound(tmp_path: Path):
    machine, case = run_small("bound", tmp_path)
    assert medians(machine)["rate"]["matrix products"] > 0
    (row,) = medians(case).values()
    assert row["of bound"] > 0
    assert row["bound"] == max(row["compute"], row["links"], row["CPU update"])


@pytest.mark.slow
def test_scale(tmp_path: Path):
    (section,) = run_small("scale", tmp_path)
    rows = medians(section)
    assert rows[CHUNKC]["parameters"] > rows[PLAIN]["parameters"]
    assert rows[CHUNKC]["measured peak"] <= section["setting"]["budget_nbytes"]
