"""The command as a process: its exit code, and what its streams get, also from the interpreter's own end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from chunkc.cli import command as cli

FILE = """
import torch
from torch import nn

def build():
    print("loading")
    return nn.Linear(64, 1), (torch.ones(4, 64),)
"""

SCRIPT = """
import json, os, runpy, sys
import chunkc.cli.command  # once: each command is run by a copy of this process, to the copy's end

codes = {}
for stdout in sys.argv[1:]:
    if (copy := os.fork()) == 0:
        if stdout == "left":
            reader, writer = os.pipe()
            os.close(reader)
        else:
            writer = os.open(stdout, os.O_WRONLY | os.O_CREAT)
        os.dup2(writer, 1)
        os.dup2(os.open(os.path.basename(stdout) + ".err", os.O_WRONLY | os.O_CREAT), 2)
        sys.argv[1:] = ["explain", "train.py:build", "--memory-budget", "1MiB"]
        runpy.run_module("chunkc", run_name="__main__", alter_sys=True)
    codes[stdout] = os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1])
print(json.dumps(codes))
"""


@pytest.mark.second_tier
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is full")
def test_the_answer_a_full_disk_and_a_reader_that_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer goes to the output, and nothing else; what cannot be written is said without a traceback."""
    (tmp_path / "train.py").write_text(FILE)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    said = {
        "answer": (cli.FITS, ""),
        "/dev/full": (cli.BAD_INPUT, "chunkc: cannot write the standard output: No space left on device\n"),
        "left": (cli.READER_LEFT, ""),
    }
    command = [sys.executable, "-P", "-c", SCRIPT, *said]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    errors = {name: (tmp_path / f"{Path(name).name}.err").read_text() for name in said}
    codes = json.loads(done.stdout)
    assert {name: (codes[name], errors[name]) for name in said} == {
        name: (code, f"loading\n{error}") for name, (code, error) in said.items()
    }
    assert "fits, with" in (tmp_path / "answer").read_text()
