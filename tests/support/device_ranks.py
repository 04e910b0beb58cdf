"""Runs a script on several ranks, each a process that sees as many devices as there are ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

_SUPPORT = Path(__file__).parent
_RUN = _SUPPORT.parent / "gpu_in_ram" / "run.py"
_LIMIT_S = 240


@dataclass(frozen=True)
class Ended:
    """Exit code and output of a rank."""

    code: int
    said: str
    errors: str


def on_ranks(
    script: str, num_ranks: int = 2, *, choices: str = "late=7", arithmetic: bool = False, **variables: str
) -> list[Ended]:
    """Run a script on ranks until each has ended. They meet at a file of their own, `INIT_METHOD`."""
    computing = ["--arithmetic"] if arithmetic else []
    settings = f"devices={num_ranks},{choices}"
    command = [sys.executable, str(_RUN), *computing, "--set", settings, sys.executable, "-c", script]
    paths = os.pathsep.join([str(_SUPPORT), os.environ.get("PYTHONPATH", "")])
    kept = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
    with tempfile.TemporaryDirectory() as folder:
        shared = {**kept, "PYTHONPATH": paths, "INIT_METHOD": f"file://{folder}/meeting", **variables}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        ranks = [
            {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)} for rank in range(num_ranks)
        ]
        started = [subprocess.Popen(command, env={**shared, **rank}, **pipes) for rank in ranks]  # type: ignore[call-overload]
        try:
            said = [process.communicate(timeout=_LIMIT_S) for process in started]
        finally:
            for process in started:
                process.kill()
    return [Ended(process.returncode, *texts) for process, texts in zip(started, said, strict=True)]


def all_well(ended: list[Ended]) -> list[str]:
    """Return the output of each rank, after a check that none has failed."""
    for rank, one in enumerate(ended):
        assert one.code == 0, f"rank {rank} ended with {one.code}: {one.errors[-3000:]}"
    return [one.said for one in ended]
