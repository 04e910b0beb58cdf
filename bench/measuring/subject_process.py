"""Drives subjects: processes that live long and take turns, so that a machine's drift is the same for all."""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Protocol

NUM_SETTLING_STEPS = 1
"""Steps at the start of each turn that count for nothing: caches still hold another subject's data."""

REPLY_TIMEOUT_S = 1800.0
"""How long a subject may think about one command unless told otherwise."""

Timeout = float | Callable[[], float]
"""Seconds, or what gives them when an answer is waited for: a deadline comes nearer."""

_EXIT_TIMEOUT_S = 5
"""How long a process may take to end by itself once it is asked no more; all that it knows has been told by then."""

REAP_S = 30.0
"""How long a killed process is waited for: the driver unpins its memory first, which has no bound."""

_DUMP_S = 2.0
"""How long a process that does not answer may take to write where its threads are."""

_NUM_LOG_CHARACTERS = 3000
_NUM_DUMP_CHARACTERS = 20_000


class SubjectFailed(Exception):
    """A subject's process ended with an error or did not answer; the message holds the end of what it printed."""


class TimedOut(SubjectFailed):
    """A subject's process did not answer in time, and was ended."""


class DoesNotFit(Exception):
    """Raised where no plan keeps to the subject's budget; `minimum_nbytes` is the smallest for which there is one."""

    def __init__(self, minimum_nbytes: int) -> None:
        super().__init__(f"does not fit: needs {minimum_nbytes / 2**20:,.1f} MiB")
        self.minimum_nbytes = minimum_nbytes


class OutOfMemory(Exception):
    """The subject ran out of memory under its limit; the message is its own, cut to one line."""


class Unavailable(Exception):
    """The subject cannot run here; the message says why."""


@dataclass(frozen=True)
class Spec:
    """Arguments of a process, as JSON. A subclass names the script, relative to `bench/`, and has the fields."""

    SCRIPT: ClassVar[str]

    def to_json(self) -> str:
        """The command line argument of the script."""
        return json.dumps(asdict(self))


DUMP_SIGNAL = signal.SIGUSR1
_DUMP_HEAD = "(most recent call first)"

Reply = Callable[[dict[str, Any]], None]


def only_replies() -> Reply:
    """Reserve standard output for replies, and return a function that writes one as a line of JSON.

    All other output, also from below Python, goes to standard error from now on. There, too, `DUMP_SIGNAL` makes this
    process write every thread's stack.
    """
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return lambda fields: print(json.dumps(fields), file=lines)


@dataclass(frozen=True)
class Turn:
    """The steps of one turn, an entry per step; `counters`: what chunkc's grew by, per step."""

    forward_backward_s: tuple[float, ...]
    optimizer_s: tuple[float, ...]
    step_s: tuple[float, ...]
    losses: tuple[float, ...]
    counters: Mapping[str, float]

    def without_first(self, num_steps: int) -> Turn:
        """Copy of a turn as if its first steps had not been timed; their losses and counters stay."""
        return Turn(
            self.forward_backward_s[num_steps:],
            self.optimizer_s[num_steps:],
            self.step_s[num_steps:],
            self.losses,
            self.counters,
        )

    @staticmethod
    def joined(turns: Sequence[Turn]) -> Turn:
        """Turns one after the other as one; counters are means over its steps."""
        weights = [len(turn.losses) for turn in turns]
        return Turn(
            forward_backward_s=sum((turn.forward_backward_s for turn in turns), ()),
            optimizer_s=sum((turn.optimizer_s for turn in turns), ()),
            step_s=sum((turn.step_s for turn in turns), ()),
            losses=sum((turn.losses for turn in turns), ()),
            counters={
                name: statistics.fmean([turn.counters[name] for turn in turns], weights) for name in turns[0].counters
            },
        )


class Steps(Protocol):
    """Whatever trains a number of steps when told to."""

    def step(self, num_steps: int) -> Turn: ...


