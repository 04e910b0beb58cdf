"""Train PyTorch's own databases under chunkc: operators (`op_db`), modules (`module_db`), optimizers (`optim_db`).

    python bench/conformance.py [--columns PATTERN,...] [--only PATTERN,...] [--shard K/N] [--out FILE.jsonl]

A sample of an operator is a module: what has a gradient is a parameter, other tensors are inputs. Modules and their
inputs are as PyTorch's tests have them; optimizers train a small model. Each takes a forward, a backward and an update,
twice, under a large budget and under the smallest that `chunkc.BudgetError` names, with plain PyTorch's bits and no
more measured bytes than predicted (`databases/judge.py`). What fails is tried with the default backend: where that
fails too, it does not count. Columns of `calls` compare measured with predicted bytes of every ATen call that the
samples make. `COLUMNS` of `databases/table.py` say in what precision, and whether the batch grows; columns of
code that is slow to compile have a fixed part of the cases, by their names' hashes.

Many cases share a process. One that dies or takes more than `--time-limit`, in seconds of the processors' time, costs
the case that it was at. Each cell is appended to `--out` as it comes, and a later run goes on with what is missing
there. A table goes to standard output. Needs the package `expecttest`, which PyTorch's testing modules import.

    --columns       such as `eager/float32,inductor/*` (default: all)
    --only          such as `op/linalg.*,module/*` (default: all)
    --shard K/N     the K-th of N parts, from 0
    --tenth         the fixed tenth of the second test tier: one sample of each case, in the smallest budget alone
    --again         cells that were a fault or refused once more
    --report        run nothing, print what the file says
    --result FILE   also write everything as JSON, for bench/results/
    --small         a trial: a few cases, two columns
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from databases import modules, optimizers
from databases.judge import judge
from databases.table import (
    COLUMNS,
    CRASH,
    FAULTS,
    REFUSED,
    TOO_LONG,
    Cell,
    Column,
    falls_on,
    sections,
)
from measuring import forked, machine
from report import markdown

from chunkc.runtime.device import cpu_allocator

SMALL = ("op/tril", "op/mul", "module/nn.Linear", "optim/SGD")
SMALL_COLUMNS = ("eager/float32", "calls/float32")

TIME_LIMIT_S = 120.0
"""Of the processors' time, for one cell."""

CELLS_A_PROCESS = 50

Work = tuple[str, str]
"""A case and a column."""


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; `columns` is a list of names, `shard` a pair of numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--columns", default="*", metavar="PATTERN,...")
    parser.add_argument("--only", default="*", metavar="PATTERN,...", help="cases")
    parser.add_argument("--shard", default="0/1", metavar="K/N")
    parser.add_argument("--tenth", action="store_true", help="the fixed tenth of the second test tier")
    parser.add_argument("--again", action="store_true", help="faults and what was refused once more")
    parser.add_argument("--out", type=Path, default=Path("runs/conformance.jsonl"), metavar="FILE.jsonl")
    parser.add_argument("--result", type=Path, metavar="FILE.json")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--time-limit", type=float, default=TIME_LIMIT_S, metavar="SECONDS", help="for each cell")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of PyTorch's")
    parser.add_argument("--small", action="store_true", help="a trial run")
    parsed = parser.parse_args(arguments)
    patterns = parsed.columns.split(",")
    parsed.columns = [name for name in COLUMNS if any(fnmatchcase(name, pattern) for pattern in patterns)]
    if not parsed.columns:
        parser.error(f"no column matches; there are {', '.join(COLUMNS)}")
    if parsed.small and patterns == ["*"]:
        parsed.columns = list(SMALL_COLUMNS)
    if parsed.tenth and patterns == ["*"]:
        parsed.columns = ["eager/float32"]
    index, _, count = parsed.shard.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        parser.error("--shard is K/N, with K from 0 to N - 1")
    parsed.shard = int(index), int(count)
    return parsed


def cases_of(column: Column) -> list[str]:
    """List the cases of a column."""
    names: list[str] = []
    for name, info in modules.operators().items():
        supported = modules.differentiable(info) if column.codegen != "calls" else info.supported_dtypes("cpu")
        if column.dtype in supported:
            names.append(name)
    if column.dtype.is_floating_point:
        names += [name for name, info in modules.module_infos().items() if column.dtype in info.dtypes]
    if column.codegen != "calls" and not column.changes:
        names += optimizers.optimizer_infos()
    return [name for name in names if falls_on(name, 0, column.every)]


