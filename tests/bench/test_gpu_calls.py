"""The calls for a lent GPU: each step within its time, whatever it does; what there is, is on disk at any moment."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import report
import run
from gpu import calls as gpu_calls
from gpu.calls import CUT_SHORT, Machine, Results, Runner, Step

ROOT = Path(__file__).parents[2]
REAL = gpu_calls.calls(Machine("cuda", is_small=False, has_xdist=True))

SUITE = {
    **{"suite": "fits", "is_small": True, "is_complete": False, "sections": [], "date": "2026-01-01"},
    "hardware": {"cpu": "one", "num_cores": 1, "ram_nbytes": 2**30},
    "versions": {"python": "3", "torch": "2", "commit": None, "has_changes": False},
}


def _code(name: str, text: str, share_s: float = 60.0, **more: Any) -> Step:
    return Step(name, share_s, ("-c", textwrap.dedent(text), "@out", "@limit"), **more)


def _runner(folder: Path, seconds: float = 60.0, **broken: str) -> Runner:
    suites = folder / "suites"
    suites.mkdir(parents=True)
    results = Results(folder / "first.json", "first", suites)
    environment = {**os.environ, "PYTHON": sys.executable}
    end_s = time.monotonic() + seconds
    return Runner(folder, suites, end_s, 1.0, environment, folder / "facts.json", results, folder / "first.log", broken)


def _written(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "first.json").read_text())


WRITES = f"""
    import json, os, pathlib, sys
    path = pathlib.Path(sys.argv[1])
    path.with_suffix(".fresh").write_text(json.dumps({SUITE!r}))  # as suites do: the file is whole at any moment
    os.replace(path.with_suffix(".fresh"), path)
    print("has written", sys.argv[2])
"""
LIVES = "import time\ntry:\n    print('alive', flush=True)\n    time.sleep(600)"


def _clock_from_first_output(log: Path, names: Sequence[str]) -> Callable[[], float]:
    """Return a clock that stands still until the running step, if it has one of these names, has printed "alive"."""
    last_s = now_s = time.monotonic()

    def clock() -> float:
        nonlocal last_s, now_s
        step = log.read_text().rpartition("== ")[2] if log.exists() else ""
        before_s, last_s = last_s, time.monotonic()
        if "alive" in step or step.partition(" (")[0] not in names:
            now_s += last_s - before_s
        return now_s

    return clock


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("LEAST_S", 0.1), ("BREAK_S", 1.5), ("_LOOK_S", 0.05)):
        monkeypatch.setattr(gpu_calls, name, seconds)


@pytest.fixture
def in_the_background() -> Iterator[None]:
    """Ignore SIGINT, as in a job that a shell starts with `&`; child processes inherit that."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.second_tier
@pytest.mark.usefixtures("in_the_background")
def test_steps_end_each_in_their_own_way_and_the_others_come_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ignoring = """
        import signal, subprocess, sys, time
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print("child", child.pid, flush=True)
        time.sleep(600)
    """
    # A step is interrupted when a quarter of its time is left. Its time is counted from its first output: an interrupt
    # before Python has started would end it in another way.
    log_path = tmp_path / "first.log"
    clock = _clock_from_first_output(log_path, ("listens", "done all the same"))
    monkeypatch.setattr(gpu_calls, "time", SimpleNamespace(**vars(time) | {"monotonic": clock}))
    steps = [
        _code("fails", "raise SystemExit(3)"),
        _code("crashes", "import os; os.abort()"),
        _code("hangs", ignoring, 3.0),
        _code("listens", f"{LIVES}\nfinally: print('its summary')", 12.0),
        _code("done all the same", f"{LIVES}\nexcept KeyboardInterrupt: pass", 12.0),
        _code("absent", "", tool=("no-such-tool",)),
        _code("writes", WRITES),
    ]
    runner = _runner(tmp_path, 120.0)
    begin_s = clock()
    gpu_calls.run_call(runner, steps)
    assert clock() - begin_s < 90
    codes = {done.name: done.code for done in runner.results.steps}
    assert codes == {
        **{"fails": 3, "crashes": -signal.SIGABRT, "hangs": CUT_SHORT, "listens": CUT_SHORT, "absent": None},
        **{"done all the same": 0, "writes": 0},
    }
    log = log_path.read_text()
    assert "its summary" in log
    pid = int(re.search(r"child (\d+)", log)[1])  # type: ignore[index]
    assert not Path(f"/proc/{pid}").exists() or "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    limit_s, own_s = re.search(r"writes \(at most (\d+) s\)\nhas written (\d+)", log).groups()  # type: ignore[union-attr]
    assert abs(int(limit_s) - gpu_calls.STACKS_S - int(own_s)) <= 1
    content = _written(tmp_path)
    assert content["suites"]["writes"]["suite"] == "fits"
    assert [step["code"] for step in content["steps"]] == list(codes.values())
    assert "| absent | 0 | - | no-such-tool is not installed |" in (tmp_path / "first.md").read_text()
    assert report.main([str(tmp_path / "first.json")]) == 0


