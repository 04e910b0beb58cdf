"""`make test-cuda`: when it was last green, as its record says, and what it takes to be recorded."""

from __future__ import annotations

import json
import os
import subprocess
import warnings
from pathlib import Path
from types import ModuleType

import pytest
from file_modules import load

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def all_tests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """Its own record is elsewhere."""
    module = load(ROOT / "tests" / "gpu_in_ram" / "all_tests.py")
    monkeypatch.setattr(module, "RECORD", tmp_path / "last_green.json")
    monkeypatch.setattr(module, "HERE", tmp_path / "tests" / "gpu_in_ram")
    monkeypatch.setattr(module, "version", {"torch": "2.11.0"}.get)
    return module


RECORD = ROOT / "tests" / "gpu_in_ram" / "last_green.json"


def versions() -> list[str]:
    return sorted(json.loads(RECORD.read_text())) if RECORD.exists() else []


@pytest.mark.slow
@pytest.mark.parametrize("torch_version", versions())
def test_when_it_was_last_green(torch_version: str) -> None:
    """Said as a warning, which the end of a run of tests repeats. Skipped where no green run has left a record."""
    entry = json.loads(RECORD.read_text())[torch_version]
    commit = entry["commit"]
    git = ["git", "-C", str(ROOT)]
    code = subprocess.run([*git, "merge-base", "--is-ancestor", commit, "HEAD"], stderr=subprocess.DEVNULL).returncode
    if code not in (0, 1):
        pytest.skip(f"{commit}, which was green on {entry['date']}, is not in this checkout")
    assert code == 0, f"{commit}, which was green on {entry['date']}, is not in this history: run `make test-cuda`"
    behind = subprocess.run([*git, "rev-list", "--count", f"{commit}..HEAD"], capture_output=True, text=True).stdout
    warnings.warn(
        f"make test-cuda was last green on {entry['date']}, {behind.strip()} commits ago ({commit[:10]}): "
        f"{sum(entry['passed'].values())} tests in {entry['seconds'] / 60:.0f} minutes, {entry['versions']}",
        stacklevel=1,
    )


RESULTS = """<testsuites><testsuite tests="9" skipped="2" failures="{}" errors="0"/></testsuites>"""


@pytest.mark.parametrize(
    ("codes", "arguments", "changed", "expected"),
    [
        ([0, 0, 0], [], "", (0, [7, 7, 7])),
        ([0, 1, 0], [], "", (1, None)),  # goes on to the end
        ([1, 0, 2], [], "", (2, None)),
        ([0, 5, 0], ["-k", "bits"], "", (0, None)),  # some of the tests are not all
        ([0, 5, 0], [], "", (1, None)),
        ([0, 0, 0], [], " M chunkc/session/compiled_step.py", (0, None)),
    ],
)
def test_all_that_is_recorded_was_green(
    all_tests: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    codes: list[int],
    arguments: list[str],
    changed: str,
    expected: tuple[int, list[int] | None],
) -> None:
    left, started = list(codes), []

    def run(mode: list[str], tests: list[str], given: list[str], results: Path) -> tuple[int, Path]:
        started.append((mode, given))
        results.write_text(RESULTS.format(left[0]))
        return left.pop(0), results

    monkeypatch.setattr(all_tests, "run", run)
    monkeypatch.setattr(all_tests, "git", lambda *given: changed if given[0] == "status" else "1234")
    num_failed, passed = expected
    assert all_tests.main(arguments) == num_failed
    assert started == [(mode, arguments) for mode in ([], ["--set", "attribute.88=1"], ["--arithmetic"])]
    assert all_tests.RECORD.exists() == (passed is not None)
    if passed is not None:
        (entry,) = json.loads(all_tests.RECORD.read_text()).items()
        assert (entry[0], list(entry[1]["passed"].values()), entry[1]["commit"]) == ("2.11", passed, "1234")


def test_each_version_of_pytorch_has_an_entry(all_tests: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later run replaces its version's alone."""
    monkeypatch.setattr(all_tests, "git", lambda *given: "" if given[0] == "status" else "1234")
    for torch_version, seconds in (("2.13.0+cu130", 10), ("2.11.0", 20), ("2.13.1", 30)):
        monkeypatch.setattr(all_tests, "version", {"torch": torch_version}.get)
        all_tests.record({"memory": 7}, seconds)
    entries = json.loads(all_tests.RECORD.read_text())
    assert {name: (entry["versions"]["torch"], entry["seconds"]) for name, entry in entries.items()} == {
        "2.11": ("2.11.0", 20),
        "2.13": ("2.13.1", 30),
    }


def dry_run(*variables: str) -> subprocess.CompletedProcess[str]:
    """What `make test-cuda` would do where no environment is up to date."""
    command = ["make", "-n", "-W", "pyproject.toml", "-C", str(ROOT), "test-cuda", *variables]
    above = ("MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS", "CUDA_VENV")  # of a make that runs these tests
    environment = {name: value for name, value in os.environ.items() if name not in above}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


PINNED = {"2.11": ["torch===2.11.0", "triton==3.6.0", "numpy==2.5.2"], "2.13": ["torch===2.13.0", "numpy"]}


@pytest.mark.parametrize(
    ("arguments", "torch_version", "left"),
    [("", "2.13", ""), ("-k bits", "2.13", "-k bits"), ("-x --torch 2.11 -k bits", "2.11", "-x -k bits")],
)
def test_make_takes_the_version_from_its_arguments(arguments: str, torch_version: str, left: str) -> None:
    """An environment for each; pytest gets the other arguments."""
    said = dry_run(f"ARGS={arguments}")
    assert said.returncode == 0, said.stderr
    folder = {"2.13": ".venv-cuda", "2.11": ".venv-cuda-2.11"}[torch_version]
    installed = [line for line in said.stdout.splitlines() if f"{folder}/bin/python -m pip install" in line]
    assert len(installed) == 2
    assert all(set(PINNED[torch_version]) <= set(line.split()) for line in installed)
    assert f"{folder}/bin/python tests/gpu_in_ram/all_tests.py {left}".strip() in map(
        str.strip, said.stdout.splitlines()
    )


def test_make_knows_no_other_version() -> None:
    said = dry_run("ARGS=--torch 2.5")
    assert said.returncode != 0
    assert "no versions are pinned for PyTorch 2.5" in said.stderr