def chosen(args: argparse.Namespace, known: Mapping[Work, Mapping[str, Any]]) -> list[Work]:
    """List what is asked for and has no cell yet, column by column."""
    patterns = args.only.split(",")
    work = []
    for name in args.columns:
        for case in cases_of(COLUMNS[name]):
            if not any(fnmatchcase(case, pattern) for pattern in patterns) or not falls_on(case, *args.shard):
                continue
            if (args.small and case not in SMALL) or (args.tenth and not falls_on(case, 0, 10)):
                continue
            cell = known.get((case, name))
            if cell is None or (args.again and cell["outcome"] in (*FAULTS, REFUSED)):
                work.append((case, name))
    return work


def cells(work: Sequence[Work], *, smallest_only: bool, num_threads: int) -> Iterator[dict[str, Any]]:
    """Judge one after the other in this process, which does nothing else."""
    _set_up(num_threads)
    for case, name in work:
        started_s = time.monotonic()
        column = COLUMNS[name]
        if smallest_only:
            column = column.with_one_sample()
        try:
            cell = judge(case, column, smallest_only=smallest_only)
        except Exception as error:
            cell = Cell(CRASH, f"the judge fails: {type(error).__name__}: {error}"[:300])
        yield asdict(cell) | {"seconds": round(time.monotonic() - started_s, 1)}


def _set_up(num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    torch._inductor.config.compile_threads = 1
    torch._inductor.config.fallback_random = True
    gc.freeze()  # what was imported is not looked at by each collection
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)


def run(args: argparse.Namespace, work: Sequence[Work]) -> Iterator[dict[str, Any]]:
    """Yield lines as they come."""
    commit = machine.versions()["commit"]
    do = partial(cells, smallest_only=args.tenth, num_threads=args.threads)
    for start in range(0, len(work), CELLS_A_PROCESS):
        for (case, column), result in forked.results(work[start : start + CELLS_A_PROCESS], do, args.time_limit):
            if isinstance(result, str):
                outcome = TOO_LONG if result == forked.TOOK_TOO_LONG else CRASH
                result = asdict(Cell(outcome, result)) | {"seconds": args.time_limit}
            yield {"case": case, "column": column, "commit": commit, **result}


def read(path: Path) -> dict[Work, dict[str, Any]]:
    """Load the cells of a file; the last of those for one case and column counts."""
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return {(line["case"], line["column"]): line for line in lines}


def result_of(lines: Sequence[Mapping[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """The tables with what was run where."""
    num_cases = Counter((name, case.partition("/")[0]) for name in COLUMNS for case in cases_of(COLUMNS[name]))
    present = {(line["case"], line["column"]) for line in lines}
    whole = all((case, name) in present for name in COLUMNS for case in cases_of(COLUMNS[name]))
    return {
        "suite": "conformance",
        "is_small": args.small,
        "is_complete": whole,
        "device": "cpu",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": machine.hardware(),
        "versions": machine.versions(),
        "sections": [section.to_json() for section in sections(lines, num_cases)],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, append, print; 1 where chunkc has a fault."""
    args = parse_args(arguments)
    known = read(args.out)
    if not args.report:
        cpu_allocator.install()
        args.out.parent.mkdir(parents=True, exist_ok=True)
        work = chosen(args, known)
        with args.out.open("a") as out:
            for number, line in enumerate(run(args, work), 1):
                out.write(json.dumps(line) + "\n")
                out.flush()
                known[line["case"], line["column"]] = line
                reason = f": {line['reason']}" if line["reason"] else ""
                print(f"{number}/{len(work)} {line['case']} {line['column']} {line['outcome']}{reason}"[:300],
                      file=sys.stderr)  # fmt: skip
    result = result_of(list(known.values()), args)
    if args.result is not None:
        args.result.write_text(json.dumps(result) + "\n")
    print(markdown(result), flush=True)
    return 1 if any(line["outcome"] in FAULTS for line in known.values()) else 0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="chunkc-conformance-") as _folder:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", _folder)
        raise SystemExit(main())
