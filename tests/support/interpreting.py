"""Triton interpreted on the CPU, in a process of its own: whether Triton interprets is decided when it is imported.

One such process runs the cases of all scripts, one after the other: importing PyTorch takes longer than most.
A script is a file with a function `interpreted(name)`, which runs a case; it finds the modules of `tests/support`, too.
As a script this file is that process: it reads a line of JSON for each case, with file and name, and answers with one:
what the case returned, why it failed or "", and the processor seconds that the process has taken since the last answer.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import forked
import pytest
import torch

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
_needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

_process: subprocess.Popen[str] | None = None


def needs_gpu(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.gpu(pytest.mark.arithmetic(_needs_cuda(test)))


def interpret(script: str | Path, name: str = "") -> Any:
    """Return what the script's `interpreted(name)` returns where Triton is interpreted.

    Raises:
        AssertionError: it has failed; with the traceback.
    """
    global _process
    if _process is None:
        helpers = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": helpers}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        _process = subprocess.Popen([sys.executable, "-W", "ignore", __file__], env=env, text=True, **pipes)
    process = _process
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps([str(script), name]) + "\n")
        process.stdin.flush()
        found, failure, seconds = json.loads(process.stdout.readline())
    except BaseException:  # such as pytest's time limit
        _process = None
        process.kill()
        raise
    forked.processor_seconds += seconds
    assert not failure, failure
    return found


@cache
def _imported(script: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(script).stem, script)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    before_s = 0.0
    for line in sys.stdin:
        found, failure = None, ""
        try:
            script, name = json.loads(line)
            with contextlib.redirect_stdout(sys.stderr):
                found = _imported(script).interpreted(name)
        except Exception:
            failure = traceback.format_exc()
        now_s = time.process_time()
        print(json.dumps([found, failure, now_s - before_s]), flush=True)
        before_s = now_s


if __name__ == "__main__":
    main()
