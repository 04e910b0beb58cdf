"""One subject of a benchmark: a GPT in training, in a process of its own, that obeys commands.

    python subject.py '{"model": {...}, ...}'        # the fields of SubjectSpec

Every command, a line on standard input, is answered by one line of JSON on standard output:

    step N      trains N steps: seconds and loss of each, and chunkc's counters since the start
    report      the model's memory, measured and predicted

The first line comes unasked, when the model is ready. Everything printed by others goes to standard error.
The process ends with its input.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from gpt import GPT, GPTConfig, num_parameters

import chunkc
from chunkc.runtime import cpu_allocator

Reply = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class SubjectSpec:
    """What trains and how.

    Attributes:
        options: chunkc's, with `chunkc.optim.AdamW`; None: Inductor with `torch.optim.AdamW(fused=True)`.
        is_metered: the byte-exact allocator is in place before the model exists.
        is_placed: the model goes to `options["home"]` before it is compiled.
        is_limited: the allocator refuses every byte above `options["memory_budget"]` (an int); if metered.
    """

    model: GPTConfig
    batch_size: int
    options: dict[str, Any] | None = None
    is_metered: bool = False
    is_placed: bool = False
    is_limited: bool = False
    seed: int = 0

    def to_json(self) -> str:
        """The command line argument of this script."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> SubjectSpec:
        """The inverse of `to_json`."""
        fields = json.loads(text)
        return SubjectSpec(**{**fields, "model": GPTConfig(**fields["model"])})


class Trainer:
    """A model, its optimizer and its random data: equal specs see equal batches in equal order."""

    def __init__(self, spec: SubjectSpec) -> None:
        self.spec = spec
        torch.manual_seed(spec.seed)
        self.model: torch.nn.Module = GPT(spec.model)
        if spec.options is None:
            self.compiled = torch.compile(self.model)
            self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
                self.model.parameters(), lr=3e-4, weight_decay=0.1, fused=True
            )
            return
        if spec.is_placed:
            chunkc.place(self.model, home=spec.options.get("home", "cpu"))
        self.compiled = torch.compile(self.model, backend="chunkc", options=spec.options)
        self.optimizer = chunkc.optim.AdamW(self.model.parameters(), lr=3e-4, weight_decay=0.1)

    def batches(self) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Endless pairs (x, y), int64 [batch, length]."""
        model = self.spec.model
        generator = torch.Generator().manual_seed(self.spec.seed)
        while True:
            x, y = torch.randint(
                model.vocabulary, (2, self.spec.batch_size, model.length), generator=generator
            ).unbind()
            yield x.clone(), y.clone()

    def step(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, float]:
        """One training step: seconds of forward with backward, of the optimizer, of both; and the loss."""
        start_s = time.perf_counter()
        loss = self.compiled(x, y)
        loss.backward()
        middle_s = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        end_s = time.perf_counter()
        return {
            "forward_backward_s": middle_s - start_s,
            "optimizer_s": end_s - middle_s,
            "step_s": end_s - start_s,
            "loss": loss.item(),
        }

    def counters(self) -> dict[str, float]:
        """Sums since the start: bytes copied either way, seconds waited for copies. Plain: none."""
        if self.spec.options is None:
            return {}
        report = chunkc.report(self.model)
        return {
            "to_device_nbytes": report.traffic_nbytes["to_device"],
            "to_home_nbytes": report.traffic_nbytes["to_home"],
            "wait_s": report.time_s["wait"],
        }

    def report(self) -> dict[str, Any]:
        """Peaks in bytes; of chunkc also what its plan looks like."""
        measured = cpu_allocator.peak_nbytes() if cpu_allocator.is_installed() else None
        if self.spec.options is None:
            return {"measured_peak_nbytes": measured}
        report = chunkc.report(self.model)
        return {
            "measured_peak_nbytes": measured,
            "predicted_peak_nbytes": report.predicted_peak_nbytes,
            "num_moments": len(report.moments),
            "num_chunks": report.num_chunks,
            "num_resident_chunks": report.num_resident_chunks,
            "chunk_size_nbytes": report.chunk_size_nbytes,
        }


def serve(spec: SubjectSpec, commands: Iterable[str], reply: Reply) -> None:
    """Build what `spec` says and obey `commands`, a line each, until there are none left.

    A budget too small is an answer, not an error: {"minimum_nbytes": ...} instead of the steps.

    Raises:
        ValueError: an unknown command.
    """
    if spec.is_metered:
        cpu_allocator.install()
    trainer = Trainer(spec)
    if spec.is_metered:
        cpu_allocator.reset_peak()
    limit_nbytes = (spec.options or {})["memory_budget"] if spec.is_limited else None
    with nullcontext() if limit_nbytes is None else cpu_allocator.hard_limit(limit_nbytes):
        reply({"num_parameters": num_parameters(trainer.model), "num_threads": torch.get_num_threads()})
        batches = iter(trainer.batches())
        for line in commands:
            match line.split():
                case ["step", count]:
                    try:
                        steps = [trainer.step(*next(batches)) for _ in range(int(count))]
                    except chunkc.BudgetError as error:
                        reply({"minimum_nbytes": error.minimum_nbytes})
                    else:
                        reply({"steps": steps, "counters": trainer.counters()})
                case ["report"]:
                    reply(trainer.report())
                case _:
                    raise ValueError(f"unknown command {line!r}")


def _main() -> None:
    # Only replies go to the pipe; what anybody else prints, also below Python, goes to standard error.
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    serve(SubjectSpec.from_json(sys.argv[1]), sys.stdin, lambda fields: print(json.dumps(fields), file=lines))


if __name__ == "__main__":
    _main()
