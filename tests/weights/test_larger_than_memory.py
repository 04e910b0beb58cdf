"""A model larger than memory is built, loaded, trained, saved, resumed and evaluated in what `chunkc explain` says.

Resident memory is the kernel's own peak, per stage. Torch's allocator has the budget as a hard limit in the steps.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import larger_than_memory
import pytest
import torch
from larger_than_memory import NUM_STEPS, Model

MIB = 2**20

OF_PYTHON_NBYTES = 24 * MIB
"""What Python's objects, traced graphs and compiled code take of a model with 48 blocks: what `explain` leaves out."""

SAID_AS = {
    "building again": "building",
    "saving trained": "saving",
    "saving a checkpoint": "saving",
    "evaluating": "training",
}
"""The stage of the explanation for each of the test's that it does not name."""

SCRIPT = larger_than_memory.__file__


def run(folder: Path, width: int, depth: int) -> list[dict]:
    """What came of the run that builds, and of the one that resumes."""
    # Memory that is freed goes back to the kernel: what is measured is what is in use.
    environment = os.environ | {"MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": "65536"}
    environment |= {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    path = (str(Path(SCRIPT).parent), os.environ.get("PYTHONPATH", ""))  # Python may not look next to the script
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, path))}
    command = [sys.executable, SCRIPT, folder, str(width), str(depth)]
    done = subprocess.run(command, env=environment, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def plain_losses(width: int, depth: int) -> list[float]:
    """Those of plain PyTorch."""
    torch.manual_seed(0)
    model = Model(width, depth)
    x = torch.randn(8, width, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(2 * NUM_STEPS):
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        return [*losses, model(x).item()]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("width", "depth", "limit_nbytes"),
    [
        pytest.param(192, 12, 96 * MIB, marks=pytest.mark.second_tier, id="small"),
        pytest.param(512, 48, 128 * MIB, marks=pytest.mark.slow, id="three times the limit"),
    ],
)
def test_no_stage_takes_more_than_explain_says(tmp_path: Path, width: int, depth: int, limit_nbytes: int) -> None:
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("needs the kernel's peak of resident memory, per stage")
    born, resumed = run(tmp_path, width, depth)
    if width == 512:
        assert born["parameters"] >= 3 * limit_nbytes
    for found in (born, resumed):
        for stage, peak_nbytes in found["peaks"].items():
            assert peak_nbytes <= found["said"][SAID_AS.get(stage, stage)] + OF_PYTHON_NBYTES, (stage, found)
            assert peak_nbytes <= limit_nbytes, (stage, found)
    assert born["losses"] + resumed["losses"] == pytest.approx(plain_losses(width, depth), rel=1e-3)
