"""Facts about hardware (`bench/gpu_facts.py`) on the GPU made of RAM: each runs to its end and compares values."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "bench/gpu_facts.py")
RUN = [sys.executable, str(Path(__file__).with_name("run.py"))]


def facts(path: Path, *arguments: str, arithmetic: bool, choices: str = "") -> tuple[int, dict[str, dict[str, Any]]]:
    """The exit code, and facts by name."""
    mode = ["--arithmetic"] if arithmetic else []
    command = [*RUN, *mode, "--set", choices, sys.executable, SCRIPT, "--small", "--time-limit", "400"]
    done = subprocess.run([*command, "--out", str(path), *arguments], capture_output=True, text=True, timeout=500)
    content = json.loads(path.read_text())
    assert content["is_complete"], done.stderr
    return done.returncode, {fact["name"]: fact for fact in content["facts"]}


@pytest.mark.arithmetic
def test_every_fact_is_found(tmp_path: Path) -> None:
    code, found = facts(tmp_path / "facts.json", arithmetic=True, choices="attribute.88=1")
    failed = {name: fact["problem"] for name, fact in found.items() if fact["status"] == "FAIL"}
    assert not failed
    assert code == 0
    assert "processes" not in found, "an import has asked CUDA for devices"
    listed = subprocess.run([sys.executable, SCRIPT, "--list"], capture_output=True, text=True, check=True)
    prefixes = {"host": "memory", "attention-flash": "attention-flash-backward"}
    prefixes["attention-efficient"] = "attention-efficient-backward"
    assert {prefixes.get(name, name) for name in listed.stdout.split()} <= set(found)
    assert found["attention-cudnn"]["problem"] == "there is no cuDNN here, or it is switched off"
    assert found["pageable-memory"]["status"] == "PASS"
    assert found["cublas"]["figures"]["forward_nbytes"] > 0
    assert found["copies-home"]["figures"]["to_home_gb_per_s"] > 0
    assert found["exit-with-pinned-memory"]["figures"]["exit_s"] < 5


@pytest.mark.arithmetic
def test_values_that_are_wrong_are_seen(tmp_path: Path) -> None:
    """A device whose kernels do nothing: copies are right, and whatever computes is not."""
    groups = ["device", "view-read", "view-write", "view-triton", "copies-home", "view-from-device"]
    code, found = facts(tmp_path / "facts.json", "--only", *groups, arithmetic=False)
    assert code == 1
    assert {name for name, fact in found.items() if fact["status"] == "FAIL"} == {
        "view-read",
        "view-write",
        "view-triton",
    }
    assert found["copies-home"]["status"] == found["view-from-device"]["status"] == "PASS"


@pytest.mark.arithmetic
@pytest.mark.parametrize(
    ("choices", "failing"),
    [
        ("attribute.91=0", {"attributes", "view-read"}),
        ("fail_launch=1", {"view-read"}),
        ("pinnable=1000", {"view-read", "copies-home", "register-1"}),
    ],
)
def test_what_a_device_cannot_do_is_a_line(choices: str, failing: set[str], tmp_path: Path) -> None:
    groups = ["device", "view-read", "copies-home", "register-1", "host"]
    code, found = facts(tmp_path / "facts.json", "--only", *groups, arithmetic=True, choices=choices)
    assert code == 1
    assert failing <= {name for name, fact in found.items() if fact["status"] == "FAIL"}
    assert found["loopback"]["status"] == "PASS"
