"""Drives subjects: processes that live long and take turns, so that a machine's drift is the same for all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parent))
from subject import SubjectSpec

NUM_SETTLING_STEPS = 1
"""Steps at the start of each turn that count for nothing: caches still hold another subject's data."""

_EXIT_TIMEOUT_S = 60


class SubjectFailed(Exception):
    """A subject's process ended with an error; the message holds the end of what it printed."""


class DoesNotFit(Exception):
    """No plan keeps to the subject's budget; `minimum_nbytes` is the smallest for which there is one."""

    def __init__(self, minimum_nbytes: int) -> None:
        super().__init__(f"needs {minimum_nbytes} bytes")
        self.minimum_nbytes = minimum_nbytes


@dataclass(frozen=True)
class Turn:
    """The steps of one turn, an entry per step; `counters`: what chunkc's grew by, per step."""

    forward_backward_s: tuple[float, ...]
    optimizer_s: tuple[float, ...]
    step_s: tuple[float, ...]
    losses: tuple[float, ...]
    counters: Mapping[str, float]

    def without_first(self, num_steps: int) -> Turn:
        """The same turn as if its first steps had not been timed; their losses and counters stay."""
        return Turn(
            self.forward_backward_s[num_steps:],
            self.optimizer_s[num_steps:],
            self.step_s[num_steps:],
            self.losses,
            self.counters,
        )


class Steps(Protocol):
    """Whatever trains a number of steps when told to."""

    def step(self, num_steps: int) -> Turn: ...


class SubjectProcess:
    """A subject in a fresh process; a context manager that ends it.

    Args:
        inductor_cache: a folder for compiled code; None: a fresh one, so that nothing is compiled yet.

    Every method raises SubjectFailed where the process has failed.
    """

    def __init__(self, spec: SubjectSpec, inductor_cache: Path | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="chunkc-bench-")
        folder = Path(self._folder.name)
        self._log = folder / "log"
        environment = dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(inductor_cache or folder / "inductor"))
        command = [sys.executable, str(Path(__file__).with_name("subject.py")), spec.to_json()]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
            )
        self._counters: dict[str, float] = {}
        self.ready: dict[str, Any] = {}

    def __enter__(self) -> SubjectProcess:
        try:
            self.ready = self._reply()
        except BaseException:
            self._end(kill=True)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(kill=kind is not None)

    def step(self, num_steps: int) -> Turn:
        """Train.

        Raises:
            DoesNotFit: not within the budget.
        """
        reply = self._ask(f"step {num_steps}")
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
        return self._ask("report")

    def _ask(self, command: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            print(command, file=self._process.stdin, flush=True)
        except BrokenPipeError as error:
            raise self._failure() from error
        return self._reply()

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._failure()
        return json.loads(line)

    def _failure(self) -> SubjectFailed:
        code = self._process.wait()
        said = self._log.read_text(errors="replace").strip()
        return SubjectFailed(f"the subject ended with exit code {code}:\n{said[-3000:]}")

    def _end(self, *, kill: bool) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if kill:
            self._process.kill()
        with suppress(BrokenPipeError):  # it has ended already
            self._process.stdin.close()
        try:
            self._process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._folder.cleanup()


def interleave(
    subjects: Mapping[str, Steps],
    *,
    num_rounds: int,
    num_steps: int,
    on_turn: Callable[[str], None] = lambda _name: None,
) -> dict[str, list[Turn]]:
    """Rounds in which each subject trains `num_steps` timed steps while the others wait.

    Every round begins with another subject, so that none profits from its place.
    """
    names = list(subjects)
    turns: dict[str, list[Turn]] = {name: [] for name in names}
    for round_index in range(num_rounds):
        for name in rotated(names, round_index):
            on_turn(name)
            turn = subjects[name].step(NUM_SETTLING_STEPS + num_steps)
            turns[name].append(turn.without_first(NUM_SETTLING_STEPS))
    return turns


def rotated(names: Sequence[str], by: int) -> list[str]:
    """The same order, begun `by` places later."""
    start = by % len(names)
    return [*names[start:], *names[:start]]
