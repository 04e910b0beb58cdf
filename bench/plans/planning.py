"""Time the planning of a traced model for a budget that it was not planned for before.

    python bench/plans/planning.py [--small] [--only TEXT] [--overlap none|backward] [--rounds N] [--out FILE.json]

Each case (a model, a machine, a batch size, a budget) is traced, described and planned once, for the whole device, as
`chunkc explain --activations auto` does. Then it is planned for the budget: a step is run dry, which is where ways
are searched, and its plans are made, put into graphs and verified. Prints the processor's seconds of both (median of
the rounds), the simulated step, and a digest of the plans: equal digests are equal plans, event for event and byte for
byte. Nothing runs. `--out` saves the figures with the machine and its versions.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from measuring import machine
from peers.baselines import Case, replayed
from rich.console import Console
from rich.table import Table

from chunkc.explaining.memory_timeline import StepPlans
from chunkc.ir.simulate import step_time
from chunkc.ir.units import parse_nbytes
from chunkc.optim.update_mode import BACKWARD, NONE
from chunkc.utils.garbage import no_automatic_collection

CASES = (
    Case("gpt-1b", "rtx3090", 8, "20.8GiB"),
    Case("gpt-1b", "rtx3090", 8, "12GiB"),
    Case("gpt-18b", "rtx3090", 8, "20.8GiB"),
    Case("gpt-175b", "a100-40g", 8, "36GiB"),
    Case("mixtral-8x7b", "a100-80g", 1, "70GiB"),
)
SMALL_CASES = (Case("gpt2-small", "rtx2060-6g", 2, "1.2GiB", 256),)


@dataclass(frozen=True)
class Finding:
    """Processor seconds that planning a case took.

    Attributes:
        first_s: to describe the graph, and to plan for the whole device.
        dry_run_s, plans_s: to plan for the case's own budget afterwards.
        step_s: seconds of the simulated step.
    """

    case: Case
    first_s: float
    dry_run_s: float
    plans_s: float
    step_s: float
    digest: str

    @property
    def planning_s(self) -> float:
        return self.dry_run_s + self.plans_s


def digest(step: StepPlans) -> str:
    """Digest of a plan: equal plans have equal ones."""
    text = "".join(map(str, (*step.plans, sorted(step.resident), step.tiles)))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def measure(case: Case, overlap: str) -> Finding:
    """Plan a case on a graph of its own: what an earlier round has found out is not known to it."""
    replayed_ = replayed(replace(case, budget="auto"), overlap, "auto")
    predicted, budget = replayed_.predicted, parse_nbytes(case.budget)
    begun_s = time.process_time()
    with no_automatic_collection():
        predicted.planned(predicted.fitting(replayed_.budget_nbytes))
        first_s = time.process_time()
        dry_run = predicted.fitting(budget)
        dry_run_s = time.process_time()
        step = predicted.planned(dry_run)
        planned_s = time.process_time()
    if dry_run.budget_nbytes != budget:
        raise SystemExit(f"{case} does not fit: it takes {dry_run.budget_nbytes:,} bytes")
    seconds = step_time(predicted.events(step)).total
    spans = first_s - begun_s, dry_run_s - first_s, planned_s - dry_run_s
    return Finding(case, *spans, seconds, digest(step))


def examine(case: Case, overlap: str, num_rounds: int) -> Finding:
    """Medians of some rounds.

    Raises:
        AssertionError: their plans are not the same.
    """
    found = [measure(case, overlap) for _ in range(num_rounds)]
    assert len({one.digest for one in found}) == 1, f"{case}: plans differ from round to round"
    times = (median(getattr(one, name) for one in found) for name in ("first_s", "dry_run_s", "plans_s"))
    return Finding(case, *times, found[0].step_s, found[0].digest)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a small model, within seconds")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="only cases with this text in model, hardware and budget"
    )
    parser.add_argument("--overlap", choices=(NONE, BACKWARD), default=BACKWARD)
    parser.add_argument("--rounds", type=int, default=1, metavar="N")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    options = parser.parse_args(arguments)
    cases = SMALL_CASES if options.small else CASES
    table = Table("case", "first plan", "dry run", "plans", "planning", "step", "digest")
    found = []
    for case in (case for case in cases if options.only.lower() in f"{case.model} {case.hardware} {case.budget}"):
        one = examine(case, options.overlap, options.rounds)
        found.append(asdict(one))
        times = (one.first_s, one.dry_run_s, one.plans_s, one.planning_s, one.step_s)
        name = f"{case.model}, {case.batch_size}, {case.hardware}, {case.budget}"
        table.add_row(name, *(f"{seconds:.4g} s" for seconds in times), one.digest)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    if options.out is not None:
        about = {"hardware": machine.hardware(), "versions": machine.versions(), "overlap": options.overlap}
        options.out.write_text(json.dumps({**about, "cases": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
