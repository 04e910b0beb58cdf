"""The benchmark harness.

    python bench/run.py [SUITE ...] [--small] [--out FILE.json]

Suites (all but `promise` and `peers`, where none is named):

    fits    everything fits: time per step and cold compilation against plain torch.compile
    disk    reads of a disk home; smaller and smaller budgets, model data in RAM or on disk
    adam    Adam updates: bytes per second against the memory bound, and other Adams
    budget  models under budgets of 6 to 32 GB against other systems that offload, and what the machine allows
    scale   the largest model that trains under a budget
    promise   the largest model that the machine can hold under 6 GB, as long as there is time
    peers   two cases of budget, for a GPU that is at hand for minutes
    checkpoint   what saving a checkpoint every 50 steps costs
    ranks   several processes on gloo, or on all GPUs on NCCL: against DDP and FSDP2
    prediction   bytes planned from CPU and from CUDA fakes against measured ones

`--small` tries a suite on a tiny model. Results go to bench/results/SUITE-DATE.json, rewritten after every
section, so that a run cut short keeps what it had; bench/report.py makes Markdown of them. Exits with 1 where chunkc
itself failed; other systems that fail are rows that say why.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar

sys.path.insert(0, str(Path(__file__).resolve().parent))
from measuring import machine
from measuring.context import Context
from measuring.metrics import Section
from measuring.subject_process import SubjectFailed, TimedOut
from report import markdown
from suites import adam, budget, checkpoint, disk, fits, prediction, promise, ranks, scale

RESULTS = Path(__file__).resolve().parent / "results"

Suite = Callable[[Context], Iterator[Section]]
"""Measures and yields sections as they come; a title that comes again stands for the section as it is by then."""

SUITES: Mapping[str, Suite] = {
    "fits": fits.run,
    "disk": disk.run,
    "adam": adam.run,
    "budget": budget.run,
    "scale": scale.run,
    "prediction": prediction.run,
    "promise": promise.run,
    "peers": budget.run_peers,
    "checkpoint": checkpoint.run,
    "ranks": ranks.run,
}


IN_MINUTES = ("promise", "peers")
"""Suites for a GPU that is at hand for minutes; run where they are named."""


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; `suites` are names, `out` a path or None, `systems` a tuple of names or patterns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"of {', '.join(SUITES)} (default: all)")
    parser.add_argument("--small", action="store_true", help="a tiny model, hardly repeated")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="of one suite")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="where models compute (default: a GPU if there is one)"
    )
    parser.add_argument("--time-limit", type=_seconds, metavar="SECONDS", help="begin no case later than this")
    parser.add_argument("--case", default="*", metavar="PATTERN", help='cases to run, such as "llama3-8b@6*"')
    parser.add_argument("--systems", default="", metavar="PATTERN,...", help="subject and peers (default: all)")
    parser.add_argument("--facts", type=Path, metavar="FILE.json", help="what bench/gpu_facts.py found here")
    parsed = parser.parse_args(arguments)
    for name in parsed.suites:
        if name not in SUITES:
            parser.error(f"there is no suite {name!r}; there are {', '.join(SUITES)}")
    parsed.suites = list(dict.fromkeys(parsed.suites)) or [name for name in SUITES if name not in IN_MINUTES]
    if parsed.out is not None and len(parsed.suites) > 1:
        parser.error("--out is for one suite; name it")
    if parsed.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here")
    parsed.device = parsed.device or ("cuda" if torch.cuda.is_available() else "cpu")
    parsed.systems = tuple(name.strip() for name in parsed.systems.split(",") if name.strip())
    return parsed


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < 1e9:
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds above 0")
    return seconds


def default_out(suite: str, is_small: bool, now: datetime) -> Path:
    """Default path of a result; small runs apart from measurements."""
    small = "-small" if is_small else ""
    return RESULTS / f"{suite}{small}-{now:%Y-%m-%d-%H%M}.json"


def run_suite(
    name: str,
    *,
    is_small: bool,
    out: Path,
    console: Console,
    now: datetime,
    device: str = "cpu",
    deadline_s: float | None = None,
    case_pattern: str = "*",
    systems: tuple[str, ...] = (),
    facts: Path | None = None,
) -> dict[str, Any]:
    """Run a suite under a progress bar and write its result, after every section anew; returns it."""
    result: dict[str, Any] = {
        "suite": name,
        "is_small": is_small,
        "is_complete": False,
        "device": device,
        "date": now.isoformat(timespec="seconds"),
        "hardware": machine.hardware(),
        "versions": machine.versions(),
        "sections": [],
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    columns = (
        TextColumn(f"{name:<6}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with ProgressBar(*columns, console=console) as progress:
        task = progress.add_task("", total=None)

        def show(what: str, num_done: int, num_parts: int) -> None:
            progress.update(task, description=what, completed=num_done, total=num_parts)

        context = Context(is_small, device, show, deadline_s, case_pattern, systems, facts)
        _write(out, result)
        sections: dict[str, Any] = {}
        for section in SUITES[name](context):
            sections[section.title] = section.to_json()
            result["sections"] = list(sections.values())
            _write(out, result)
        result["is_complete"] = not context.is_out_of_time
        _write(out, result)
        progress.update(task, description="done", completed=progress.tasks[0].total)
    return result


def failures(result: Mapping[str, Any]) -> list[str]:
    """List rows in which chunkc failed, a line each."""
    return [
        f"{section['title']}: {', '.join(row['labels'].values())}: {row['note']}"
        for section in result["sections"]
        for row in section["rows"]
        if row.get("is_failure")
    ]


def _write(out: Path, result: Mapping[str, Any]) -> None:
    """Replace the file as a whole: a run that is killed leaves what it had."""
    fresh = out.with_name(f".{out.name}.{os.getpid()}")
    fresh.write_text(json.dumps(result, indent=1) + "\n")
    os.replace(fresh, out)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suites named; 1 where a subject failed. Markdown goes to standard output, progress to error."""
    args = parse_args(arguments)
    console = Console(stderr=True)
    deadline_s = None if args.time_limit is None else time.monotonic() + args.time_limit
    has_failed = False
    for name in args.suites:
        now = datetime.now(UTC)
        out = args.out or default_out(name, args.small, now)
        try:
            result = run_suite(
                name,
                is_small=args.small,
                out=out,
                console=console,
                now=now,
                device=args.device,
                deadline_s=deadline_s,
                case_pattern=args.case,
                systems=args.systems,
                facts=args.facts,
            )
        except TimedOut as error:
            console.print(str(error), markup=False, highlight=False)
            if deadline_s is None or time.monotonic() < deadline_s:
                return 1
            continue
        except SubjectFailed as error:
            console.print(str(error), markup=False, highlight=False)
            return 1
        print(markdown(result), flush=True)
        console.print(f"written: {out}", highlight=False)
        for line in failures(result):
            console.print(f"FAILED {line}", markup=False, highlight=False)
            has_failed = True
    return 1 if has_failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
