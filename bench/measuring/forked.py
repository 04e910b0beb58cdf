"""Run pieces of work in copies of this process, each with a time limit: a crash or a hang costs one piece.

What is slow to import is imported once, and `os.fork` copies it. The limit is of the processors' time, so that it means
the same next to other work. The process that forks must not have computed with several threads.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

Piece = TypeVar("Piece")
Work = Callable[[Sequence[Piece]], Iterable[dict[str, Any]]]
"""Pieces -> their results, in the same order, each yielded as it comes."""

WAITING = 20
"""A piece that takes more than so many times the limit by the clock has failed, too: it hangs."""

TOOK_TOO_LONG = "it took too long"

_LOOK_AGAIN_S = 1.0
"""How often the time that a copy has taken is looked at."""


def results(
    groups: Iterable[Sequence[Piece]], work: Work, time_limit_s: float, *, num_jobs: int = 1
) -> Iterator[tuple[Piece, dict[str, Any] | str]]:
    """Yield each piece with its result, or with how its process ended without one; another copy does the group's rest.

    Args:
        groups: pieces that share a copy.
        num_jobs: copies at a time.
    """
    waiting, copies = deque(groups), list[_Copy]()
    try:
        while waiting or copies:
            while waiting and len(copies) < num_jobs:
                copies.append(_Copy(work, waiting.popleft(), time_limit_s))
            readable = select.select(copies, [], [], _LOOK_AGAIN_S)[0]
            for copy in list(copies):
                ended = copy.read() if copy in readable else copy.lateness()
                yield from copy.finished()
                if ended is None and copy.left:
                    continue
                copies.remove(copy)
                copy.end()
                if ended is not None and copy.left:
                    yield copy.left.pop(0), ended
                if copy.left:
                    waiting.appendleft(copy.left)
    finally:
        for copy in copies:
            copy.end()


class _Copy:
    """A copy of this process at work.

    Attributes:
        left: pieces without a result.
    """

    def __init__(self, work: Work, pieces: Sequence[Any], time_limit_s: float) -> None:
        self.left = list(pieces)
        self._time_limit_s = time_limit_s
        self._read, write = os.pipe()
        self._unread = b""
        self._has_ended = False
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._read)
            _serve(work, pieces, write)
        os.close(write)
        self._begin_piece()

    def _begin_piece(self) -> None:
        self._hangs_at_s = time.monotonic() + WAITING * self._time_limit_s
        self._too_long_s = _processors_s(self._pid) + self._time_limit_s

    def fileno(self) -> int:
        return self._read

    def read(self) -> str | None:
        """Read what has come, or say how the process ended."""
        part = os.read(self._read, 1 << 16)
        self._unread += part
        return None if part else self._how_it_ended()

    def lateness(self) -> str | None:
        """Say that a piece takes too long, if it does."""
        is_late = time.monotonic() > self._hangs_at_s or _processors_s(self._pid) > self._too_long_s
        return TOOK_TOO_LONG if is_late else None

    def finished(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Yield the pieces with a result that has been read."""
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            yield self.left.pop(0), json.loads(line)
        if lines:
            self._begin_piece()

    def _how_it_ended(self) -> str:
        self._has_ended = True
        code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return f"the process was ended by {signal.Signals(-code).name}" if code < 0 else f"it ended with code {code}"

    def end(self) -> None:
        """End the process, unless it has ended."""
        os.close(self._read)
        if not self._has_ended:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)


def _processors_s(pid: int) -> float:
    """Seconds of the processors' time that a process has taken, with those of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _serve(work: Work, pieces: Sequence[Any], write: int) -> None:
    """Work as a copy; never returns."""
    code = 1
    os.dup2(2, 1)  # standard output is the caller's
    try:
        with os.fdopen(write, "w", buffering=1) as lines:
            for result in work(pieces):
                print(json.dumps(result), file=lines)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
