"""Train architectures: every one that can be built from transformers, timm and torchvision, shrunk by rule.

    python bench/coverage.py [--sample N] [--family NAME] [--columns PATTERN,...] [--out FILE.json] [--jobs N]

An architecture trains where, under 1.3 x the smallest budget that `chunkc.BudgetError` names, it takes three steps,
evaluates a batch of another size and length under `no_grad`, takes two more steps, generates (where it can) and goes
through its `state_dict`, with plain PyTorch's losses, the same bits under another budget, and no more measured bytes
than the budget. Losses may be 1e-3 off, relatively, in fp32; or 1e-2, if plain PyTorch's own move as far where each
weight is rounded once. In mixed precision they are as close as the default backend's, or 1e-2. `COLUMNS` of
`coverage_table.py` say in what precision, with dropout as configured or none, with gradient checkpointing, with
Inductor's code or eager code. What fails is tried with the default backend: where that fails too, it does not count.

Each architecture has a process of its own; `--time-limit` is for each of its columns, in seconds of the processors'
time. Progress goes to standard error, a table to standard output, everything to bench/results/coverage-DATE.json,
rewritten after every architecture. An `--out` file that is there goes on: what it has is kept, and not trained again.
So samples, columns and runs that were stopped add up. Each cell says which commit it is of.

    --sample N      so many architectures, drawn by --seed
    --family NAME   a library, a family such as `llama`, or a pattern of whole names such as `timm/*/test_*`; or several
    --dozen         the fixed sample of the second test tier
    --columns       such as `eager/fp32,inductor/*` (default: all)
    --from FILE     takes over the answers of an earlier result, too; may be given several times
    --again         only what was refused or failed there
    --small         a trial: three architectures, two columns
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar

sys.path.insert(0, str(Path(__file__).resolve().parent))
from architectures.models import DOZEN
from architectures.table import COLUMNS, FAILED, REFUSED, TRAINED, counts, percentage
from measuring import forked, machine
from measuring.metrics import Row, Section, one
from measuring.subject_process import Process, SubjectFailed
from report import markdown

RESULTS = Path(__file__).resolve().parent / "results"

SMALL = ("transformers/gpt2/GPT2LMHeadModel", "timm/resnet/test_resnet", "torchvision/squeezenet/squeezenet1_0")
SMALL_COLUMNS = ("eager/fp32", "eager/autocast-bf16")

TIME_LIMIT_S = 300.0
"""Of the processors' time, for one column of one architecture."""

Answer = Mapping[str, Any]
"""`architecture`, `num_parameters` (None where it was not built), `cells` by column, and chunkc's `commit`."""


@dataclass(frozen=True)
class Spec:
    """Arguments of a worker (see `architectures/subject.py`)."""

    SCRIPT: ClassVar[str] = "architectures/subject.py"
    time_limit_s: float

    def to_json(self) -> str:
        return json.dumps({"time_limit_s": self.time_limit_s})


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; `columns` is a list of names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, metavar="N", help="so many architectures (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--family", metavar="NAME,...", help="libraries, families or patterns of whole names")
    parser.add_argument("--columns", default="*", metavar="PATTERN,...")
    parser.add_argument("--dozen", action="store_true", help="the fixed sample of the second test tier")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="goes on where it is there")
    parser.add_argument("--from", type=Path, action="append", default=[], metavar="FILE.json", dest="earlier")
    parser.add_argument("--again", action="store_true", help="only what was refused or failed in earlier results")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes side by side")
    parser.add_argument("--time-limit", type=float, default=TIME_LIMIT_S, metavar="SECONDS", help="for each column")
    parser.add_argument("--small", action="store_true", help="a trial run")
    parsed = parser.parse_args(arguments)
    patterns = [pattern.strip() for pattern in parsed.columns.split(",")]
    parsed.columns = [name for name in COLUMNS if any(fnmatchcase(name, pattern) for pattern in patterns)]
    if not parsed.columns:
        parser.error(f"no column matches; there are {', '.join(COLUMNS)}")
    if parsed.small and patterns == ["*"]:
        parsed.columns = list(SMALL_COLUMNS)
    return parsed


