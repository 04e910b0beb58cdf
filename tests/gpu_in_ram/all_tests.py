"""What `make test-cuda` runs, three commands, each to its end; where all are green, `last_green.json` says so, with an
entry for each version of PyTorch.

    python tests/gpu_in_ram/all_tests.py [ARGUMENTS OF PYTEST...]

With arguments, which may pick some of the tests, nothing is recorded; nor where the checkout differs from its commit.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

HERE = Path(__file__).resolve().parent
RECORD = HERE / "last_green.json"

_READS_FILES = 88  # CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS
_OF_A_GPU = ["tests/gpu", "tests/runtime/device/test_gpu.py", "tests/kernels"]

COMMANDS: dict[str, tuple[list[str], list[str]]] = {
    "memory, with kernels that do nothing": ([], ["tests/gpu_in_ram"]),
    "tests of a GPU": (["--set", f"attribute.{_READS_FILES}=1"], [*_OF_A_GPU, "-m", "gpu"]),
    "values, with kernels that compute": (
        ["--arithmetic"],
        ["tests/gpu_in_ram", *_OF_A_GPU, "-m", "arithmetic or memory_and_values"],
    ),
}
"""How `run.py` starts each, and which tests."""

RECORDED = ("torch", "triton", "numpy", "transformers")
"""Packages of which the record says the version."""

_NOTHING_COLLECTED = 5  # pytest's exit code


def main(arguments: Sequence[str]) -> int:
    began_s, passed, failed = time.monotonic(), {}, []
    for name, (mode, tests) in COMMANDS.items():
        with tempfile.TemporaryDirectory() as folder:
            code, results = run(mode, tests, arguments, Path(folder) / "results.xml")
            if code == 0:
                passed[name] = num_passed(results)
        if code and not (arguments and code == _NOTHING_COLLECTED):
            failed.append(f"{name}: exit code {code}")
    seconds = time.monotonic() - began_s
    print(f"make test-cuda: {sum(passed.values())} tests passed in {seconds:.0f} s; {'; '.join(failed) or 'all green'}")
    if not failed and not arguments:
        record(passed, seconds)
    return len(failed)


def run(mode: Sequence[str], tests: Sequence[str], arguments: Sequence[str], results: Path) -> tuple[int, Path]:
    """pytest on the device, by two workers; its exit code, and the results that it wrote."""
    patience = "--timeout=1800"  # kernels are computed on a CPU: beside other work the ladder's take minutes
    options = ["-n", "2", "--dist", "worksteal", patience, f"--junitxml={results}"]
    pytest = [sys.executable, "-m", "pytest", *tests, *options]
    command = [sys.executable, str(HERE / "run.py"), *mode, *pytest, *arguments]
    return subprocess.run(command, cwd=HERE.parents[1]).returncode, results


def num_passed(results: Path) -> int:
    """Tests that have run and passed."""
    suites = ElementTree.parse(results).getroot().iter("testsuite")
    return sum(
        int(suite.get("tests", 0)) - sum(int(suite.get(kind, 0)) for kind in ("skipped", "failures", "errors"))
        for suite in suites
    )


def record(passed: dict[str, int], seconds: float) -> None:
    """Note under PyTorch's version that all was green at this commit, if it is this commit that has run."""
    if changed := git("status", "--porcelain", "--untracked-files=no", "--", ":/", f":!{RECORD.name}"):
        print(f"not recorded, as the checkout differs from its commit:\n{changed}")
        return
    versions = {name: version(name) for name in RECORDED}
    entries: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    entries[".".join(versions["torch"].split(".")[:2])] = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": git("rev-parse", "HEAD"),
        "versions": {"python": ".".join(map(str, sys.version_info[:3])), **versions},
        "seconds": round(seconds),
        "passed": passed,
    }
    RECORD.write_text(json.dumps(entries, indent=2, sort_keys=True) + "\n")
    print(f"recorded in {RECORD.relative_to(HERE.parents[1])}: commit it")


def git(*arguments: str) -> str:
    command = ["git", "-C", str(HERE), *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
