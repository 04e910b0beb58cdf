"""A real training run: a byte-level GPT learns Python from the standard library's sources, in a third of the memory.

    python bench/train.py [--steps 1500] [--fraction 1/3] [--prompt "def "] [--out runs/train] [--picture PNG]

Two runs of the same model, text and seed, each in a fresh process: plain `torch.compile`; and chunkc under a part of
the memory that the first was measured to need, model data on disk, the allocator refusing every byte over the budget.
Ctrl-C ends the present run with a checkpoint, and the same command goes on. At last, plain PyTorch loads the model
from chunkc's latest checkpoint and continues a prompt. Exits with 1 where a promise is broken.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import torch
from rich.console import Console
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parent))
from demo import SIZES, RunFailed, events_of, parser_of_runs, print_verdicts, progress_of_runs
from measuring.figures import draw_losses
from measuring.one_run import RunSpec
from models.gpt import GPT, GPTConfig

NUM_LAST = 10
"""The last tenth of the losses is what runs are compared by."""

LOSS_TOLERANCE = 0.02
"""Of the mean loss there, relatively. Other segments round otherwise, and training makes roundings grow."""

SAMPLE_LENGTH = 600
TEMPERATURE = 0.7


class Stopped(Exception):
    """The user ended a run, which can go on."""


@dataclass(frozen=True)
class Trained:
    """A run that is done: every loss, and the fields of its last line."""

    losses: tuple[float, ...]
    step_time_s: float
    num_parameters: int
    end: dict[str, Any]

    @property
    def last_loss(self) -> float:
        """The mean of the last tenth."""
        return statistics.fmean(self.losses[-max(1, len(self.losses) // NUM_LAST) :])


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line: the demo's, and what is sampled and drawn at the end."""
    parser = parser_of_runs(__doc__, 1500, "runs/train")
    parser.add_argument("--lr", type=float, default=1e-3, help="the highest learning rate (default 0.001)")
    parser.add_argument("--prompt", default="def ", help='what the model continues (default "def ")')
    parser.add_argument("--picture", type=Path, help="where to draw the losses, too (a README's, say)")
    return parser.parse_args(arguments)


def other_settings(args: argparse.Namespace) -> str:
    """Describe differences from the folder's runs, which cannot go on then; "" where nothing does.

    The first time, the settings are noted there.
    """
    names = ("steps", "size", "fraction", "data", "home", "seed", "lr")
    settings = {name: str(getattr(args, name)) for name in names} | {"torch": torch.__version__}
    path = args.out / "settings.json"
    if not path.exists():
        path.write_text(json.dumps(settings, indent=1) + "\n")
        return ""
    noted = json.loads(path.read_text())
    differing = [name for name, value in settings.items() if noted.get(name) != value]
    return ", ".join(f"{name} {noted.get(name)}, not {settings[name]}" for name in differing)


def train(spec: RunSpec, folder: Path, log: TextIO, show: Callable[[int, str], None]) -> Trained:
    """Train, or go on; what was trained before is read from the folder, where losses are kept with checkpoints.

    Raises:
        Stopped: by Ctrl-C.
        RunFailed: the process failed.
    """
    done, path = folder / "done.json", folder / "steps.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    steps = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if done.exists():
        about = json.loads(done.read_text())
    else:
        about = {}
        for event in events_of(replace(spec, checkpoints=str(folder / "checkpoints")), log):
            if event["event"] == "begin":
                about["num_parameters"] = event["num_parameters"]
                steps = steps[: event["step"]]
                path.write_text("".join(json.dumps(step) + "\n" for step in steps))
                show(len(steps), "compiling")
            elif event["event"] == "step":
                steps.append(event)
                with path.open("a") as file:
                    file.write(json.dumps(event) + "\n")
                show(len(steps), f"loss {event['loss']:.4f}")
            elif event["event"] == "stopped":
                raise Stopped
            else:
                about["end"] = event
        done.write_text(json.dumps(about))
    show(len(steps), f"loss {steps[-1]['loss']:.4f}")
    step_time_s = statistics.median(step["step_s"] for step in steps)
    return Trained(tuple(step["loss"] for step in steps), step_time_s, about["num_parameters"], about["end"])


