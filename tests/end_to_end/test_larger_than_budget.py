"""Model data of eight times the budget trains from disk, and memory stays flat from step to step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import HUGE, assert_same_training, train
from torch import Tensor, nn
from zoo import Case, floats

WIDTH, LAYERS, ROWS = 128, 40, 4
TIMES = 8
STATES_NBYTES = 16
"""Bytes per fp32 parameter: itself, its gradient, two moments."""


class Deep(nn.Module):
    """Many equal layers and next to no activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return (x - y).square().mean()


DEEP = Case("deep", Deep, lambda seed: {"x": floats(seed, (ROWS, WIDTH)), "y": floats(seed + 1000, (ROWS, WIDTH))})


@pytest.mark.parametrize("codegen", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_eight_times_the_budget_trains_from_disk(codegen: str, tmp_path: Path) -> None:
    """Inside the hard limit, with the bits of a run in which everything fits."""
    model_data_nbytes = STATES_NBYTES * sum(p.numel() for p in DEEP.build().parameters())
    budget = model_data_nbytes // TIMES
    result = train(DEEP, memory_budget=budget, home=f"disk:{tmp_path}", codegen=codegen, whole_graph="never")
    assert result.allocator_peak_nbytes <= result.predicted_peak_nbytes <= budget
    assert sum(value.nbytes for value in result.weights.values()) * 4 == model_data_nbytes
    assert not list(tmp_path.iterdir())
    reference = train(DEEP, memory_budget=HUGE, codegen=codegen, limit=False, whole_graph="never")
    assert reference.predicted_peak_nbytes > TIMES * budget
    assert_same_training(result, reference)


SCRIPT = """
import json, sys, torch, chunkc
from torch import nn

directory, codegen = sys.argv[1:]

class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(12))
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
options = {"memory_budget": budget, "home": home, "codegen": codegen, "whole_graph": "never"}
compiled = torch.compile(model, backend="chunkc", options=options)
optimizer = chunkc.optim.AdamW(model.parameters(), lr=1e-3)
readings, losses = [], []
for step in range(200):
    loss = compiled(torch.randn(8, 64))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    readings.append(anonymous_nbytes())
    losses.append(float(loss))
assert losses[-1] < losses[0]
report = chunkc.report(compiled)
assert report.num_resident_chunks < report.num_chunks
print(json.dumps(readings))
"""


@pytest.mark.parametrize("codegen", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_anonymous_memory_stays_flat(codegen: str, tmp_path: Path) -> None:
    """A line through steps 50 to 200 rises by less than 1 MiB in all."""
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), codegen]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    readings = np.array(json.loads(done.stdout.splitlines()[-1]))
    assert len(readings) == 200
    steps = np.arange(50, 200)
    slope_nbytes, _ = np.polyfit(steps, readings[steps], 1)
    assert slope_nbytes * len(steps) < 1 << 20, f"{slope_nbytes:.0f} bytes a step"
