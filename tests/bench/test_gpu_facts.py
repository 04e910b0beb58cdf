"""Facts about hardware: what goes wrong in one child costs one line, and what was had stays. Without a device. The
driver's count of a process's memory, by a stand-in for NVML.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import gpu_facts
import pytest
from gpu import process_memory as gpu_process_memory
from gpu.fact_processes import Fact, Group, info, judged, run_group

COMMAND = [sys.executable, str(gpu_facts.__file__)]


def good() -> Iterator[Fact]:
    yield judged(True, "good", "", seconds=0.25)


def segfaulting() -> Iterator[Fact]:
    yield info("before", num=1)
    ctypes.string_at(0)


def hanging() -> Iterator[Fact]:
    yield info("before-hanging")
    time.sleep(1000)


def raising() -> Iterator[Fact]:
    print("something to read")
    raise RuntimeError("CUDA error: an illegal memory access\nmore of it")
    yield


def leaving() -> Iterator[Fact]:
    os._exit(3)
    yield


def deaf() -> Iterator[Fact]:
    """Starts a child that keeps the pipe open, and hangs with it."""
    if os.fork() == 0:
        time.sleep(1000)
    yield judged(False, "deaf", "as planted")


def group(find, **choices) -> Group:
    return Group(find.__name__, find, **{"limit_s": 10.0, "needs_device": False, **choices})


def test_what_goes_wrong_costs_one_line_and_the_rest_still_comes(tmp_path: Path, capsys: pytest.CaptureFixture):
    path = tmp_path / "facts.json"
    report = gpu_facts.Report(path)
    wanted = [group(segfaulting), group(hanging, limit_s=0.7), group(raising), group(leaving), group(good)]
    for one in wanted:
        for fact in run_group(one, one.limit_s):
            report.add(fact)
            assert json.loads(path.read_text())["facts"][-1]["name"] == fact.name
    found = [(fact.status, fact.name) for fact in report.facts]
    assert found == [
        ("INFO", "before"),
        ("FAIL", "segfaulting"),
        ("INFO", "before-hanging"),
        ("FAIL", "hanging"),
        ("FAIL", "raising"),
        ("FAIL", "leaving"),
        ("PASS", "good"),
    ]
    problems = {fact.name: fact.problem for fact in report.facts}
    assert "SIGSEGV" in problems["segfaulting"]
    assert "in segfaulting" in problems["segfaulting"]
    assert "no end within its limit" in problems["hanging"]
    assert "in hanging" in problems["hanging"]
    assert problems["raising"] == "RuntimeError: CUDA error: an illegal memory access"
    assert "code 3" in problems["leaving"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2] == "PASS good seconds=0.25"
    assert [json.loads(line)["name"] for line in lines[1::2]] == [name for _, name in found]


def test_what_a_child_started_goes_with_it():
    begin_s = time.monotonic()
    found = list(run_group(group(deaf), 5.0))
    assert [fact.status for fact in found] == ["FAIL"]
    assert time.monotonic() - begin_s < 4


@pytest.mark.second_tier
def test_on_a_machine_without_a_device(tmp_path: Path):
    """Facts about the host and the packages, and no failure; those of a device say that there is none."""
    path = tmp_path / "new" / "facts.json"
    environment = dict(os.environ, CUDA_VISIBLE_DEVICES="")
    wanted = ["--small", "--only", "host", "device", "view-*", "--out", str(path), "--time-limit", "250"]
    done = subprocess.run([*COMMAND, *wanted], env=environment, capture_output=True, text=True, timeout=300)
    content = json.loads(path.read_text())
    assert content["is_complete"]
    statuses = {fact["name"]: fact["status"] for fact in content["facts"]}
    assert {"machine", "memory", "pages", "locking", "loopback"} <= set(statuses)
    if statuses["device"] == "PASS":
        assert statuses["view-read"] == "INFO"
    assert done.returncode == int("FAIL" in statuses.values()), done.stdout + done.stderr
    assert not [other for other in path.parent.iterdir() if other != path]


def test_a_kill_leaves_what_was_had_and_no_child(tmp_path: Path):
    path = tmp_path / "facts.json"
    with subprocess.Popen([*COMMAND, "--small", "--out", str(path)], stdout=subprocess.PIPE, text=True) as process:
        while not path.exists():
            time.sleep(0.01)
        time.sleep(0.5)
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.send_signal(signal.SIGKILL)
    assert json.loads(path.read_text())["is_complete"] is False
    deadline_s = time.monotonic() + 5
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not Path(f"/proc/{child}").exists()


class NVMLError(Exception):
    pass


def nvml(*processes: tuple[int, int | None]) -> tuple[SimpleNamespace, list[str]]:
    """What stands for `pynvml`, and the calls it got."""
    calls: list[str] = []

    def call(name: str, result: object = None):
        def called(*arguments: object) -> object:
            calls.append(name)
            return result

        return called

    running = [SimpleNamespace(pid=pid, usedGpuMemory=nbytes) for pid, nbytes in processes]
    names = {"nvmlInit": None, "nvmlShutdown": None, "nvmlDeviceGetHandleByIndex": "gpu"}
    found = {name: call(name, result) for name, result in names.items()}
    found["nvmlDeviceGetComputeRunningProcesses"] = call("nvmlDeviceGetComputeRunningProcesses", running)
    return SimpleNamespace(NVMLError=NVMLError, **found), calls


@pytest.mark.parametrize(
    ("pid", "processes", "expected"),
    [
        (2, [(1, 10), (2, 20)], 20),
        (7, [(4711, 30)], 30),  # in a container, the only one is the one that asks
        (7, [], None),
        (7, [(1, 10), (2, 20)], None),
        (7, [(7, None)], None),
    ],
)
def test_a_process_s_own_bytes(pid: int, processes: list[tuple[int, int | None]], expected: int | None):
    library, calls = nvml(*processes)
    assert gpu_process_memory.process_nbytes(pid, library) == expected
    assert (calls[0], calls[-1]) == ("nvmlInit", "nvmlShutdown")
