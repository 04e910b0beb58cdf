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


def test_the_end_of_a_process_is_a_fact(tmp_path: Path):
    found = list(run_group(group(good, exit_name="exit"), 5.0))
    assert [fact.name for fact in found] == ["good", "exit"]
    assert 0 <= found[1].figures["exit_s"] < 5


def test_groups_behind_the_limit_are_named():
    report = gpu_facts.Report(None)
    assert not gpu_facts.run([group(hanging), group(good)], report, 1.5, small=True, prepare=lambda: True)
    assert [(fact.status, fact.name) for fact in report.facts] == [
        ("INFO", "before-hanging"),
        ("FAIL", "hanging"),
        ("INFO", "good"),
    ]
    assert "time is over" in report.facts[-1].problem


def test_what_an_interpreter_of_its_own_did_not_survive_is_not_imported_here():
    report = gpu_facts.Report(None)
    wanted = [Group("unknown", good, cold=True, needs_device=False), group(good)]
    assert gpu_facts.run(wanted, report, 30.0, small=True, prepare=lambda: pytest.fail("imported"))
    assert [(fact.status, fact.name) for fact in report.facts] == [("FAIL", "unknown"), ("FAIL", "good")]


def test_children_import_anew_where_forks_cannot_use_cuda():
    report = gpu_facts.Report(None)
    gpu_facts.run([group(good)], report, 30.0, small=True, prepare=lambda: False)
    assert [(fact.status, fact.name) for fact in report.facts] == [("INFO", "processes"), ("FAIL", "good")]


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


@pytest.mark.second_tier
def test_packages_are_imported_by_an_interpreter_of_their_own(tmp_path: Path):
    path = tmp_path / "facts.json"
    subprocess.run(
        [*COMMAND, "--only", "imports", "--out", str(path), "--time-limit", "250"],
        capture_output=True,
        timeout=300,
        check=False,
    )
    found = {fact["name"]: fact for fact in json.loads(path.read_text())["facts"]}
    assert found["imports"]["figures"]["torch"].startswith("2.")
    assert found["imports-chunkc"]["status"] == "PASS"


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


def nvml(*processes: tuple[int, int | None], fails_at: str = "") -> tuple[SimpleNamespace, list[str]]:
    """What stands for `pynvml`, and the calls it got."""
    calls: list[str] = []

    def call(name: str, result: object = None):
        def called(*arguments: object) -> object:
            calls.append(name)
            if name == fails_at:
                raise NVMLError(name)
            return result

        return called

    running = [SimpleNamespace(pid=pid, usedGpuMemory=nbytes) for pid, nbytes in processes]
    names = {"nvmlInit": None, "nvmlShutdown": None, "nvmlDeviceGetHandleByIndex": "gpu"}
    found = {name: call(name, result) for name, result in names.items()}
    found["nvmlDeviceGetComputeRunningProcesses"] = call("nvmlDeviceGetComputeRunningProcesses", running)
    return SimpleNamespace(NVMLError=NVMLError, **found), calls


def test_the_process_s_own_bytes_among_others():
    library, calls = nvml((1, 10), (2, 20))
    assert gpu_process_memory.process_nbytes(2, library) == 20
    assert calls[0] == "nvmlInit"
    assert calls[-1] == "nvmlShutdown"


def test_in_a_container_a_single_process_is_the_one_that_asks():
    assert gpu_process_memory.process_nbytes(7, nvml((4711, 30))[0]) == 30


@pytest.mark.parametrize("processes", [(), ((1, 10), (2, 20)), ((7, None),)])
def test_what_the_driver_does_not_tell(processes: tuple[tuple[int, int | None], ...]):
    assert gpu_process_memory.process_nbytes(7, nvml(*processes)[0]) is None


@pytest.mark.parametrize("name", ["nvmlInit", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetComputeRunningProcesses"])
def test_a_driver_that_is_not_there(name: str):
    library, calls = nvml((7, 1), fails_at=name)
    assert gpu_process_memory.process_nbytes(7, library) is None
    assert (calls[-1] == "nvmlShutdown") == (name != "nvmlInit")
