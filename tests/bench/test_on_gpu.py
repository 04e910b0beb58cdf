"""The script for a machine with a GPU, on one without: it rehearses, keeps its time, and always ends with a table."""

import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STEPS = {
    "first": ["environment", "facts", "gpu", "kernels", "training", "adam", "scratch", "sanitizer"],
    "second": ["environment", "promise", "flash", "cudnn"],
    "third": ["environment", "peers", "memcheck", "ranks", "files"],
}


def _run(out: Path, *arguments: str, **variables: str) -> tuple[str, dict[str, dict[str, object]]]:
    """What the finished script printed, and its steps by name."""
    environment = dict(os.environ, OUT=str(out), PYTHON=sys.executable, CUDA_VISIBLE_DEVICES="", **variables)
    command = [str(ROOT / "bench/on_gpu.sh"), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    content = json.loads((out / f"{arguments[0]}.json").read_text())
    return done.stdout, {step["name"]: step for step in content["steps"]}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("call", STEPS)
def test_it_ends_in_time_with_a_table(tmp_path: Path, call: str):
    start_s = time.monotonic()
    printed, steps = _run(tmp_path, call, "25")
    assert time.monotonic() - start_s < 25 + 20
    assert "device: cpu" in printed
    assert list(steps) == STEPS[call]
    assert steps["environment"]["code"] in (0, 124)
    assert printed.rstrip().splitlines()[-1].startswith("total")
    names = {path.name for path in tmp_path.iterdir()}
    assert names <= {"facts.json", f"{call}.json", f"{call}.log", f"{call}.md"}


@pytest.mark.parametrize("arguments", [[], ["soon"], ["540", "first"]])
def test_a_call_that_there_is_not(arguments: list[str]):
    done = subprocess.run([str(ROOT / "bench/on_gpu.sh"), *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: ")


@pytest.mark.second_tier
def test_wheels_are_installed_and_what_is_too_old_ends_it(tmp_path: Path):
    """A wheel of an old pydantic: found before the installed one, and reported; nothing but facts is begun."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    info = "pydantic-1.0.dist-info"
    with zipfile.ZipFile(wheels / "pydantic-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("pydantic/__init__.py", "")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: pydantic\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    out = tmp_path / "out"
    _, steps = _run(out, "second", "200", WHEELS=str(wheels))
    assert steps["environment"]["code"] == 1
    assert "needed here: pydantic>=2 is 1.0 there" in (out / "second.log").read_text()
    assert all(steps[name]["code"] is None for name in STEPS["second"][1:])
