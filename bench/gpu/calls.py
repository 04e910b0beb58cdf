"""Runs one of three calls that spend half an hour of a lent GPU best, step by step, each within its time.

    python bench/gpu/calls.py first|second|third [--seconds N] [--out FOLDER] [--small]

    first (540 s)   what holds on this machine (`gpu_facts.py`), then what must be right: tests on the GPU, Adam against
                    its memory bound, scratch memory, PyTorch's CUDA sanitizer
    second (560 s)  the promise: the largest model that fits under 6 GB (`promise.py`), then prediction, with
                    FlashAttention and with cuDNN's
    third (460 s)   other systems at one billion parameters, memcheck, ranks, and last what maps files into the GPU

Four files in FOLDER, as they come: facts.json, and of each call CALL.log with all that its steps print, CALL.json with
its steps and suites, whole at any moment, CALL.md with its tables. A step runs in a process group of its own: at the
end of its time it is interrupted, then killed with all that it started, and waited for at most `REAP_S`. What it wrote
stays. A step that fails ends no other one, but the first: where packages lack, no more than the facts is begun. Always
exits with 0. With other seconds than the default, all steps get their share of them.

`--break STEP=crash|hang` kills or stops a step's processes when they have run for a while: a rehearsal of failures.
Needs nothing but Python; `on_gpu.sh` starts it.
"""

from __future__ import annotations

import argparse
import getpass
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from report import markdown

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "runs/gpu"
"""Where results go unless told otherwise; on the machine it outlasts a call, and the next one finds the facts there."""

CUT_SHORT = 124
"""The exit code of a step that was ended, as of `timeout`."""
LACKS = 1
"""The exit code of the first step where packages lack; where it was slow or crashed, others may work all the same."""
INTERRUPT_S = 10.0
"""Before its end a step is interrupted: tests then print their summary."""
STACKS_S = 20.0
"""Before its end the suites' own time is over: what does not answer writes its stacks."""
REAP_S = 10.0
LEAST_S = 4.0
"""With less time left no step is begun."""
BREAK_S = 20.0
"""After so long a step that is to be broken has something to lose."""
_LOOK_S = 0.5
_LINES_SHOWN = 25

