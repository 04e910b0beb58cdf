"""The script for a machine with a GPU, on one without: it rehearses, keeps its time, and always ends with a table."""

import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STEPS = [
    "environment",
    "tests",
    "sanitizer",
    "adam",
    "budget",
    "prediction",
    "fits",
    "scale",
    "peers",
    "bound",
    "ranks",
]


def _run(out: Path, *arguments: str, **variables: str) -> tuple[subprocess.CompletedProcess[str], dict[str, list[str]]]:
    """The finished script and its table: name to (seconds, exit code)."""
    environment = dict(os.environ, OUT=str(out), PYTHON=sys.executable, CUDA_VISIBLE_DEVICES="", **variables)
    done = subprocess.run(
        [str(ROOT / "bench/on_gpu.sh"), *arguments], env=environment, capture_output=True, text=True, timeout=300
    )
    lines = (out / "table.txt").read_text().splitlines()
    return done, {words[0]: words[1:] for line in lines if (words := line.split())}


@pytest.mark.second_tier
@pytest.mark.timeout(300)
def test_it_ends_in_time_with_a_table(tmp_path: Path):
    start_s = time.monotonic()
    done, table = _run(tmp_path, "12")
    assert time.monotonic() - start_s < 12 + 20
    assert done.returncode == 0
    assert "device: cpu" in done.stdout
    assert [name for name in table if name not in ("step", "total", "memcheck")] == STEPS
    assert table["scale"] == ["0", "-"]
    assert done.stdout.rstrip().splitlines()[-1].startswith("total")


def test_a_limit_that_is_no_number(tmp_path: Path):
    done, table = _run(tmp_path, "0")
    assert done.returncode == 0
    assert all(table[name][1] == "-" for name in STEPS)
    assert "whole number" in _usage(tmp_path)


def _usage(out: Path) -> str:
    """What it says to a limit that is none; stopped as soon as it has said so."""
    environment = dict(os.environ, OUT=str(out), PYTHON=sys.executable, CUDA_VISIBLE_DEVICES="")
    with subprocess.Popen(
        [str(ROOT / "bench/on_gpu.sh"), "soon"],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        stdout=subprocess.DEVNULL,
    ) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        process.terminate()
    return line


@pytest.mark.second_tier
@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ("first", ["tests", "sanitizer", "adam"]),
        ("second", STEPS[4:7]),
        ("third", ["scale", "peers", "bound", "ranks"]),
    ],
)
def test_a_part_alone(tmp_path: Path, part: str, expected: list[str]):
    _, table = _run(tmp_path, "0", part)
    assert [name for name in table if name not in ("step", "total", "memcheck")] == ["environment", *expected]


def test_wheels_are_installed_and_what_is_too_old_ends_it(tmp_path: Path):
    """A wheel of an old pydantic: found before the installed one, and reported; nothing else is begun."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    info = "pydantic-1.0.dist-info"
    with zipfile.ZipFile(wheels / "pydantic-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("pydantic/__init__.py", "")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: pydantic\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    out = tmp_path / "out"
    _, table = _run(out, "100", WHEELS=str(wheels))
    assert table["environment"][1] == "1"
    assert "needed here: pydantic 2.0 or newer" in (out / "log.txt").read_text()
    assert all(table[name][1] == "-" for name in STEPS if name != "environment")
