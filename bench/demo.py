"""The demonstration: a byte-level GPT trains on real text in a third of the memory that it needs.

    python bench/demo.py [--steps 30] [--fraction 1/3] [--data FILE] [--out runs/demo]

Three runs of the same model, text and seed, each in a fresh process: plain `torch.compile`; chunkc under a
budget, model data on disk, the allocator refusing every byte over the budget; and chunkc without a limit,
with losses that must be the same to the last bit. Exits with 1 where a promise is broken; `summary.json` is
written either way.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, TextIO

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

sys.path.insert(0, str(Path(__file__).resolve().parent))
from measuring.figures import MeasuredMoment, draw_losses, draw_memory, loss_curves, results_table
from measuring.one_run import RunSpec
from models.gpt import GPTConfig

SIZES = {
    "tiny": (GPTConfig(num_layers=2, width=64, num_heads=2, length=64), 2),
    "small": (GPTConfig(num_layers=7, width=512, num_heads=8, length=128), 2),
    "medium": (GPTConfig(num_layers=12, width=768, num_heads=12, length=256), 1),
}
"""Model and batch size; "small" has 22 million parameters, "medium" 85 million."""

NUM_WARM_STEPS = 2
"""Steps that compile (forward and backward, then the optimizer) and so count in no step time."""

LOSS_TOLERANCE = 1e-3
PREDICTION_TOLERANCE = 0.1
UNLIMITED_NBYTES = 2**40


@dataclass(frozen=True)
class RunResult:
    """Output of a run's process: every step, and the fields of its last line."""

    num_parameters: int
    losses: tuple[float, ...]
    steps_s: tuple[float, ...]
    end: dict[str, Any]

    @property
    def step_time_s(self) -> float:
        """The median, compiling steps left out where there are others."""
        return statistics.median(self.steps_s[NUM_WARM_STEPS:] or self.steps_s)

    @property
    def compile_time_s(self) -> float:
        """Extra seconds of the compiling steps."""
        return sum(self.steps_s[:NUM_WARM_STEPS]) - NUM_WARM_STEPS * self.step_time_s


class RunFailed(Exception):
    """A run's process ended with an error; the message holds the end of what it printed."""


def print_verdicts(console: Console, verdicts: Mapping[str, bool]) -> None:
    """Promises, kept or broken."""
    for promise, kept in verdicts.items():
        console.print("[green]kept  [/]" if kept else "[bold red]BROKEN[/]", promise, highlight=False)