def chosen(names: Sequence[str], args: argparse.Namespace, known: Mapping[str, Answer]) -> dict[str, list[str]]:
    """The architectures to train, in the order in which they will be, each with its columns."""
    columns = {name: _left(args, known.get(name)) for name in _sampled(names, args, known)}
    return {name: left for name, left in columns.items() if left}


def _left(args: argparse.Namespace, answer: Answer | None) -> list[str]:
    """Columns that are asked for and have no answer, or with `--again` one that is to be tried again."""
    cells = {} if answer is None else answer["cells"]
    if args.again:
        return [column for column in args.columns if column in cells and _is_failure(cells[column])]
    return [column for column in args.columns if column not in cells]


def _sampled(names: Sequence[str], args: argparse.Namespace, known: Mapping[str, Answer]) -> list[str]:
    wanted = [name for name in names if _is_of(name, args.family)]
    if args.small:
        return [name for name in SMALL if name in wanted]
    if args.dozen:
        return [name for name in DOZEN if name in wanted]
    if args.again:
        wanted = [name for name in wanted if name in known and has_failed(known[name])]
    if args.sample is not None and args.sample < len(wanted):
        return random.Random(args.seed).sample(wanted, args.sample)
    return wanted


def _is_of(name: str, family: str | None) -> bool:
    parts = name.split("/")
    return family is None or any(one in parts or fnmatchcase(name, one) for one in family.split(","))


def has_failed(answer: Answer) -> bool:
    """Whether chunkc did not train it somewhere where the default backend does."""
    return any(map(_is_failure, answer["cells"].values()))


def _is_failure(cell: Mapping[str, Any]) -> bool:
    return cell["outcome"] in (REFUSED, FAILED)