RANKS = {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
FLASH = {"TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"}
"""PyTorch's own variable: FlashAttention before cuDNN's, in plans as in runs."""


@dataclass(frozen=True)
class Step:
    """A part of a call.

    Attributes:
        share_s: at most, of the call's seconds; what is not used is left to those behind.
        takes_spare: whether it may also use the time that the steps before it have left of their shares.
        command: arguments of Python. `@out` is a suite's file, `@limit` the seconds that it has, `@facts` the facts.
        variables: of the environment.
        tool: a program that runs Python, with its arguments; a step whose tool is not installed is left out.
        is_needed: nothing but the facts is begun after it has failed.
        margin_s: of its time, what `@limit` leaves.
    """

    name: str
    share_s: float
    command: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    tool: tuple[str, ...] = ()
    takes_spare: bool = False
    is_needed: bool = False
    margin_s: float = STACKS_S


@dataclass(frozen=True)
class Call:
    seconds: float
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Machine:
    """Where the calls run: the device, whether tests can share it between processes, and the form of the suites."""

    device: str
    is_small: bool
    has_xdist: bool

    @property
    def is_full(self) -> bool:
        return self.device == "cuda" and not self.is_small


def calls(machine: Machine) -> dict[str, Call]:
    """All three."""
    form = ["--device", machine.device, *([] if machine.is_full else ["--small"])]
    shared = ["-n", "8"] if machine.is_full and machine.has_xdist else []  # their time is compilation, on the CPU

    def tests(name: str, share_s: float, paths: str, marks: str, *options: str, **more: Any) -> Step:
        quick = ["-v", "--tb=short", "--timeout=120", "-p", "no:cacheprovider", "-m", marks, *options]
        return Step(name, share_s, ("-m", "pytest", *paths.split(), *quick), **more)

    def suite(name: str, share_s: float, of: str, *options: str, **more: Any) -> Step:
        return Step(
            name, share_s, ("bench/run.py", of, *form, "--out", "@out", "--time-limit", "@limit", *options), **more
        )

    in_place, others = "gpu and files_in_place", "gpu and not files_in_place"
    of_a_gpu = "tests/runtime/device/test_gpu.py tests/machines/test_calibrate.py tests/gpu/test_gpu_process_memory.py"
    environment = Step("environment", 30, ("bench/gpu/environment.py",), is_needed=True)
    small = [] if machine.is_full else ["--small"]
    # asks for a CUDA device whatever runs: nothing to rehearse without one
    sanitizer = {"TORCH_CUDA_SANITIZER": "1"} if machine.device == "cuda" else {}
    return {
        "first": Call(
            540,
            (
                environment,
                Step(
                    "facts", 65, ("bench/gpu_facts.py", "--out", "@facts", "--time-limit", "@limit", *small), margin_s=5
                ),
                tests("gpu", 45, of_a_gpu, others),
                tests("kernels", 85, "tests/kernels", others, *shared),
                tests("training", 150, "tests/gpu/test_train.py", others, *shared, takes_spare=True),
                suite("adam", 105, "adam"),
                tests("scratch", 60, "tests/gpu/test_scratch.py", others, *shared),
                # Without what is compiled: under the sanitizer Dynamo compiles nothing.
                tests(
                    "sanitizer",
                    540,
                    f"{of_a_gpu} tests/gpu/test_scratch.py",
                    f"{others} and not slow",
                    variables=sanitizer,
                ),
            ),
        ),
        "second": Call(
            560,
            (
                environment,
                suite("promise", 390, "promise", "--facts", "@facts", variables=FLASH),
                suite("flash", 100, "prediction", "--case", _picked(machine, "gpt-1b, inductor"), variables=FLASH),
                suite("cudnn", 560, "prediction", "--case", _picked(machine, "gpt-1b, inductor")),
            ),
        ),
        "third": Call(
            460,
            (
                environment,
                suite("peers", 270, "peers", variables={**FLASH, **RANKS}),
                tests(
                    "memcheck",
                    80,
                    "tests/kernels",
                    others,
                    "-k",
                    "not 32_bits",
                    variables={"CHUNKC_VARIANTS": "2"},
                    tool=("compute-sanitizer", "--error-exitcode", "9"),
                ),
                suite("ranks", 60, "ranks", variables=RANKS, takes_spare=True),
                tests("files", 460, "tests/runtime/device/test_gpu.py tests/gpu/test_train.py", in_place),
            ),
        ),
    }


def _picked(machine: Machine, case: str) -> str:
    return case if machine.is_full else "*"


@dataclass
class Done:
    """What became of a step; `code` is None where it was not begun."""

    name: str
    seconds: float = 0.0
    code: int | None = None
    note: str = ""


class Results:
    """The call's JSON: replaced as a whole, whenever a step ends or a suite's own file has changed."""

    def __init__(self, path: Path, call: str, suites: Path) -> None:
        self.path, self.steps = path, list[Done]()
        self._call, self._suites, self._date = call, suites, time.strftime("%Y-%m-%dT%H:%M:%S%z")
        self._seen: dict[Path, tuple[float, int]] = {}
        self._read: dict[str, Any] = {}

    def look(self) -> None:
        """Take in what suites have written since."""
        state = {path: (path.stat().st_mtime, path.stat().st_size) for path in sorted(self._suites.glob("*.json"))}
        if state != self._seen:
            self._seen = state
            self._read = {path.stem: json.loads(path.read_text()) for path in state}
            self.write()

    def write(self) -> None:
        steps = [vars(done) for done in self.steps]
        content = {"call": self._call, "date": self._date, "steps": steps, "suites": self._read}
        replace_text(self.path, json.dumps(content, indent=1) + "\n")
        rows = [
            (done.name, f"{done.seconds:.0f}", "-" if done.code is None else str(done.code), done.note)
            for done in self.steps
        ]
        lines = ["| step | seconds | exit | note |", "|---|---:|---:|---|", *(f"| {' | '.join(row)} |" for row in rows)]
        tables = [f"# {name}\n\n{markdown(self._read[name])}" for name in self._in_order()]
        replace_text(self.path.with_suffix(".md"), "\n".join([*lines, "", *tables]))

    def _in_order(self) -> list[str]:
        """Names of suites, those whose steps have ended first, and in that order."""
        ended = [done.name for done in self.steps]
        return sorted(self._read, key=lambda name: ended.index(name) if name in ended else len(ended))


def replace_text(path: Path, text: str) -> None:
    """Write a file that is whole at any moment."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(text)
    os.replace(fresh, path)


@dataclass(frozen=True)
class Runner:
    """Runs steps of a call.

    Attributes:
        end_s: of `time.monotonic`, when the call is over.
        scale: what the call's seconds are of its default.
        broken: of step names ("all" for all): "crash" or "hang".
    """

    out: Path
    scratch: Path
    end_s: float
    scale: float
    environment: Mapping[str, str]
    facts: Path
    results: Results
    log: Path
    broken: Mapping[str, str] = field(default_factory=dict)

    def share_s(self, step: Step) -> float:
        """Return the step's own share of this call's seconds."""
        scale = max(1.0, self.scale) if step.is_needed else self.scale  # looking takes as long as it takes
        return step.share_s * scale

    def run(self, step: Step, spare_s: float = 0.0) -> Done:
        """Run it, its output in the log; show the end of that. Steps before it have left `spare_s` of their time."""
        at_most_s = min(self.share_s(step) + spare_s * step.takes_spare, self.end_s - time.monotonic() - 1)
        if step.tool and shutil.which(step.tool[0]) is None:
            return Done(step.name, note=f"{step.tool[0]} is not installed")
        if at_most_s < LEAST_S:
            return Done(step.name, note="no time left")
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            # A shell starts background jobs (`&`, nohup) with SIGINT ignored, and child processes inherit that; with a
            # handler here they start with the default, so that a step can be interrupted before its time is over.
            signal.signal(signal.SIGINT, lambda *_: None)
        print(f"== {step.name} (at most {at_most_s:.0f} s)", flush=True)
        begin_s = time.monotonic()
        with self.log.open("ab") as log:
            log.write(f"== {step.name} (at most {at_most_s:.0f} s)\n".encode())
            log.flush()
            begin = log.tell()
            process = subprocess.Popen(
                self._command(step, at_most_s),
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**self.environment, **step.variables},
                cwd=ROOT,
                start_new_session=True,
            )
            code, note = self._wait(process, begin_s + at_most_s, self.broken.get(step.name) or self.broken.get("all"))
        shown = self.log.read_bytes()[begin:].decode(errors="replace").splitlines()[-_LINES_SHOWN:]
        print("\n".join(shown), flush=True)
        return Done(step.name, round(time.monotonic() - begin_s, 1), code, note)

    def _command(self, step: Step, at_most_s: float) -> list[str]:
        own_s = max(at_most_s - step.margin_s, at_most_s / 2)
        places = {"@out": str(self.scratch / f"{step.name}.json"), "@limit": f"{own_s:.0f}", "@facts": str(self.facts)}
        return [*step.tool, self.environment["PYTHON"], *(places.get(word, word) for word in step.command)]

    def _wait(self, process: subprocess.Popen[bytes], end_s: float, broken: str | None) -> tuple[int, str]:
        """The exit code, and what else there is to say. Nothing that the step started is left in its group."""
        break_s, notes, is_interrupted = time.monotonic() + BREAK_S, list[str](), False
        try:
            while process.poll() is None and time.monotonic() < end_s:
                self.results.look()
                if broken and time.monotonic() >= break_s:
                    os.killpg(process.pid, {"crash": signal.SIGKILL, "hang": signal.SIGSTOP}[broken])
                    notes, broken = [f"broken for rehearsal: {broken}"], None
                if not is_interrupted and time.monotonic() >= end_s - min(INTERRUPT_S, (end_s - break_s + BREAK_S) / 4):
                    is_interrupted = True
                    process.send_signal(signal.SIGINT)
                time.sleep(_LOOK_S)
            ended_s, is_late = time.monotonic(), process.poll() is None or (is_interrupted and process.returncode != 0)
        finally:  # also where this process is told to end
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        try:
            process.wait(REAP_S)
        except subprocess.TimeoutExpired:
            notes.append(f"it had not ended {time.monotonic() - ended_s:.0f} s after it was killed")
        self.results.look()
        return (CUT_SHORT if is_late else process.returncode), "; ".join(notes)


def run_call(runner: Runner, steps: Sequence[Step]) -> None:
    """Run steps in order; the results are there after each."""
    may_begin, spare_s = True, 0.0
    for step in steps:
        if may_begin or step.name == "facts":
            done = runner.run(step, spare_s)
        else:
            done = Done(step.name, note="not begun: see the first step in the log")
        spare_s = max(0.0, spare_s + runner.share_s(step) - done.seconds)
        may_begin &= not (step.is_needed and done.code == LACKS)
        runner.results.steps.append(done)
        runner.results.write()


@contextmanager
def prepared(out: Path, wheels: Path, log: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """A folder for what is in between, and the environment of steps: wheels are installed, chunkc can be imported."""
    python = os.environ.get("PYTHON") or sys.executable
    own = {
        "PYTHON": python,
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR")
        or str(Path(tempfile.gettempdir()) / f"chunkc-gpu-code-{getpass.getuser()}"),
    }
    environment = {**os.environ, **own}
    with tempfile.TemporaryDirectory(prefix="chunkc-gpu-") as folder:
        scratch = Path(folder)
        (scratch / "suites").mkdir()
        if found := sorted(wheels.glob("*.whl")):
            site = scratch / "site"
            pip = [
                python,
                "-m",
                "pip",
                "install",
                "-q",
                "--no-index",
                "--no-deps",
                "--no-compile",
                "--target",
                str(site),
            ]
            say(log, pip + [str(path) for path in found], environment, 60)
            _add_path(environment, site)
        if say(log, [python, "-c", _HAS_CHUNKC], environment, 60)[0] != 0:
            _add_path(environment, link_package(scratch / "package"))
        yield scratch, environment


def _add_path(environment: dict[str, str], path: Path) -> None:
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(path), environment.get("PYTHONPATH"))))


_HAS_CHUNKC = "import importlib.util, sys; sys.exit(importlib.util.find_spec('chunkc') is None)"
_PROBE = """
import importlib.util, torch
print("xdist", importlib.util.find_spec("xdist") is not None, flush=True)
print("cuda", torch.cuda.is_available(), flush=True)
if torch.cuda.is_available():
    torch.ones(1 << 26, device="cuda").sum().item()
    print("expandable True")
"""
_EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def link_package(folder: Path) -> Path:
    """Lay out the package as an installation would, from links, with its entry point. Returns `folder`."""
    package, info = folder / "chunkc", folder / "chunkc-0.dist-info"
    package.mkdir(parents=True)
    info.mkdir()
    for path in (ROOT / "chunkc").iterdir():
        if path.name != "__pycache__":
            (package / path.name).symlink_to(path)
    for room in ("passes", "runtime", "kernels"):
        (package / room).symlink_to(ROOT / room)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: chunkc\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[torch_dynamo_backends]\nchunkc = chunkc.backend:chunkc\n")
    return folder


def say(log: Path, command: Sequence[str], environment: Mapping[str, str], limit_s: float) -> tuple[int, str]:
    """Run a short command: its exit code, `CUT_SHORT` if it took too long, and its output, which is logged too."""
    with tempfile.TemporaryFile() as output:
        try:
            done = subprocess.run(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, timeout=limit_s
            )
            code = done.returncode
        except subprocess.TimeoutExpired:
            code = CUT_SHORT
        output.seek(0)
        text = output.read().decode(errors="replace")
    with log.open("a") as file:
        file.write(text)
    return code, text


def look_at_machine(log: Path, environment: dict[str, str], is_small: bool) -> Machine:
    """Probe this machine, and ask for exact blocks in `environment` if the driver supports them.

    Exact blocks are those of expandable segments (`passes/graphs/cuda_memory.py`).
    """
    _, text = say(log, [environment["PYTHON"], "-c", _PROBE], {**environment, **_EXPANDABLE}, 90)
    found = set(text.splitlines())
    if "expandable True" in found:
        environment |= _EXPANDABLE
    return Machine("cuda" if "cuda True" in found else "cpu", is_small, "xdist True" in found)


def facts_path(out: Path, call: str) -> Path:
    """Where the first call writes its facts; for others, where some are: with the results, or of a call before."""
    own = out / "facts.json"
    return own if call == "first" or own.is_file() else KEPT / "facts.json"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("call", choices=("first", "second", "third"))
    parser.add_argument("--seconds", type=float, help="of the whole call (default: its own)")
    parser.add_argument("--out", type=Path, default=KEPT, metavar="FOLDER")
    parser.add_argument("--wheels", type=Path, default=ROOT / ".whl", metavar="FOLDER", help="used for this call")
    parser.add_argument("--small", action="store_true", help="tiny models, as on the GPU made of RAM (docs/cuda.md)")
    parser.add_argument("--break", dest="broken", action="append", default=[], metavar="STEP=crash|hang")
    options = parser.parse_args(arguments)
    begin_s = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the step under way, too
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    log = out / f"{options.call}.log"
    log.write_text("")
    with prepared(out, options.wheels, log) as (scratch, environment):
        machine = look_at_machine(log, environment, options.small)
        print(f"device: {machine.device}", flush=True)
        call = calls(machine)[options.call]
        seconds = options.seconds or call.seconds
        results = Results(out / f"{options.call}.json", options.call, scratch / "suites")
        results.write()
        runner = Runner(
            out,
            scratch / "suites",
            begin_s + seconds,
            seconds / call.seconds,
            environment,
            facts_path(out, options.call),
            results,
            log,
            dict(text.split("=") for text in options.broken),
        )
        run_call(runner, call.steps)
    if options.call == "first" and out != KEPT and (out / "facts.json").is_file():
        KEPT.mkdir(parents=True, exist_ok=True)
        shutil.copy(out / "facts.json", KEPT / "facts.json")
    print(table_of_steps(results.steps, time.monotonic() - begin_s), flush=True)
    return 0


def table_of_steps(steps: Sequence[Done], total_s: float) -> str:
    rows = [("step", "seconds", "exit", "")]
    rows += [(of.name, f"{of.seconds:.0f}", "-" if of.code is None else str(of.code), of.note) for of in steps]
    rows.append(("total", f"{total_s:.0f}", "", ""))
    return "\n".join(f"{name:<12} {seconds:>8} {code:>6}  {note}".rstrip() for name, seconds, code, note in rows)


if __name__ == "__main__":
    raise SystemExit(main())
