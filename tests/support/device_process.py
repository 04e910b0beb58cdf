"""Runs a script on a device that was chosen at its start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def on_a_device(choices: str, script: str, **variables: str) -> str:
    """Run a script in a process of its own, on a device of these choices; return what it prints."""
    here = Path(__file__).parent
    run = here.parent / "gpu_in_ram" / "run.py"
    command = [sys.executable, str(run), "--set", choices, sys.executable, "-c", script]
    paths = os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")])
    kept = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
    environment = {**kept, "PYTHONPATH": paths, **variables}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert found.returncode == 0, found.stderr[-3000:]
    return found.stdout
