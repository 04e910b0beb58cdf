"""The benchmark harness.

    python bench/run.py [SUITE ...] [--small] [--out FILE.json]

Suites (all, where none is named):

    fits    everything fits: time per step and cold compilation beside plain torch.compile
    disk    smaller and smaller budgets, model data in RAM or on disk

`--small` rehearses a suite on a tiny model. Results go to bench/results/SUITE-DATE.json, rewritten after
every section, so that a run cut short keeps what it had; bench/report.py makes Markdown of them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

sys.path.insert(0, str(Path(__file__).resolve().parent))
import disk
import fits
import machine
from driving import SubjectFailed
from metrics import Section
from report import markdown

RESULTS = Path(__file__).resolve().parent / "results"


class Suite(Protocol):
    """Measures and yields sections; `show` gets what is being done, the parts done, and of how many."""

    def __call__(self, *, is_small: bool, show: Callable[[str, int, int], None]) -> Iterator[Section]: ...


SUITES: Mapping[str, Suite] = {"fits": fits.run, "disk": disk.run}


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; `suites` are names, `out` a path or None."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"of {', '.join(SUITES)} (default: all)")
    parser.add_argument("--small", action="store_true", help="a tiny model, hardly repeated")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="of one suite")
    parsed = parser.parse_args(arguments)
    for name in parsed.suites:
        if name not in SUITES:
            parser.error(f"there is no suite {name!r}; there are {', '.join(SUITES)}")
    parsed.suites = list(dict.fromkeys(parsed.suites)) or list(SUITES)
    if parsed.out is not None and len(parsed.suites) > 1:
        parser.error("--out is for one suite; name it")
    return parsed


def default_out(suite: str, is_small: bool, now: datetime) -> Path:
    """Where a result goes unless told otherwise; rehearsals apart from measurements."""
    small = "-small" if is_small else ""
    return RESULTS / f"{suite}{small}-{now:%Y-%m-%d-%H%M}.json"


def run_suite(name: str, *, is_small: bool, out: Path, console: Console, now: datetime) -> dict[str, Any]:
    """Run a suite under a progress bar and write its result, after every section anew; returns it."""
    result: dict[str, Any] = {
        "suite": name,
        "is_small": is_small,
        "is_complete": False,
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
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=None)

        def show(what: str, num_done: int, num_parts: int) -> None:
            progress.update(task, description=what, completed=num_done, total=num_parts)

        for section in SUITES[name](is_small=is_small, show=show):
            result["sections"].append(section.to_json())
            _write(out, result)
        result["is_complete"] = True
        _write(out, result)
        progress.update(task, description="done", completed=progress.tasks[0].total)
    return result


def _write(out: Path, result: Mapping[str, Any]) -> None:
    out.write_text(json.dumps(result, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suites named; 1 where a subject failed. Markdown goes to standard output, progress to error."""
    args = parse_args(arguments)
    console = Console(stderr=True)
    for name in args.suites:
        now = datetime.now(UTC)
        out = args.out or default_out(name, args.small, now)
        try:
            result = run_suite(name, is_small=args.small, out=out, console=console, now=now)
        except SubjectFailed as error:
            console.print(str(error), markup=False, highlight=False)
            return 1
        print(markdown(result))
        console.print(f"written: {out}", highlight=False)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
