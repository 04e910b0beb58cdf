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
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config

sys.path.insert(0, str(Path(__file__).resolve().parent))
from databases import modules, optimizers
from databases.judge import judge
from databases.table import (
    COLUMNS,
    CRASH,
    FAULTS,
    TOO_LONG,
    Cell,
    Column,
    falls_on,
    sections,
)
from judging import running
from judging.running import Work
from judging.table import REFUSED, Line
from measuring import forked

SMALL = ("op/tril", "op/mul", "module/nn.Linear", "optim/SGD")
SMALL_COLUMNS = ("eager/float32", "calls/float32")

TIME_LIMIT_S = 120.0
"""Of the processors' time, for one cell."""

CELLS_A_PROCESS = 50


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; `columns` is a list of names, `shard` a pair of numbers."""
    parser = running.parser(__doc__, Path("runs/conformance.jsonl"), TIME_LIMIT_S)
    parser.add_argument("--only", default="*", metavar="PATTERN,...", help="cases")
    parser.add_argument("--shard", default="0/1", metavar="K/N")
    parser.add_argument("--tenth", action="store_true", help="the fixed tenth of the second test tier")
    parsed = running.parsed(parser, arguments, COLUMNS, SMALL_COLUMNS)
    if parsed.tenth and parsed.columns == list(COLUMNS):
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


def chosen(args: argparse.Namespace, known: Mapping[Work, Line]) -> list[Work]:
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


def judge_all(work: Sequence[Work], *, smallest_only: bool) -> Iterator[dict[str, Any]]:
    """Judge one case after the other."""
    torch._inductor.config.fallback_random = True
    for case, name in work:
        column = COLUMNS[name].with_one_sample() if smallest_only else COLUMNS[name]
        try:
            cell = judge(case, column, smallest_only=smallest_only)
        except Exception as error:
            cell = Cell(CRASH, f"the judge fails: {type(error).__name__}: {error}"[:300])
        yield asdict(cell)


def _died(ended: str) -> Cell:
    return Cell(TOO_LONG if ended == forked.TOOK_TOO_LONG else CRASH, ended)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, append, print; 1 where chunkc has a fault."""
    args = parse_args(arguments)
    known = running.read(args.out)
    if not args.report:
        work = chosen(args, known)
        groups = [work[start : start + CELLS_A_PROCESS] for start in range(0, len(work), CELLS_A_PROCESS)]
        running.run(args, groups, partial(judge_all, smallest_only=args.tenth), _died, known)
    whole = [(case, name) for name, column in COLUMNS.items() for case in cases_of(column)]
    num_cases = Counter((name, case.partition("/")[0]) for case, name in whole)
    tables = sections(list(known.values()), num_cases)
    running.report("conformance", args, tables, is_complete=all(work in known for work in whole))
    return 1 if any(line["outcome"] in FAULTS for line in known.values()) else 0


if __name__ == "__main__":
    raise SystemExit(running.with_a_code_cache(main))
