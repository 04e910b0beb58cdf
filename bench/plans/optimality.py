"""Compare chunkc's predicted step with a lower bound, and with other policies' plans.

    python bench/plans/optimality.py [--small] [--only TEXT] [--overlap none|backward|auto] [--out FILE.json]

For each case (a model, a machine, a batch size) the step is planned as `chunkc explain --activations auto` does, and
timed by its simulator. The same calls, bytes and rates go to

- the bound: a linear program over what is kept, copied and made again, and when (`optimality_bound`), solved by HiGHS;
- the policies of other systems (`policies`), timed by the same simulator, each alone, with every block's activations
  recomputed, with PyTorch's `activation_memory_budget`, and with the largest activations offloaded (`baselines`).

Nothing runs. Prints a table and saves every figure: by default bench/results/optimality-DATE.json, with `--small` only
where `--out` says. `step_time_s` and `bytes_moved` are null where no plan fits the device.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from measuring import machine
from peers.baselines import TREATMENTS, Case, baselines, plan, timed
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from chunkc.optim.update_mode import AUTO
from plans.optimality_bound import lower_bound
from plans.optimality_problem import problem_of

RESULTS = Path(__file__).resolve().parents[1] / "results"

BATCH_SIZES = {
    "gpt2-xl": (1, 4, 16),
    "llama3-8b": (1, 2, 8),
    "vit-large": (16, 64, 256),
    "mixtral-8x7b": (1, 2, 8),
    "unet": (2, 8, 32),
}
CASES = tuple(
    Case(model, hardware, batch_size)
    for model, batch_sizes in BATCH_SIZES.items()
    for batch_size in batch_sizes
    for hardware in ("rtx2060-6g", "rtx3090", "a100-80g", "h200")
)
SMALL_CASES = (Case("gpt2-small", "rtx2060-6g", 2, "1.2GiB", 256), Case("bert-base", "rtx2060-6g", 4, "1.2GiB", 128))


@dataclass(frozen=True)
class Finding:
    """Results of a case; seconds and bytes of one step, None where it does not fit."""

    model: str
    hardware: str
    batch_size: int
    memory_budget_nbytes: int
    step_time_s: float | None
    bytes_moved: int | None
    lower_bound_s: float | None
    lower_bound_bytes: float | None
    baselines: Mapping[str, float]

    @property
    def distance(self) -> float | None:
        """Relative distance of the step from the bound."""
        if self.step_time_s is None or not self.lower_bound_s:
            return None
        return self.step_time_s / self.lower_bound_s - 1

    @property
    def is_slower(self) -> bool:
        """Whether another policy's step is quicker, or fits where this does not."""
        return min(self.baselines.values(), default=math.inf) < (self.step_time_s or math.inf) * (1 - 1e-9)


def examine(case: Case, overlap: str, *, exact: bool) -> Finding:
    """Plan a case, bound it, and hold other policies against it."""
    planned = plan(case, overlap, "auto")
    step = planned.step or planned.predicted.planned(planned.dry_run)
    early, machine_ = planned.updates.mode.in_backward, planned.hardware
    problem = problem_of(planned.captured, step, planned.updates, machine_, planned.budget_nbytes, early=early)
    bound = lower_bound(problem, exact=exact)
    fewest = lower_bound(problem, least_bytes=True, exact=exact)
    step_s, moved = (None, None) if planned.step is None else timed(planned, step, step.phases)
    treatments = TREATMENTS[:1] if moved == 0 else TREATMENTS  # where nothing has to move, they cost time and save none
    return Finding(
        case.model,
        case.hardware,
        case.batch_size,
        planned.budget_nbytes,
        step_s,
        moved,
        bound.seconds,
        fewest.nbytes,
        dict(baselines(case, treatments)),
    )


def show(findings: Sequence[Finding], console: Console) -> None:
    """The findings as a table."""
    table = Table("model", "machine", "batch", "step", "bound", "above it", "best other policy", "its step")
    for found in findings:
        best = min(found.baselines, key=lambda name: found.baselines[name], default=None)
        table.add_row(
            found.model,
            found.hardware,
            str(found.batch_size),
            _seconds(found.step_time_s),
            _seconds(found.lower_bound_s),
            "" if found.distance is None else f"{found.distance:.1%}",
            best or "",
            _seconds(None if best is None else found.baselines[best]),
        )
    console.print(table)
    if distances := [found.distance for found in findings if found.distance is not None]:
        slower = sum(found.is_slower for found in findings)
        console.print(
            f"above the bound: median {median(distances):.1%}, most {max(distances):.1%}; "
            f"slower than another policy: {slower} of {len(findings)}"
        )


def _seconds(value: float | None) -> str:
    return "does not fit" if value is None else f"{value:.3g} s"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="two small models, under a minute")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases with this text in 'model machine batch'")
    parser.add_argument("--overlap", default=AUTO, help="as the optimizer's argument (default: auto)")
    parser.add_argument("--exact", action="store_true", help="whole gaps, not parts: for small instances")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    options = parser.parse_args(arguments)
    every = SMALL_CASES if options.small else CASES
    cases = [one for one in every if options.only in f"{one.model} {one.hardware} {one.batch_size}"]
    now = datetime.now(UTC)
    out = options.out or (None if options.small else RESULTS / f"optimality-{now:%Y-%m-%d-%H%M}.json")
    result = {"date": now.isoformat(timespec="seconds"), "versions": machine.versions(), "overlap": options.overlap}
    findings: list[Finding] = []
    with Progress(console=Console(stderr=True)) as progress:
        for case in progress.track(cases, description="planning"):
            findings.append(examine(case, options.overlap, exact=options.exact))
            if out is not None:
                rows = [asdict(found) | {"above_bound": found.distance} for found in findings]
                out.write_text(json.dumps({**result, "cases": rows}, indent=1) + "\n")
    show(findings, Console())
    return 0


if __name__ == "__main__":
    sys.exit(main())
