"""Triton interpreted on the CPU, in a process of its own.

Whether Triton interprets is decided for a whole process, when it is imported. Scripts that are run here find the
modules of `tests/support`, too.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
_needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def needs_gpu(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.gpu(pytest.mark.arithmetic(_needs_cuda(test)))


def _how(script: str | Path, warnings: str) -> dict[str, Any]:
    helpers = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": helpers}
    command = [sys.executable, "-W", warnings, str(script)]
    return {"args": command, "env": env, "stdout": subprocess.PIPE, "text": True}


def printed_by(script: str | Path) -> Any:
    """Run the script and parse the JSON that it prints."""
    return json.loads(subprocess.run(**_how(script, "ignore::RuntimeWarning"), check=True).stdout)


@contextmanager
def asked(script: str | Path, warnings: str = "ignore::RuntimeWarning") -> Iterator[Callable[[str], str]]:
    """Yield a function that runs a case by its name, and returns why it failed, or "".

    The script reads the name, and answers with JSON.
    """
    with subprocess.Popen(**_how(script, warnings), stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        names, answers = process.stdin, process.stdout

        def ask(name: str) -> str:
            names.write(f"{name}\n")
            names.flush()
            return json.loads(answers.readline())

        yield ask
        names.close()


def failure_of(case: Callable[[], object]) -> str:
    """Run a case, and return why it failed, or ""."""
    try:
        case()
    except Exception:
        return traceback.format_exc()
    return ""


def answer(run: Callable[[str], object]) -> None:
    """Answer `asked`: for each name that is read, print a line that says why the case failed."""
    for line in sys.stdin:
        print(json.dumps(failure_of(partial(run, line.strip()))), flush=True)


def failures(cases: Mapping[str, Callable[[], object]]) -> dict[str, str]:
    return {name: failure_of(case) for name, case in cases.items()}
