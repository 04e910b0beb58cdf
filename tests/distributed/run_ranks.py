"""Cases run by ranks in processes of their own. `conftest.py` registers this file as module `run_ranks`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

CASES = Path(__file__).with_name("rank_cases.py")
TIMEOUT_S = 400


def ranks(folder: Path, *cases: str, num_ranks: int = 2, script: str = CASES.name) -> dict[str, list[dict[str, Any]]]:
    """What each rank of each case came to."""
    command = [sys.executable, str(CASES.with_name(script)), str(folder), str(num_ranks), str(TIMEOUT_S), *cases]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as running:
        try:
            output, errors = running.communicate(timeout=TIMEOUT_S * len(cases) + 60)
        except BaseException:  # also where pytest's own limit ends it: its ranks would go on
            os.killpg(running.pid, signal.SIGKILL)
            raise
    assert running.returncode == 0, errors[-2000:]
    found: dict[str, list[dict[str, Any]]] = json.loads(output)
    return found
