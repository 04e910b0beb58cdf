"""Trains one architecture after the other for `coverage.py`, each in a process of its own with a time limit.

    python bench/architectures/subject.py '{"time_limit_s": 300}'

A line on standard input names an architecture and its columns; the answer has a cell for each. The libraries are
imported once, and a copy of this process (`os.fork`) does the work: where it dies or hangs, the column it was at has
failed, and another copy goes on with the next. The limit is of the processors' time, so that it means the same next to
other work.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch._inductor.compile_fx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from measuring.subject_process import only_replies

from architectures import models as coverage_models
from architectures.judge import Judge
from architectures.models import NotBuilt
from architectures.table import FAILED, NOT_BUILT, WAITING, Cell, Column
from chunkc.runtime.device import cpu_allocator


def _cells(name: str, columns: Sequence[Column]) -> Iterator[dict[str, Any]]:
    """Yield cells one after the other, as they come."""
    try:
        subject = coverage_models.build(name)
    except NotBuilt as error:
        for column in columns:
            yield {"column": column.name, **asdict(Cell(NOT_BUILT, "", str(error)))}
        return
    yield {"num_parameters": subject.num_parameters}
    judge = Judge(subject)
    for column in columns:
        yield {"column": column.name, **asdict(judge.cell(column))}


def _answer(name: str, columns: Sequence[Column], time_limit_s: float) -> dict[str, Any]:
    """The cells of an architecture; a column has failed if its process died or took too long."""
    cells: dict[str, Any] = {}
    answer: dict[str, Any] = {"architecture": name, "num_parameters": None, "cells": cells}
    left = list(columns)
    while left:
        ended = "it took too long"
        with _Copy(name, left) as copy:
            while left and (line := copy.line(time_limit_s)) is not None:
                if not line:
                    ended = copy.how_it_ended()
                    break
                part = json.loads(line)
                if "num_parameters" in part:
                    answer["num_parameters"] = part["num_parameters"]
                    continue
                cells[part.pop("column")] = part
                left.pop(0)
        if left:
            cells[left.pop(0).name] = asdict(Cell(FAILED, "", ended))
    return answer


_LOOK_AGAIN_S = 1.0
"""How often the time that a copy has taken is looked at."""


class _Copy:
    """A copy of this process at work on an architecture; a context manager that ends it."""

    def __init__(self, name: str, columns: Sequence[Column]) -> None:
        self._read, write = os.pipe()
        self._unread = b""
        self._status: int | None = None
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._read)
            _work(name, columns, write)
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


def _work(name: str, columns: Sequence[Column], write: int) -> None:
    """Serve as a copy; never returns."""
    code = 1
    try:
        with os.fdopen(write, "w", buffering=1) as lines:
            for part in _cells(name, columns):
                print(json.dumps(part), file=lines)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _main() -> None:
    reply = only_replies()
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    torch._inductor.config.compile_threads = 1
    cpu_allocator.install()
    gc.collect()
    gc.freeze()
    reply({"architectures": coverage_models.architectures()})
    for line in sys.stdin:
        asked = json.loads(line)
        columns = [Column.named(name) for name in asked["columns"]]
        reply(_answer(asked["architecture"], columns, settings["time_limit_s"]))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="chunkc-coverage-") as _folder:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", _folder)
        _main()
