"""Runs groups of facts, each in a child process of its own, and reports each fact as it comes.

A group yields `Fact`s. What goes wrong in its process costs one line: an error that it raises, a signal that kills it,
or its time limit, after which it is killed. What it had reported by then counts. Needs nothing but Python.

Children are forks of the process that calls, which must not have touched CUDA; a `cold` group is run by an interpreter
of its own instead. A child is the leader of a session, and is killed with all that it started; it dies with its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import IO, Any, Literal

Status = Literal["PASS", "FAIL", "INFO"]

REAP_S = 5.0
"""How long a killed child is waited for: a driver may hold it, and what it has pinned, without bound."""
_LOOK_S = 0.02
_PDEATHSIG = 1  # PR_SET_PDEATHSIG
_END = "end"


@dataclass(frozen=True)
class Fact:
    """What was found: whether an assumption holds, or figures alone (INFO).

    Attributes:
        problem: why it does not hold, or why nothing could be found.
    """

    status: Status
    name: str
    figures: dict[str, Any] = field(default_factory=dict)
    problem: str = ""

    def line(self) -> str:
        """For people."""
        words = [self.status, self.name, *(f"{key}={_text(value)}" for key, value in self.figures.items())]
        return " ".join(words) + (f": {self.problem}" if self.problem else "")


def judged(holds: bool, name: str, problem: str, **figures: Any) -> Fact:
    """PASS, or FAIL with its problem."""
    return Fact("PASS" if holds else "FAIL", name, figures, "" if holds else problem)


def info(name: str, problem: str = "", **figures: Any) -> Fact:
    return Fact("INFO", name, figures, problem)


@dataclass(frozen=True)
class Group:
    """Facts of one process.

    Attributes:
        name: also of the line that says that its process failed.
        find: yields the facts; runs in the child.
        limit_s: of all of them.
        cold: run by an interpreter of its own, which finds the group by its name (`--child`).
        needs_device: only where there is a CUDA device.
        exit_name: of a further fact: how long its process takes to end after its last fact.
    """

    name: str
    find: Callable[[], Iterator[Fact]]
    limit_s: float = 10.0
    cold: bool = False
    needs_device: bool = True
    exit_name: str = ""


def run_group(group: Group, limit_s: float, command: Sequence[str] = ()) -> Iterator[Fact]:
    """Run a group in a child, at most for `limit_s`.

    Args:
        command: what runs it in an interpreter of its own; the descriptor that it writes to comes last. Empty: a fork.
    """
    with tempfile.TemporaryFile("w+") as log:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                _become_child(log)
                if command:
                    os.set_inheritable(writing, True)
                    os.execv(command[0], [*command, str(writing)])
                serve(group, writing, limit_s)
            finally:
                os._exit(70)  # nothing of the parent's may run here
        os.close(writing)
        try:
            yield from _followed(group, limit_s, pid, reading, log)
        finally:
            os.close(reading)
            _kill(pid)  # and what it started and left


def _followed(group: Group, limit_s: float, pid: int, reading: int, log: IO[str]) -> Iterator[Fact]:
    """The facts of a child until its end, and then what was wrong with it."""
    begin_s = time.monotonic()
    rest, ended_s, num, status, late = b"", None, 0, None, False
    while True:
        ready, _, _ = select.select([reading], [], [], _LOOK_S)
        data = os.read(reading, 1 << 16) if ready else b""
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            found = json.loads(line)
            if found == _END:
                ended_s = time.monotonic()
            else:
                num += 1
                yield Fact(**found)
        if status is not None and not data:
            break
        if status is None:
            status = _status_of(pid)
        now_s = time.monotonic()
        if status is None and now_s - begin_s > limit_s:
            if not late:
                late, limit_s = True, limit_s + REAP_S
                _kill(pid)
            else:
                yield Fact("FAIL", group.name, {}, f"killed, and not gone {REAP_S:g} s later")
                return
        if ready and not data:
            time.sleep(_LOOK_S)  # closed: only its end is waited for
    seconds = time.monotonic() - begin_s
    if group.exit_name and ended_s is not None:
        yield info(group.exit_name, exit_s=round(time.monotonic() - ended_s, 3))
    if late:
        where = "" if ended_s is None else ", after its last fact"
        yield Fact("FAIL", group.name, {"num_found": num}, f"no end within its limit{where}; {_last_words(log)}")
    elif status < 0:
        problem = f"killed by {signal.Signals(-status).name} after {seconds:.1f} s; {_last_words(log)}"
        yield Fact("FAIL", group.name, {"num_found": num}, problem)
    elif ended_s is None:
        yield Fact("FAIL", group.name, {"num_found": num}, f"ended with code {status}; {_last_words(log)}")


def _status_of(pid: int) -> int | None:
    """A child's exit code, or minus the signal that killed it; None while it runs."""
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _become_child(log: IO[str]) -> None:
    os.setsid()
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    for descriptor in (1, 2):
        os.dup2(log.fileno(), descriptor)


def serve(group: Group, writing: int, limit_s: float) -> None:
    """In the child: find the facts, write each to the pipe as a line of JSON, and end the process."""
    faulthandler.enable(file=2)
    faulthandler.dump_traceback_later(max(0.1, limit_s - 0.5), file=2)

    def write(what: object) -> None:
        os.write(writing, json.dumps(what).encode() + b"\n")

    try:
        for fact in group.find():
            write(asdict(fact))
    except BaseException as error:
        traceback.print_exc(file=sys.stderr)
        lines = str(error).strip().splitlines() or [""]
        write(asdict(Fact("FAIL", group.name, {}, f"{type(error).__name__}: {lines[0][:500]}")))
    write(_END)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a fork must not run what its parent registered for the end


def _last_words(log: IO[str]) -> str:
    """The end of what a child printed, on one line."""
    log.flush()
    log.seek(0)
    lines = [line.strip() for line in log.read().splitlines() if line.strip()]
    frames = [line for line in lines if line.startswith("File ")]
    chosen = [*lines[-1:], *frames[:3]] if frames else lines[-3:]
    return "it printed: " + " | ".join(chosen)[-600:] if chosen else "it printed nothing"


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ",".join(map(_text, value))
    return str(value).replace(" ", "_")