def earlier_results(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Load earlier results: those of `--from`, then the `--out` file, where it is there."""
    files = [*args.earlier, *([args.out] if args.out is not None and args.out.exists() else [])]
    return [json.loads(file.read_text()) for file in files]


def add(known: dict[str, Answer], answer: Answer, commit: str) -> None:
    """An answer to those that are known; its cells take the place of earlier ones."""
    cells = {column: {"commit": commit, **cell} for column, cell in answer["cells"].items()}
    former = known.get(answer["architecture"], {"num_parameters": None, "cells": {}})
    num_parameters = answer["num_parameters"] or former["num_parameters"]
    known[answer["architecture"]] = {
        "architecture": answer["architecture"],
        "num_parameters": num_parameters,
        "cells": {**former["cells"], **cells},
    }


def trained(args: argparse.Namespace, workers: Sequence[Process], names: Mapping[str, list[str]]) -> Iterator[Answer]:
    """The answers as they come; a worker that died has failed in every column, and is replaced."""
    free: SimpleQueue[Process] = SimpleQueue()
    for worker in workers:
        free.put(worker)

    def ask(name: str) -> Answer:
        worker = free.get()
        try:
            return worker.ask(json.dumps({"architecture": name, "columns": names[name]}))
        except SubjectFailed as error:
            cell = {"outcome": FAILED, "stage": "", "message": str(error)[-300:], "seconds": 0.0}
            worker = Process(Spec(args.time_limit), timeout_s=worker_timeout_s(args)).__enter__()
            return {"architecture": name, "num_parameters": None, "cells": dict.fromkeys(names[name], cell)}
        finally:
            free.put(worker)

    with ThreadPoolExecutor(len(workers)) as pool:
        for future in as_completed([pool.submit(ask, name) for name in names]):
            yield future.result()
    while not free.empty():
        free.get().__exit__(None, None, None)


def worker_timeout_s(args: argparse.Namespace) -> float:
    """Time limit of a worker, longer than those of the processes that it watches."""
    return (len(args.columns) + 2) * args.time_limit * forked.WAITING


def sections(answers: Sequence[Answer], columns: Sequence[str]) -> list[Section]:
    """Percentages by column, what keeps the others from training, and every architecture."""
    by_column = [(name, [a["cells"][name] for a in answers if name in a["cells"]]) for name in columns]
    rows = []
    for name, cells in by_column:
        share = percentage(cells)
        metrics = {outcome: one("number", count) for outcome, count in counts(cells).items()}
        if share is not None:
            metrics = {"percent of what the default backend trains": one("number", round(share, 2)), **metrics}
        rows.append(Row({"column": name}, metrics))
    reasons: Counter[tuple[str, str]] = Counter()
    for _, cells in by_column:
        reasons.update((cell["outcome"], cell["message"][:160]) for cell in cells if _is_failure(cell))
    why = [
        Row({"outcome": outcome, "message": _plain(message)}, {"cells": one("number", count)})
        for (outcome, message), count in reasons.most_common()
    ]
    each = [
        Row(
            {
                "architecture": answer["architecture"],
                **{name: _short(cell) for name, cell in answer["cells"].items()},
            },
            {} if answer["num_parameters"] is None else {"parameters": one("number", answer["num_parameters"])},
            "; ".join(dict.fromkeys(_plain(c["message"]) for c in answer["cells"].values() if c["message"])),
            has_failed(answer),
        )
        for answer in sorted(answers, key=lambda answer: answer["architecture"])
    ]
    setting = {"num_architectures": len(answers)}
    return [
        Section("percentages", setting, rows),
        Section("why not", {}, why),
        Section("architectures", setting, each),
    ]


def _short(cell: Mapping[str, Any]) -> str:
    stage = f" ({cell['stage']})" if cell["stage"] and cell["outcome"] != TRAINED else ""
    return f"{cell['outcome']}{stage}"


def _plain(message: str) -> str:
    """Format as a cell of Markdown."""
    return message.replace("|", "/")


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, write, print; 1 where chunkc refused or failed at something that the default backend trains."""
    args = parse_args(arguments)
    console = Console(stderr=True)
    now = datetime.now(UTC)
    small = "-small" if args.small else ""
    out = args.out or RESULTS / f"coverage{small}-{now:%Y-%m-%d-%H%M}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    workers = [Process(Spec(args.time_limit), timeout_s=worker_timeout_s(args)) for _ in range(max(1, args.jobs))]
    for worker in workers:
        worker.__enter__()
    former = earlier_results(args)
    known: dict[str, Answer] = {}
    for earlier in former:
        for answer in earlier["answers"]:
            add(known, answer, answer.get("commit", earlier["versions"]["commit"]))
    names = chosen(workers[0].ready["architectures"], args, known)
    sample = {key: getattr(args, key) for key in ("sample", "seed", "family", "columns", "again")}
    result: dict[str, Any] = {
        "suite": "coverage",
        "is_small": args.small,
        "is_complete": False,
        "device": "cpu",
        "date": now.isoformat(timespec="seconds"),
        "hardware": machine.hardware(),
        "versions": machine.versions(),
        "samples": [*(sample for earlier in former for sample in samples_of(earlier)), sample],
        "sections": [],
        "answers": [],
    }
    bar = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with ProgressBar(*bar, console=console) as progress:
        task = progress.add_task("", total=len(names))
        for answer in trained(args, workers, names):
            add(known, answer, result["versions"]["commit"])
            _write(out, result, known)
            progress.update(task, advance=1, description=answer["architecture"])
            for column, cell in answer["cells"].items():
                if _is_failure(cell):
                    line = f"{answer['architecture']} {column}: {_short(cell)}: {cell['message']}"
                    console.print(line, markup=False, highlight=False)
    result["is_complete"] = True
    _write(out, result, known)
    print(markdown(result), flush=True)
    console.print(f"written: {out}", highlight=False)
    return 1 if any(map(has_failed, known.values())) else 0


def samples_of(result: Mapping[str, Any]) -> list[Any]:
    """Samples of a result's architectures, one entry for each run that added to it."""
    return result["samples"] if "samples" in result else [result["sample"]]


def _write(out: Path, result: dict[str, Any], known: Mapping[str, Answer]) -> None:
    """`result` with its answers and sections, aside and then renamed: the run may be stopped at any time."""
    answers = [known[name] for name in sorted(known)]
    columns = [column for column in COLUMNS if any(column in answer["cells"] for answer in answers)]
    result["answers"], result["sections"] = answers, [section.to_json() for section in sections(answers, columns)]
    aside = out.with_suffix(".tmp")
    aside.write_text(json.dumps(result, indent=1) + "\n")
    aside.replace(out)


if __name__ == "__main__":
    raise SystemExit(main())
