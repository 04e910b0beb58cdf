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


def results(pieces: Sequence[Piece], work: Work, time_limit_s: float) -> Iterator[tuple[Piece, dict[str, Any] | str]]:
    """Yield each piece with its result, or with how its process ended without one; another copy does the rest."""
    left = list(pieces)
    while left:
        ended = TOOK_TOO_LONG
        with _Copy(work, left) as copy:
            while left and (line := copy.line(time_limit_s)) is not None:
                if not line:
                    ended = copy.how_it_ended()
                    break
                yield left.pop(0), json.loads(line)
        if left:
            yield left.pop(0), ended


class _Copy:
    """A copy of this process at work; a context manager that ends it."""

    def __init__(self, work: Work, pieces: Sequence[Any]) -> None:
        self._read, write = os.pipe()
        self._unread = b""
        self._status: int | None = None
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._read)
            _serve(work, pieces, write)
        os.close(write)

    def line(self, time_limit_s: float) -> str | None:
        """The next line; empty where there is none any more, None where it took too long."""
        hangs_at_s, too_long_s = time.monotonic() + WAITING * time_limit_s, _processors_s(self._pid) + time_limit_s
        while b"\n" not in self._unread:
            if time.monotonic() > hangs_at_s or _processors_s(self._pid) > too_long_s:
                return None
            if not select.select([self._read], [], [], _LOOK_AGAIN_S)[0]:
                continue
            part = os.read(self._read, 1 << 16)
            if not part:
                return ""
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode()

    def how_it_ended(self) -> str:
        _, self._status = os.waitpid(self._pid, 0)
        code = os.waitstatus_to_exitcode(self._status)
        return f"the process was ended by {signal.Signals(-code).name}" if code < 0 else f"it ended with code {code}"

    def __enter__(self) -> _Copy:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._read)
        if self._status is None:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)


def _processors_s(pid: int) -> float:
    """Seconds of the processors' time that a process has taken, with those of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _serve(work: Work, pieces: Sequence[Any], write: int) -> None:
    """Work as a copy; never returns."""
    code = 1
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
