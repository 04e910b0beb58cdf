"""Nothing is left behind: no file, no disk space."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import forked
import pytest

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