def train_both(args: argparse.Namespace, console: Console, log: TextIO) -> tuple[Trained, Trained, int]:
    """The two runs under a progress bar: plain and limited; and the budget in bytes."""
    config, batch_size = SIZES[args.size]
    data = None if args.data is None else str(args.data.resolve())
    spec = RunSpec("plain", config, batch_size, args.steps, args.seed, args.lr, data=data, home=args.home)
    with progress_of_runs(console) as progress:
        names = ("plain torch.compile", "chunkc under the budget")
        tasks = [progress.add_task(name, total=args.steps, start=False, note="") for name in names]

        def run(index: int, spec: RunSpec, folder: Path) -> Trained:
            progress.start_task(tasks[index])
            result = train(
                spec, folder, log, lambda number, note: progress.update(tasks[index], completed=number, note=note)
            )
            progress.stop_task(tasks[index])
            return result

        plain = run(0, spec, args.out / "plain")
        budget_nbytes = int(plain.end["measured_peak_nbytes"] * args.fraction)
        limited = replace(spec, mode="chunkc", memory_budget_nbytes=budget_nbytes, is_limited=True)
        return plain, run(1, limited, args.out / "chunkc"), budget_nbytes


def latest_model(folder: Path) -> Path:
    """The model's file in the latest checkpoint of a run that is done."""
    return max((folder / "checkpoints").glob("step-*")) / "model.safetensors"


@torch.no_grad()
def sample(model: GPT, config: GPTConfig, prompt: bytes, length: int, seed: int) -> bytes:
    """The prompt and what the model continues it with, byte by byte."""
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    for _ in range(length):
        logits = model.logits(torch.tensor([text[-config.length :]]))[0, -1]
        text.append(int(torch.multinomial((logits / TEMPERATURE).softmax(0), 1, generator=generator)))
    return bytes(text)


def judge(plain: Trained, limited: Trained, budget_nbytes: int) -> dict[str, bool]:
    """Promises, in words, and whether each was kept."""
    measured, predicted = (limited.end[f"{kind}_peak_nbytes"] for kind in ("measured", "predicted"))
    return {
        "measured peak <= predicted peak <= budget": measured <= predicted <= budget_nbytes,
        "the last losses within 2 % of plain torch.compile's": abs(limited.last_loss - plain.last_loss)
        <= LOSS_TOLERANCE * plain.last_loss,
        "the loss has halved": limited.last_loss <= limited.losses[0] / 2,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Train both and sample; 0 where every promise was kept, 130 after Ctrl-C."""
    args = parse_args(arguments)
    console = Console()
    args.out.mkdir(parents=True, exist_ok=True)
    start_s = time.perf_counter()
    if differences := other_settings(args):
        text = f"{args.out} holds other runs ({differences}): remove it, or give another --out"
        console.print(text, markup=False, highlight=False)
        return 1
    before = signal.signal(signal.SIGINT, lambda number, frame: None)  # the run's process has it, too, and ends well
    try:
        with (args.out / "log.txt").open("a") as log:
            plain, limited, budget_nbytes = train_both(args, console, log)
    except Stopped:
        console.print("stopped, with a checkpoint; the same command goes on")
        return 130
    except RunFailed as error:
        console.print(str(error), markup=False, highlight=False)
        return 1
    finally:
        signal.signal(signal.SIGINT, before)
    config, _ = SIZES[args.size]
    model = GPT(config)
    path = latest_model(args.out / "chunkc")
    model.load_state_dict(load_file(path))
    text = sample(model, config, args.prompt.encode(), SAMPLE_LENGTH, args.seed).decode(errors="replace")
    (args.out / "sample.txt").write_text(text + "\n")
    peaks = [f"{run.end['measured_peak_nbytes'] / 2**20:.0f} MiB" for run in (plain, limited)]
    curves = {f"plain torch.compile, {peaks[0]}": plain.losses, f"chunkc, {peaks[1]}": limited.losses}
    for path_of_picture in filter(None, (args.out / "losses.png", args.picture)):
        draw_losses(path_of_picture, curves)
    verdicts = judge(plain, limited, budget_nbytes)
    summary = {
        "num_parameters": plain.num_parameters,
        "num_steps": args.steps,
        "plain_peak_nbytes": plain.end["measured_peak_nbytes"],
        "memory_budget_nbytes": budget_nbytes,
        "measured_peak_nbytes": limited.end["measured_peak_nbytes"],
        "plain_step_time_s": plain.step_time_s,
        "step_time_s": limited.step_time_s,
        "plain_last_loss": plain.last_loss,
        "last_loss": limited.last_loss,
        "largest_loss_difference": max(abs(a - b) for a, b in zip(plain.losses, limited.losses, strict=True)),
        "model": str(path),
        "torch": torch.__version__,
        "promises": verdicts,
    }
    (args.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    for key, value in summary.items():
        if key != "promises":
            console.print(f"{key:<26} {value}", highlight=False, markup=False)
    console.print(f"\n{text}\n", highlight=False, markup=False)
    print_verdicts(console, verdicts)
    console.print(f"{time.perf_counter() - start_s:.0f} s; {args.out}/: summary.json losses.png sample.txt")
    return 0 if all(verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