def parser_of_runs(about: str | None, steps: int, out: str) -> argparse.ArgumentParser:
    """Parse what plain PyTorch and chunkc train; `fraction` is a Fraction, `data` and `out` are paths.

    Args:
        about: a script's docstring.
        steps: the default number.
        out: the default folder.
    """
    parser = argparse.ArgumentParser(description=(about or "").split("\n")[0])
    parser.add_argument("--steps", type=steps_of, default=steps, help=f"of each run (default {steps}, at least 3)")
    parser.add_argument("--size", choices=SIZES, default="small", help="of the model (default small: 22M)")
    parser.add_argument("--fraction", type=fraction_of, default=Fraction(1, 3), help="of plain memory (1/3)")
    parser.add_argument("--data", type=file_of, help="a file to train on (default: Python's standard library)")
    parser.add_argument("--home", default="disk", help='"disk", "disk:DIR" or "cpu" (default disk)')
    parser.add_argument("--out", type=Path, default=Path(out), help=f"a folder (default {out})")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line of the demo."""
    parser = parser_of_runs(__doc__, 30, "runs/demo")
    parser.add_argument("--lr", type=float, default=3e-4)
    return parser.parse_args(arguments)


def file_of(text: str) -> Path:
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text}")
    return Path(text)


def steps_of(text: str) -> int:
    steps = int(text)
    if steps <= NUM_WARM_STEPS:
        raise argparse.ArgumentTypeError(f"at least {NUM_WARM_STEPS + 1}, not {text}")
    return steps


def fraction_of(text: str) -> Fraction:
    try:
        fraction = Fraction(text)
    except ZeroDivisionError:
        fraction = Fraction(0)
    if not 0 < fraction <= 1:
        raise argparse.ArgumentTypeError(f"above 0 and at most 1, such as 1/3 or 0.5; not {text}")
    return fraction


def events_of(spec: RunSpec, log: TextIO) -> Iterator[dict[str, Any]]:
    """Train in a fresh Python; its standard error goes to `log`. Gives each event as it comes.

    Raises RunFailed where the process fails, or ends without saying that it has ended or was stopped.
    """
    command = [sys.executable, str(Path(__file__).parent / RunSpec.SCRIPT), spec.to_json()]
    log_start = log.tell()
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                event = json.loads(line)
                last = event["event"]
                yield event
        except BaseException:
            process.kill()  # on Ctrl-C, say: wait for nothing
            raise
    if process.returncode != 0 or last not in ("end", "stopped"):
        said = Path(log.name).read_bytes()[log_start:].decode(errors="replace").strip()
        raise RunFailed(f"the run ended with exit code {process.returncode}:\n{said[-3000:]}")


def run_in_process(spec: RunSpec, log: TextIO, on_event: Callable[[dict[str, Any]], None]) -> RunResult:
    """Train in a fresh Python (see `events_of`); each event goes to `on_event` as it comes."""
    events: list[dict[str, Any]] = []
    for event in events_of(spec, log):
        events.append(event)
        on_event(event)
    steps = [event for event in events if event["event"] == "step"]
    return RunResult(
        num_parameters=events[0]["num_parameters"],
        losses=tuple(event["loss"] for event in steps),
        steps_s=tuple(event["step_s"] for event in steps),
        end=events[-1],
    )


def summarise(plain: RunResult, limited: RunResult, unlimited: RunResult, budget_nbytes: int) -> dict[str, Any]:
    """The contents of summary.json; times are seconds, sizes bytes."""
    end = limited.end
    return {
        "plain_peak_nbytes": plain.end["measured_peak_nbytes"],
        "memory_budget_nbytes": budget_nbytes,
        "predicted_peak_nbytes": end["predicted_peak_nbytes"],
        "measured_peak_nbytes": end["measured_peak_nbytes"],
        "plain_losses": list(plain.losses),
        "losses": list(limited.losses),
        "unlimited_budget_losses": list(unlimited.losses),
        "step_time_s": limited.step_time_s,
        "plain_step_time_s": plain.step_time_s,
        "unlimited_budget_step_time_s": unlimited.step_time_s,
        "compile_time_s": limited.compile_time_s,
        "plain_compile_time_s": plain.compile_time_s,
        "max_loss_difference": max(abs(a - b) for a, b in zip(plain.losses, limited.losses, strict=True)),
        "num_parameters": plain.num_parameters,
        "chunk_size_nbytes": end["chunk_size_nbytes"],
        "num_chunks": end["num_chunks"],
        "traffic_nbytes": end["traffic_nbytes"],
        "time_s": end["time_s"],
    }


def judge(summary: dict[str, Any]) -> dict[str, bool]:
    """Promises of the demonstration, in words, and whether each was kept. A NaN loss breaks two."""
    predicted, measured = summary["predicted_peak_nbytes"], summary["measured_peak_nbytes"]
    losses, plain_losses = summary["losses"], summary["plain_losses"]
    return {
        "measured peak <= predicted peak <= budget": measured <= predicted <= summary["memory_budget_nbytes"],
        "predicted within 10 % of measured": abs(predicted - measured) <= PREDICTION_TOLERANCE * measured,
        "losses equal to those without a limit, to the last bit": all(
            loss == other for loss, other in zip(losses, summary["unlimited_budget_losses"], strict=True)
        ),
        "losses within 0.001 of plain torch.compile's": all(
            abs(loss - other) <= LOSS_TOLERANCE for loss, other in zip(losses, plain_losses, strict=True)
        ),
    }


def progress_of_runs(console: Console) -> Progress:
    """A bar for each run: its name, steps, time and a note."""
    columns = (
        TextColumn("{task.description:<24}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    return Progress(*columns, console=console)


def train_three(args: argparse.Namespace, console: Console, log: TextIO) -> tuple[RunResult, RunResult, RunResult, int]:
    """The three runs under a progress bar: plain, limited, unlimited; and the budget in bytes."""
    config, batch_size = SIZES[args.size]
    data = None if args.data is None else str(args.data.resolve())
    plain_spec = RunSpec("plain", config, batch_size, args.steps, args.seed, args.lr, data=data, home=args.home)
    with progress_of_runs(console) as progress:
        names = ("plain torch.compile", "chunkc under the budget", "chunkc, no limit")
        tasks = [progress.add_task(name, total=args.steps, start=False, note="") for name in names]

        def train(index: int, spec: RunSpec) -> RunResult:
            task = tasks[index]
            progress.start_task(task)
            progress.update(task, note="starting")

            def show(event: dict[str, Any]) -> None:
                if event["event"] == "begin":
                    progress.update(task, note="compiling")
                elif event["event"] == "step":
                    progress.update(task, advance=1, note=f"loss {event['loss']:.4f}")

            result = run_in_process(spec, log, show)
            progress.stop_task(task)
            return result

        plain = train(0, plain_spec)
        budget_nbytes = int(plain.end["measured_peak_nbytes"] * args.fraction)
        limited_spec = replace(plain_spec, mode="chunkc", memory_budget_nbytes=budget_nbytes, is_limited=True)
        limited = train(1, limited_spec)
        unlimited_spec = replace(limited_spec, memory_budget_nbytes=UNLIMITED_NBYTES, is_limited=False)
        unlimited = train(2, unlimited_spec)
    return plain, limited, unlimited, budget_nbytes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demonstration; 0 where every promise was kept."""
    args = parse_args(arguments)
    console = Console()
    start_s = time.perf_counter()
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / "log.txt").open("w") as log:
        try:
            plain, limited, unlimited, budget_nbytes = train_three(args, console, log)
        except RunFailed as error:
            console.print(str(error), markup=False, highlight=False)
            return 1
    summary = summarise(plain, limited, unlimited, budget_nbytes) | {
        "total_time_s": time.perf_counter() - start_s,
        "size": args.size,
        "fraction": str(args.fraction),
        "seed": args.seed,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "num_cpus": os.cpu_count(),
    }
    verdicts = judge(summary)
    summary["promises"] = verdicts
    (args.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    (args.out / "plan.txt").write_text(limited.end["plan_text"] + "\n")
    curves = {"plain torch.compile": plain.losses, "chunkc under the budget": limited.losses}
    draw_losses(args.out / "losses.png", curves | {"chunkc, no limit": unlimited.losses})
    moments: list[MeasuredMoment] = [tuple(moment) for moment in limited.end["moments"]]
    plain_peak_nbytes = summary["plain_peak_nbytes"]
    draw_memory(args.out / "memory.png", moments, budget_nbytes=budget_nbytes, plain_peak_nbytes=plain_peak_nbytes)
    console.print(results_table(summary))
    console.print(loss_curves(summary), highlight=False)
    print_verdicts(console, verdicts)
    console.print(f"{summary['total_time_s']:.0f} s; {args.out}/: summary.json memory.png losses.png plan.txt")
    return 0 if all(verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
