"""Train architectures: every one that can be built from transformers, timm and torchvision, shrunk by rule.

    python bench/coverage.py [--sample N] [--family NAME] [--columns PATTERN,...] [--out FILE.jsonl] [--jobs N]

An architecture trains where, under 1.3 x the smallest budget that `chunkc.BudgetError` names, it takes three steps,
evaluates a batch of another size and length under `no_grad`, takes two more steps, generates (where it can) and goes
through its `state_dict`, with plain PyTorch's losses, the same bits under another budget, and no more measured bytes
than the budget. Losses may be 1e-3 off, relatively, in fp32; or 1e-2, if plain PyTorch's own move as far where each
weight is rounded once. In mixed precision they are as close as the default backend's, or 1e-2. `COLUMNS` of
`architectures/table.py` say in what precision, with dropout as configured or none, with gradient checkpointing, with
Inductor's code or eager code. What fails is tried with the default backend: where that fails too, it does not count.

Each architecture has a process of its own; `--time-limit` is for each of its columns, in seconds of the processors'
time. Each cell is appended to `--out` as it comes, with the commit that it is of, and a later run goes on with what is
missing there. So samples, columns and runs that were stopped add up. A table goes to standard output.

    --sample N      so many architectures, drawn by --seed
    --family NAME   a library, a family such as `llama`, or a pattern of whole names such as `timm/*/test_*`; or several
    --dozen         the fixed sample of the second test tier
    --columns       such as `eager/fp32,inductor/*` (default: all)
    --from FILE     takes over the answers of an earlier result, too; may be given several times
    --again         only what was refused or failed there
    --report        run nothing, print what the file says
    --result FILE   also write everything as JSON, for bench/results/
    --small         a trial: three architectures, two columns
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from architectures.judge import Judge
from architectures.models import DOZEN, NotBuilt, architectures, build
from architectures.table import COLUMNS, FAILED, FAILURES, NOT_BUILT, sections
from judging import running
from judging.running import Work
from judging.table import Cell, Line

SMALL = ("transformers/gpt2/GPT2LMHeadModel", "timm/resnet/test_resnet", "torchvision/squeezenet/squeezenet1_0")
SMALL_COLUMNS = ("eager/fp32", "eager/autocast-bf16")

TIME_LIMIT_S = 300.0
"""Of the processors' time, for one column of one architecture."""


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; `columns` is a list of names."""
    parser = running.parser(__doc__, Path("runs/coverage.jsonl"), TIME_LIMIT_S)
    parser.add_argument("--sample", type=int, metavar="N", help="so many architectures (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--family", metavar="NAME,...", help="libraries, families or patterns of whole names")
    parser.add_argument("--dozen", action="store_true", help="the fixed sample of the second test tier")
    parser.add_argument("--from", type=Path, action="append", default=[], metavar="FILE.json", dest="earlier")
    return running.parsed(parser, arguments, COLUMNS, SMALL_COLUMNS)


def chosen(names: Sequence[str], args: argparse.Namespace, known: Mapping[Work, Line]) -> list[Work]:
    """The cells to make, architecture by architecture, in the order in which they will be."""
    asked = [(name, column) for name in _sampled(names, args, known) for column in args.columns]
    return [work for work in asked if (work in _failures(known) if args.again else work not in known)]


def _sampled(names: Sequence[str], args: argparse.Namespace, known: Mapping[Work, Line]) -> list[str]:
    wanted = [name for name in names if _is_of(name, args.family)]
    if args.small:
        return [name for name in SMALL if name in wanted]
    if args.dozen:
        return [name for name in DOZEN if name in wanted]
    if args.again:
        failed = {name for name, _ in _failures(known)}
        wanted = [name for name in wanted if name in failed]
    if args.sample is not None and args.sample < len(wanted):
        return random.Random(args.seed).sample(wanted, args.sample)
    return wanted


def _is_of(name: str, family: str | None) -> bool:
    parts = name.split("/")
    return family is None or any(one in parts or fnmatchcase(name, one) for one in family.split(","))


def _failures(known: Mapping[Work, Line]) -> frozenset[Work]:
    """What chunkc did not train and the default backend does."""
    return frozenset(work for work, line in known.items() if line["outcome"] in FAILURES)


def judge(work: Sequence[Work]) -> Iterator[dict[str, Any]]:
    """Judge one architecture, column by column."""
    name, _ = work[0]
    try:
        subject = build(name)
    except NotBuilt as error:
        yield from [asdict(Cell(NOT_BUILT, str(error)))] * len(work)
        return
    judging = Judge(subject)
    for _, column in work:
        yield asdict(judging.cell(COLUMNS[column])) | {"num_parameters": subject.num_parameters}


_OF_ARCHITECTURES = ("case", "column", "num_parameters")
"""Fields of a line that a cell of a result's answers lacks."""


def answers_of(known: Mapping[Work, Line]) -> list[dict[str, Any]]:
    """All cells as a result has them: by architecture and column."""
    answers: dict[str, dict[str, Any]] = {}
    for (name, column), line in sorted(known.items()):
        answer = answers.setdefault(name, {"architecture": name, "num_parameters": None, "cells": {}})
        answer["num_parameters"] = answer["num_parameters"] or line.get("num_parameters")
        answer["cells"][column] = {key: value for key, value in line.items() if key not in _OF_ARCHITECTURES}
    return list(answers.values())


def lines_of(result: Mapping[str, Any]) -> dict[Work, Line]:
    """Make lines of a result's answers."""
    return {
        (answer["architecture"], column): {
            "case": answer["architecture"],
            "column": column,
            "num_parameters": answer["num_parameters"],
            **cell,
        }
        for answer in result["answers"]
        for column, cell in answer["cells"].items()
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, append, print; 1 where chunkc refused or failed at something that the default backend trains."""
    args = parse_args(arguments)
    known: dict[Work, Line] = {}
    for earlier in args.earlier:
        known |= lines_of(json.loads(earlier.read_text()))
    known |= running.read(args.out)
    if not args.report:
        work = chosen(architectures(), args, known)
        groups = [list(group) for _, group in groupby(work, key=lambda of_work: of_work[0])]
        running.run(args, groups, judge, lambda ended: Cell(FAILED, ended), known)
    running.report("coverage", args, sections(list(known.values())), is_complete=True, answers=answers_of(known))
    return 1 if _failures(known) else 0


if __name__ == "__main__":
    raise SystemExit(running.with_a_code_cache(main))
