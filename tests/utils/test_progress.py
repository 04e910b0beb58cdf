"""The line that compilations show on a terminal: after two seconds, with what is being done, and gone in the end."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from rich.console import Console

from chunkc.utils.progress import compilation_progress

SCRIPT = """
import sys
import torch
import chunkc
import chunkc.utils.progress
chunkc.utils.progress.DELAY_S = float(sys.argv[1])
model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(30)])
compiled = torch.compile(model, backend="chunkc", options={"memory_budget": "1GiB", "codegen": "eager"})
compiled(torch.ones(2, 8)).sum().backward()
print("trained")
"""


def read_until_closed(terminal: int) -> str:
    """What was written to a pseudo-terminal whose other end is closed."""
    found = b""
    while True:
        try:
            data = os.read(terminal, 65536)
        except OSError:  # nobody has the other end open
            data = b""
        if not data:
            return found.decode()
        found += data


def test_a_short_compilation_shows_nothing() -> None:
    terminal, end = pty.openpty()
    with os.fdopen(end, "w") as file:
        console = Console(file=file)
        assert console.is_terminal
        with compilation_progress(console) as show:
            show("tracing", 0, None)
    assert read_until_closed(terminal) == ""
    os.close(terminal)


def test_a_long_one_shows_what_it_does_and_erases_it() -> None:
    terminal, end = pty.openpty()
    with os.fdopen(end, "w") as file:
        console = Console(file=file, width=80)
        with compilation_progress(console, delay_s=0.0) as show:
            show("compiling segments", 3, 9)
            time.sleep(0.5)
    written = read_until_closed(terminal)
    os.close(terminal)
    assert "chunkc: compiling segments" in written
    assert written.endswith(("\x1b[2K", "\x1b[1A\x1b[2K"))


def test_only_the_first_process_of_a_run_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    terminal, end = pty.openpty()
    with os.fdopen(end, "w") as file, compilation_progress(Console(file=file), delay_s=0.0) as show:
        show("tracing", 0, None)
        time.sleep(0.3)
    assert read_until_closed(terminal) == ""
    os.close(terminal)


def test_an_error_takes_the_line_away() -> None:
    terminal, end = pty.openpty()
    file = os.fdopen(end, "w")
    with suppress(KeyboardInterrupt), file, compilation_progress(Console(file=file), delay_s=0.0):
        time.sleep(0.3)
        raise KeyboardInterrupt
    assert read_until_closed(terminal).endswith("\x1b[2K")
    os.close(terminal)


@pytest.mark.second_tier
def test_training_shows_it_on_a_terminal(tmp_path: Path) -> None:
    terminal, end = pty.openpty()
    command = [sys.executable, "-P", "-c", SCRIPT, "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=end, env={**os.environ, "TERM": "xterm"}) as process:
        os.close(end)
        written = read_until_closed(terminal)
        assert process.stdout is not None
        assert process.stdout.read() == b"trained\n"
    os.close(terminal)
    assert process.returncode == 0
    assert "chunkc: " in written


@pytest.mark.slow
def test_training_shows_nothing_elsewhere() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", SCRIPT, "0"], capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"trained\n", b"")
