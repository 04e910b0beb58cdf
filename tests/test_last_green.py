"""`make test-cuda`: when it was last green, as its record says, and what it takes to be recorded."""

from __future__ import annotations

import json
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
    module = load(ROOT / "tests" / "cuda_in_ram" / "all_tests.py")
    monkeypatch.setattr(module, "RECORD", tmp_path / "last_green.json")
    monkeypatch.setattr(module, "HERE", tmp_path / "tests" / "cuda_in_ram")
    monkeypatch.setattr(module, "version", lambda name: "1")
    return module


@pytest.mark.slow
def test_when_it_was_last_green() -> None:
    """Said as a warning, which the end of a run of tests repeats."""
    path = ROOT / "tests" / "cuda_in_ram" / "last_green.json"
    if not path.exists():
        pytest.skip("`make test-cuda` has not left a record of a green run yet")
    found = json.loads(path.read_text())
    commit = found["commit"]
    git = ["git", "-C", str(ROOT)]
    code = subprocess.run([*git, "merge-base", "--is-ancestor", commit, "HEAD"], stderr=subprocess.DEVNULL).returncode
    if code not in (0, 1):
        pytest.skip(f"{commit}, which was green on {found['date']}, is not in this checkout")
    assert code == 0, f"{commit}, which was green on {found['date']}, is not in this history: run `make test-cuda`"
    behind = subprocess.run([*git, "rev-list", "--count", f"{commit}..HEAD"], capture_output=True, text=True).stdout
    warnings.warn(
        f"make test-cuda was last green on {found['date']}, {behind.strip()} commits ago ({commit[:10]}): "
        f"{sum(found['passed'].values())} tests in {found['seconds'] / 60:.0f} minutes, {found['versions']}",
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
        ([0, 0, 0], [], " M chunkc/graph.py", (0, None)),
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
        found = json.loads(all_tests.RECORD.read_text())
        assert (list(found["passed"].values()), found["commit"]) == (passed, "1234")
