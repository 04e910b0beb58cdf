"""Judge cases in copies of this process, and append each cell to a file, from which a later run goes on."""

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
from measuring import forked, machine
from measuring.metrics import Section
from report import markdown

from chunkc.runtime.device import cpu_allocator
from judging.table import Cell, Line

Work = tuple[str, str]
"""A case and a column."""

Judge = Callable[[Sequence[Work]], Iterator[Mapping[str, Any]]]
"""Yields the fields of each cell as it comes."""


def parser(description: str | None, out: Path, time_limit_s: float) -> argparse.ArgumentParser:
    """Make a command line with the options of every suite."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--columns", default="*", metavar="PATTERN,...")
    made.add_argument("--again", action="store_true", help="what was refused or failed once more")
    made.add_argument("--out", type=Path, default=out, metavar="FILE.jsonl", help="goes on where it is there")
    made.add_argument("--result", type=Path, metavar="FILE.json")
    made.add_argument("--report", action="store_true", help="run nothing")
    made.add_argument("--time-limit", type=float, default=time_limit_s, metavar="SECONDS", help="for each cell")
    made.add_argument("--threads", type=int, default=1, metavar="N", help="of PyTorch's")
    made.add_argument("--jobs", type=int, default=1, metavar="N", help="processes side by side")
    made.add_argument("--small", action="store_true", help="a trial run")
    return made


def parsed(
    made: argparse.ArgumentParser, arguments: Sequence[str] | None, columns: Iterable[str], small: Sequence[str]
) -> argparse.Namespace:
    """Parse a command line; `columns` becomes a list of names.

    Args:
        small: the columns of a trial run.
    """
    args = made.parse_args(arguments)
    if args.small and args.columns == "*":
        args.columns = ",".join(small)
    patterns = [pattern.strip() for pattern in args.columns.split(",")]
    args.columns = [name for name in columns if any(fnmatchcase(name, pattern) for pattern in patterns)]
    if not args.columns:
        made.error(f"no column matches; there are {', '.join(columns)}")
    if args.out.suffix == ".json":
        made.error("--out is a file of lines, FILE.jsonl; the tables go to --result")
    return args


def read(path: Path) -> dict[Work, Line]:
    """Load the cells of a file; the last of those for one case and column counts."""
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return {(line["case"], line["column"]): line for line in lines}


def run(
    args: argparse.Namespace,
    groups: Sequence[Sequence[Work]],
    judge: Judge,
    died: Callable[[str], Cell],
    known: dict[Work, Line],
) -> None:
    """Judge, and add each cell to `known` and to the `--out` file, which has all of `known` afterwards.

    Args:
        groups: what shares a process.
        died: what is said of a process that died or took too long -> the cell that it was at.
    """
    cpu_allocator.install()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    num_cells, commit, written = sum(map(len, groups)), machine.versions()["commit"], read(args.out)
    results = forked.results(groups, partial(_cells, judge, args.threads), args.time_limit, num_jobs=args.jobs)
    with args.out.open("a", buffering=1) as out:
        for line in (line for work, line in known.items() if work not in written):
            print(json.dumps(line), file=out)
        for number, ((case, column), found) in enumerate(results, 1):
            fields = found if isinstance(found, dict) else asdict(died(found)) | {"seconds": args.time_limit}
            line = {"case": case, "column": column, "commit": commit, **fields}
            known[case, column] = line
            print(json.dumps(line), file=out)
            said = ": ".join(filter(None, (line["outcome"], line["stage"], line["message"])))
            print(f"{number}/{num_cells} {case} {column} {said}"[:300], file=sys.stderr)


def _cells(judge: Judge, num_threads: int, work: Sequence[Work]) -> Iterator[dict[str, Any]]:
    """Judge one after the other in this process, which does nothing else."""
    torch.set_num_threads(num_threads)
    torch._inductor.config.compile_threads = 1
    gc.freeze()  # what was imported is not looked at by each collection
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    started_s = time.monotonic()
    for fields in judge(work):
        yield {**fields, "seconds": round(time.monotonic() - started_s, 1)}
        started_s = time.monotonic()


def report(
    suite: str, args: argparse.Namespace, sections: Sequence[Section], *, is_complete: bool, **more: Any
) -> None:
    """Write the tables, with what was run where, to `--result`, and print them."""
    result = {
        "suite": suite,
        "is_small": args.small,
        "is_complete": is_complete,
        "device": "cpu",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": machine.hardware(),
        "versions": machine.versions(),
        "sections": [section.to_json() for section in sections],
        **more,
    }
    if args.result is not None:
        args.result.write_text(json.dumps(result, indent=1) + "\n")
    print(markdown(result), flush=True)


def with_a_code_cache(main: Callable[[], int]) -> int:
    """Run a command with a folder for compiled code, which is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="chunkc-judging-") as folder:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", folder)
        return main()