class Process:
    """A script of this folder in a fresh process, asked line by line; a context manager that ends it.

    Args:
        spec: names the script and is its only argument.
        inductor_cache: a folder for compiled code; None: a fresh one, so that nothing is compiled yet.
        timeout_s: for each answer.

    Every method raises SubjectFailed where the process has failed, Unavailable and OutOfMemory where it said so.
    """

    def __init__(self, spec: Spec, inductor_cache: Path | None = None, *, timeout_s: Timeout = REPLY_TIMEOUT_S) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="chunkc-bench-")
        self._timeout_s = timeout_s
        folder = Path(self._folder.name)
        self._log = folder / "log"
        environment = dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(inductor_cache or folder / "inductor"))
        command = [sys.executable, str(Path(__file__).parents[1] / spec.SCRIPT), spec.to_json()]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment
            )
        self._unread = b""
        self._has_ended = False
        self.exit_note = ""
        """Set where the process was killed and has not ended: it may still hold memory."""
        self.ready: dict[str, Any] = {}

    def start_in(self, stack: ExitStack) -> Any:
        """Have `stack` end the process; `__enter__` waits for it later. So several can start at the same time."""
        stack.push(self.__exit__)
        return self

    def ended(self) -> ExitStack:
        """A context that ends the process."""
        stack = ExitStack()
        self.start_in(stack)
        return stack

    def __enter__(self) -> Any:
        try:
            self.ready = self._reply()
        except BaseException:
            self._end(kill=True)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(kill=kind is not None or not self.ready)

    def ask(self, command: str) -> dict[str, Any]:
        """The answer to one line."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{command}\n".encode())
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._failure() from error
        return self._reply()

    def _reply(self) -> dict[str, Any]:
        reply = json.loads(self._line())
        if "unavailable" in reply:
            raise Unavailable(reply["unavailable"])
        if "out_of_memory" in reply:
            raise OutOfMemory(reply["out_of_memory"])
        return reply

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        timeout_s = self._timeout_s() if callable(self._timeout_s) else self._timeout_s
        pipe, give_up_s = self._process.stdout.fileno(), time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            left_s = give_up_s - time.monotonic()
            if left_s <= 0 or not select.select([pipe], [], [], left_s)[0]:
                said = self._said_with_stacks()
                self._process.kill()
                raise TimedOut(f"no answer within {timeout_s:.0f} s:\n{said}")
            part = os.read(pipe, 1 << 16)
            if not part:
                raise self._failure()
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _said(self) -> str:
        return self._log.read_text(errors="replace").strip()[-_NUM_LOG_CHARACTERS:]

    def _said_with_stacks(self) -> str:
        """The end of the log, then the stacks of all threads; a process that has not begun ends without."""
        said, begin = self._said(), self._log.stat().st_size
        self._process.send_signal(DUMP_SIGNAL)
        give_up_s, stacks = time.monotonic() + _DUMP_S, ""
        while time.monotonic() < give_up_s and self._process.poll() is None:
            before, stacks = stacks, self._log.read_bytes()[begin:].decode(errors="replace")
            if _DUMP_HEAD in stacks and stacks == before:  # all is written
                break
            time.sleep(0.05)
        return f"{said}\n{stacks.strip()[:_NUM_DUMP_CHARACTERS]}".strip()

    def _failure(self) -> SubjectFailed:
        if not self._has_ended_within(REAP_S):
            return SubjectFailed(
                f"the subject closed its output and did not end within {REAP_S:.0f} s:\n{self._said()}"
            )
        return SubjectFailed(f"the subject ended with exit code {self._process.returncode}:\n{self._said()}")

    def _has_ended_within(self, seconds: float) -> bool:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _end(self, *, kill: bool) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if self._has_ended:
            return
        self._has_ended = True
        if kill:
            self._process.kill()
        with suppress(BrokenPipeError):  # it has ended already
            self._process.stdin.close()
        if not self._has_ended_within(_EXIT_TIMEOUT_S):
            self._process.kill()
            if not self._has_ended_within(REAP_S):
                self.exit_note = f"its process had not ended {REAP_S:.0f} s after it was killed"
                print(f"process {self._process.pid}: {self.exit_note}", file=sys.stderr)
        self._process.stdout.close()
        self._folder.cleanup()


class SubjectProcess(Process):
    """A model in training (see `subject.py`)."""

    def __init__(self, spec: Spec, inductor_cache: Path | None = None, *, timeout_s: Timeout = REPLY_TIMEOUT_S) -> None:
        super().__init__(spec, inductor_cache, timeout_s=timeout_s)
        self._counters: dict[str, float] = {}

    def step(self, num_steps: int) -> Turn:
        """Train.

        Raises:
            DoesNotFit: not within the budget.
            OutOfMemory: the limit was hit.
        """
        reply = self.ask(f"step {num_steps}")
        if "minimum_nbytes" in reply:
            raise DoesNotFit(reply["minimum_nbytes"])
        before, self._counters = self._counters, reply["counters"]
        grown = {name: (total - before.get(name, 0)) / num_steps for name, total in self._counters.items()}
        steps: list[dict[str, float]] = reply["steps"]
        return Turn(
            forward_backward_s=tuple(step["forward_backward_s"] for step in steps),
            optimizer_s=tuple(step["optimizer_s"] for step in steps),
            step_s=tuple(step["step_s"] for step in steps),
            losses=tuple(step["loss"] for step in steps),
            counters=grown,
        )

    def report(self) -> dict[str, Any]:
        """Peaks and plan, as `subject.Trainer.report` has them."""
        return self.ask("report")


def interleave(
    subjects: Mapping[str, Steps],
    *,
    num_rounds: int,
    num_steps: int,
    on_turn: Callable[[str], None] = lambda _name: None,
    is_over: Callable[[], bool] = lambda: False,
) -> dict[str, list[Turn]]:
    """Rounds in which each subject trains `num_steps` timed steps while the others wait.

    Every round begins with another subject, so that none profits from its place. Once `is_over`, no round but the
    first begins.
    """
    names = list(subjects)
    turns: dict[str, list[Turn]] = {name: [] for name in names}
    for round_index in range(num_rounds):
        if round_index and is_over():
            break
        for name in rotated(names, round_index):
            on_turn(name)
            turn = subjects[name].step(NUM_SETTLING_STEPS + num_steps)
            turns[name].append(turn.without_first(NUM_SETTLING_STEPS))
    return turns


def rotated(names: Sequence[str], by: int) -> list[str]:
    """Rotate an order by `by` places."""
    start = by % len(names)
    return [*names[start:], *names[:start]]


def first_line(error: BaseException, at_most: int = 200) -> str:
    """Shorten an error for a table: of a failed process the last line of its log, else the first of the message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    is_log = isinstance(error, SubjectFailed) and not isinstance(error, TimedOut)
    line = lines[-1] if is_log else lines[0].rstrip(":")
    return line.replace("|", "/")[:at_most]