_KILLED = """
import sys, pathlib, os, time
sys.path.insert(0, {bench!r})
from gpu import calls as gpu_calls
from gpu.calls import *
gpu_calls._LOOK_S = 0.02
folder = pathlib.Path({folder!r})
(folder / "suites").mkdir(parents=True)
results = Results(folder / "first.json", "first", folder / "suites")
results.write()
grows = '''
import json, os, pathlib, sys, time
suite, path = {suite!r}, pathlib.Path(sys.argv[1])
for number in range(300):  # a few seconds: its session outlives its runner
    suite["date"] = str(number) * 20000
    path.with_suffix(".fresh").write_text(json.dumps(suite))
    os.replace(path.with_suffix(".fresh"), path)
    time.sleep(0.01)
'''
step = Step("grows", 60.0, ("-c", grows, "@out"))
environment = dict(os.environ, PYTHON=sys.executable)
end_s = time.monotonic() + 60
runner = Runner(folder, folder / "suites", end_s, 1.0, environment, folder / "f", results, folder / "first.log")
print("begun", flush=True)
run_call(runner, [step])
"""


@pytest.mark.second_tier
@pytest.mark.parametrize("seconds", [0.3, 1.6])
def test_killed_at_any_second_it_leaves_all_that_it_had(tmp_path: Path, seconds: float):
    script = _KILLED.format(bench=str(ROOT / "bench"), folder=str(tmp_path), suite=SUITE)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        time.sleep(seconds)
        process.kill()
    first = _written(tmp_path)
    assert first["call"] == "first"
    if seconds > 1:
        assert first["suites"]["grows"]["suite"] == "fits"


_TOLD_TO_END = """
import sys, pathlib
sys.path.insert(0, {bench!r})
from gpu import calls as gpu_calls
from gpu.calls import *
sleeps = '''
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("group", os.getpgrp(), flush=True)
child.wait()
'''
gpu_calls.calls = lambda machine: {{"first": Call(60, (Step("sleeps", 60.0, ("-c", sleeps)),))}}
gpu_calls.look_at_machine = lambda *_: Machine("cpu", True, False)
gpu_calls.main(["first", "--out", {folder!r}])
"""


@pytest.mark.second_tier
def test_a_call_that_is_told_to_end_takes_its_step_with_it(tmp_path: Path):
    script = _TOLD_TO_END.format(bench=str(ROOT / "bench"), folder=str(tmp_path))
    log = tmp_path / "first.log"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        while not (group := log.exists() and re.search(r"group (\d+)\n", log.read_text())):
            assert process.poll() is None
            time.sleep(0.05)
        process.terminate()
        process.wait(20)
    assert process.returncode == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):  # the step's group, its leader and what that started
        _wait_for_no_group(int(group[1]))
    assert _written(tmp_path)["call"] == "first"


def _wait_for_no_group(leader: int) -> None:
    for _ in range(100):
        os.killpg(leader, 0)
        time.sleep(0.1)


def test_every_test_of_a_gpu_is_run_by_a_call():
    """All files that have such tests; those with files in place in the third call alone, and last."""
    files = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"mark\.gpu\b|@needs_gpu\b", path.read_text()) and path.parent.name not in ("bench", "gpu_in_ram")
    }
    assert len(files) >= 8
    for call, names in (("first", files), ("third", {"tests/runtime/device/test_gpu.py", "tests/gpu/test_train.py"})):
        words = {
            word for step in REAL[call].steps if not step.tool for word in step.command if word.startswith("tests")
        }
        assert all((ROOT / word).exists() for word in words)
        assert names == {name for name in files if any(name == w or name.startswith(f"{w}/") for w in words)}
    assert "gpu and files_in_place" in REAL["third"].steps[-1].command


def test_calls_are_made_of_things_that_are_there():
    for name, seconds in (("first", 540), ("second", 560), ("third", 460)):
        call = REAL[name]
        assert call.seconds == seconds
        assert call.steps[0].is_needed
        assert sum(step.share_s for step in call.steps[:-1]) <= seconds  # the last one has what is left
        for step in call.steps:
            script, *arguments = step.command
            assert script == "-m" or script == "bench/gpu_facts.py" or (ROOT / script).is_file()
            if script == "bench/run.py":
                places = {"@limit": "9", "@out": "a.json", "@facts": "b.json", "cuda": "cpu"}
                assert run.parse_args([places.get(word, word) for word in arguments]).suites[0] in run.SUITES
    attention = {step.name: step.variables.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") for step in REAL["second"].steps}
    assert attention == {"environment": None, "promise": "1", "flash": "1", "cudnn": None}
