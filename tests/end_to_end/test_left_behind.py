"""Nothing is left behind: no file, no disk space."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import forked
import pytest
import torch
from fault_cases import CASE, small_budget, train_steps
from harness import adamw, compile_case
from torch import nn

pytestmark = [
    pytest.mark.timeout(90),  # a hang is a failure
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),  # they die on purpose
]


SCRIPT = """
import os, signal, sys, torch, chunkc
from torch import nn

class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(4))
    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()

directory, ending = sys.argv[1:]
model = chunkc.place(Stack(), home="disk:" + directory)
options = {"memory_budget": 200_000, "home": "disk:" + directory, "codegen": "eager", "whole_graph": "never"}
options["activations"] = "keep"
compiled = torch.compile(model, backend="chunkc", options=options)
optimizer = chunkc.optim.AdamW(model.parameters())
for _ in range(2):
    loss = compiled(torch.ones(4, 64))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
assert chunkc.report(compiled).traffic_nbytes["to_home"] > 0
links = ["/proc/self/fd/" + fd for fd in os.listdir("/proc/self/fd")]
open_files = [os.readlink(link) for link in links if os.path.islink(link)]
assert any(path.startswith(directory) for path in open_files), open_files
compiled(torch.ones(4, 64))  # a step is under way
if ending == "exception":
    raise ZeroDivisionError("oops")
if ending == "kill":
    assert os.listdir(directory) == []  # not even while it runs
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.second_tier
@pytest.mark.parametrize(
    "ending", [*(pytest.param(way, marks=pytest.mark.slow) for way in ("exit", "exception")), "kill"]
)
def test_no_file_is_left_behind(ending: str, tmp_path: Path) -> None:
    program, directory = tmp_path / "program.py", tmp_path / "home"
    program.write_text(SCRIPT)
    directory.mkdir()
    if ending == "kill":
        done = forked.run(program, directory, ending)
    else:  # the interpreter itself ends
        command = [sys.executable, str(program), str(directory), ending]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == {"exit": 0, "exception": 1, "kill": -signal.SIGKILL}[ending], done.stderr
    if ending == "exception":
        assert done.stderr.rstrip().endswith("ZeroDivisionError: oops")
    if ending == "exit":
        assert "Traceback" not in done.stderr
    assert list(directory.iterdir()) == []


def test_a_model_that_is_forgotten_gives_its_disk_space_back(tmp_path: Path) -> None:
    """While the process lives on: no descriptor into the home directory stays open."""

    def descriptors() -> list[str]:
        links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        return [os.readlink(link) for link in links if os.path.islink(link)]

    def train() -> None:
        model, compiled = compile_small_on(tmp_path)
        train_steps(compiled, adamw(model.parameters()), range(1))
        assert any(str(tmp_path) in path for path in descriptors())

    train()
    torch._dynamo.reset()
    gc.collect()
    assert not [path for path in descriptors() if str(tmp_path) in path]


def compile_small_on(directory: Path) -> tuple[nn.Module, nn.Module]:
    budget = small_budget()
    return compile_case(CASE, memory_budget=budget, home=f"disk:{directory}", whole_graph="never")
