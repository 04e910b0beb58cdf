"""Anonymous memory stays flat from step to step of training from a disk, with model data of three times the budget."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = """
import ctypes, json, sys
libc, PR_SET_THP_DISABLE = ctypes.CDLL(None), 41
assert libc.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0
import torch, chunkc
from torch import nn

directory, codegen = sys.argv[1:3]
num_steps, period, leaked_nbytes = map(int, sys.argv[3:])

class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()

def anonymous_nbytes():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024

torch.manual_seed(0)
home = "disk:" + directory
model = chunkc.place(Deep(), home=home)
budget = 16 * sum(p.numel() for p in model.parameters()) // 3
options = {"memory_budget": budget, "home": home, "codegen": codegen, "whole_graph": "never", "activations": "keep"}
compiled = torch.compile(model, backend="chunkc", options=options)
optimizer = chunkc.optim.AdamW(model.parameters(), lr=1e-3)
readings, losses, leaked = [], [], []
for step in range(num_steps):
    loss = compiled(torch.randn(8, 64))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    leaked.append(bytearray(leaked_nbytes))
    if step % period == 0:
        libc.malloc_trim(0)
        readings.append(anonymous_nbytes())
    losses.append(float(loss))
assert losses[-1] < losses[0]
report = chunkc.report(compiled)
assert report.num_resident_chunks < report.num_chunks
print(json.dumps(readings))
"""


NUM_STEPS, WARM_UP, PERIOD = 500, 300, 5
"""Steps in all, those in which bounded caches and histories still fill, and how often memory is read."""
FLAT_NBYTES = 2048
"""Half a page per step. Without a leak it is about 1 KiB, and falls."""


def growth_nbytes(codegen: str, directory: Path, leaked_nbytes: int = 0) -> float:
    """Bytes of anonymous memory per step, by the median of the slopes between any two readings after the warm-up.

    Only what is in use counts: free pages of the heap are given back before each reading, and Python has no arenas of
    its own. Nor has the process huge pages: else the kernel may make one of 2 MiB of the heap, touched or not.
    """
    command = [sys.executable, "-c", SCRIPT, str(directory), codegen, *map(str, (NUM_STEPS, PERIOD, leaked_nbytes))]
    environment = {**os.environ, "PYTHONMALLOC": "malloc"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr
    readings = np.array(json.loads(done.stdout.splitlines()[-1]))
    assert len(readings) == NUM_STEPS // PERIOD
    settled = readings[WARM_UP // PERIOD :]
    first, second = np.triu_indices(len(settled), k=1)
    return float(np.median((settled[second] - settled[first]) / (second - first))) / PERIOD


@pytest.mark.second_tier
@pytest.mark.parametrize("codegen", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_anonymous_memory_stays_flat(codegen: str, tmp_path: Path) -> None:
    assert growth_nbytes(codegen, tmp_path) < FLAT_NBYTES


@pytest.mark.slow
@pytest.mark.parametrize("leaked_nbytes", [3000, 4096])
def test_a_leak_of_a_page_or_less_per_step_is_seen(leaked_nbytes: int, tmp_path: Path) -> None:
    assert growth_nbytes("eager", tmp_path, leaked_nbytes) > FLAT_NBYTES
