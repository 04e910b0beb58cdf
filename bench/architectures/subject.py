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
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch._inductor.compile_fx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from measuring import forked
from measuring.subject_process import only_replies

from architectures import models as coverage_models
from architectures.judge import Judge
from architectures.models import NotBuilt
from architectures.table import FAILED, NOT_BUILT, Cell, Column
from chunkc.runtime.device import cpu_allocator


def _cells(name: str, columns: Sequence[Column]) -> Iterator[dict[str, Any]]:
    """Yield the columns' cells one after the other, as they come, each with the number of parameters."""
    try:
        subject = coverage_models.build(name)
    except NotBuilt as error:
        for _ in columns:
            yield {"num_parameters": None, "cell": asdict(Cell(NOT_BUILT, "", str(error)))}
        return
    judge = Judge(subject)
    for column in columns:
        yield {"num_parameters": subject.num_parameters, "cell": asdict(judge.cell(column))}


def _answer(name: str, columns: Sequence[Column], time_limit_s: float) -> dict[str, Any]:
    """The cells of an architecture; a column has failed if its process died or took too long."""
    cells: dict[str, Any] = {}
    answer: dict[str, Any] = {"architecture": name, "num_parameters": None, "cells": cells}
    for column, result in forked.results(columns, partial(_cells, name), time_limit_s):
        if isinstance(result, str):
            cells[column.name] = asdict(Cell(FAILED, "", result))
        else:
            cells[column.name] = result["cell"]
            answer["num_parameters"] = result["num_parameters"]
    return answer


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
