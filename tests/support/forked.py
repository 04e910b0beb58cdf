"""Run Python programs that import chunkc in a fraction of a second each.

Importing PyTorch takes longer than most of them. They are forked from one process, `fork_server`, which starts with the
first of them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

SERVER = Path(__file__).with_name("fork_server.py")

processor_seconds = 0.0
"""What all programs took so far, with the processes that each has waited for: they are no children of this process."""

_server: subprocess.Popen[str] | None = None


def run(
    program: Path | str,
    *arguments: object,
    folder: Path | None = None,
    environment: Mapping[str, str] = os.environ,
    starts: Sequence[str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `python PROGRAM ARGUMENTS` in `folder`. An interrupt ends whatever this started.

    Args:
        program: a file, or "-m" with a module as the first argument.
        starts: of a program that starts others by `sys.executable`, such as ranks, which then are forks, too: modules
            that all of them have imported.
    """
    global _server, processor_seconds
    if _server is None:
        command = [sys.executable, "-P", str(SERVER)]  # tests are on no path
        _server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
    server, child = _server, None
    assert server.stdin is not None
    assert server.stdout is not None
    words = [str(program), *map(str, arguments)]
    with tempfile.TemporaryDirectory() as found:
        outputs = [Path(found) / name for name in ("output", "errors")]
        request = {
            "arguments": words,
            "folder": str(folder or Path.cwd()),
            "environment": dict(environment),
            "outputs": [str(path) for path in outputs],
            "imports": None if starts is None else list(starts),
        }
        try:
            server.stdin.write(json.dumps(request) + "\n")
            server.stdin.flush()
            child = int(server.stdout.readline())
            status, seconds = server.stdout.readline().split()
        except BaseException:  # such as pytest's time limit
            _server = None
            server.kill()
            if child is not None:
                os.killpg(child, signal.SIGKILL)
            raise
        processor_seconds += float(seconds)
        return subprocess.CompletedProcess(words, int(status), *[path.read_text() for path in outputs])
