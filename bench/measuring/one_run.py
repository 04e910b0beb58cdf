"""Run one of the demonstration's trainings in a process of its own, which reports it in lines of JSON.

    python one_run.py '{"mode": "plain", ...}'        # the fields of RunSpec

Each line on standard output is an object with "event": "begin" (num_parameters, and the step from which a run
with checkpoints goes on), "step" (step, loss, step_s), "stopped" (step; on Ctrl-C, with checkpoints) or "end"
(measured_peak_nbytes, and for chunkc's runs what `_report` returns). Whatever else is printed in this process goes to
standard error.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from models.gpt import GPT, GPTConfig
from models.text import batches, file_text, stdlib_text

import chunkc
from chunkc.models import num_parameters
from chunkc.runtime.device import cpu_allocator
from measuring.subject_process import Spec, only_replies

Emit = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class RunSpec(Spec):
    """Model and settings of a run. `data` is a file, or None for the standard library's sources.

    Mode "plain" is Inductor with `torch.optim.AdamW`; "chunkc" has its model data at `home` and keeps to
    `memory_budget_nbytes`, to which the allocator holds it if `is_limited`. With a folder of `checkpoints`, it goes on
    from the latest one, saves one every `save_every` steps, at the end and on Ctrl-C; and the learning rate rises to
    `lr` and falls to nothing over the steps.
    """

    SCRIPT = "measuring/one_run.py"

    mode: Literal["plain", "chunkc"]
    model: GPTConfig
    batch_size: int
    num_steps: int
    seed: int
    lr: float
    data: str | None = None
    home: str = "disk"
    memory_budget_nbytes: int = 0
    is_limited: bool = False
    checkpoints: str | None = None
    save_every: int = 50

    @staticmethod
    def from_json(text: str) -> RunSpec:
        """The inverse of `to_json`."""
        fields = json.loads(text)
        return RunSpec(**{**fields, "model": GPTConfig(**fields["model"])})


def run(spec: RunSpec, emit: Emit) -> None:
    """Train as `spec` says. The meter is in place before the model exists, so nothing is left out."""
    cpu_allocator.install()
    # Inductor's gradient of an embedding adds from several threads in any order: runs would differ in bits.
    torch.use_deterministic_algorithms(True)
    # Filling fresh memory, which that setting brings, costs time and changes no result.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.manual_seed(spec.seed)
    model: torch.nn.Module = GPT(spec.model)
    begin = {"event": "begin", "num_parameters": num_parameters(model)}
    if spec.mode == "plain":
        compiled = torch.compile(model)
        optimizer = _adamw(torch.optim.AdamW, model, spec)
        if _train(model, compiled, optimizer, spec, emit, begin):
            emit({"event": "end", "measured_peak_nbytes": cpu_allocator.peak_nbytes()})
        return
    model = chunkc.place(model, home=spec.home)
    cpu_allocator.reset_peak()
    with cpu_allocator.hard_limit(spec.memory_budget_nbytes) if spec.is_limited else nullcontext():
        options: dict[str, Any] = {
            "memory_budget": spec.memory_budget_nbytes,
            "home": spec.home,
            "whole_graph": "never",
            "activations": "keep",
        }
        compiled = torch.compile(model, backend="chunkc", options=options)
        optimizer = _adamw(chunkc.optim.AdamW, model, spec)
        if _train(model, compiled, optimizer, spec, emit, begin):
            emit({"event": "end", "measured_peak_nbytes": cpu_allocator.peak_nbytes(), **_report(compiled)})


def _adamw(kind: Any, model: torch.nn.Module, spec: RunSpec) -> torch.optim.Optimizer:
    return kind(model.parameters(), lr=spec.lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


def _train(
    model: torch.nn.Module,
    compiled: Any,
    optimizer: torch.optim.Optimizer,
    spec: RunSpec,
    emit: Emit,
    begin: dict[str, Any],
) -> bool:
    """Emit `begin`, train and emit steps; whether all of them are done."""
    text = stdlib_text() if spec.data is None else file_text(Path(spec.data))
    crops = batches(
        text,
        num_batches=spec.num_steps,
        batch_size=spec.batch_size,
        length=spec.model.length,
        seed=spec.seed,
    )
    if spec.checkpoints is None:
        emit(begin)
        for step, (x, y) in enumerate(crops):
            emit(_step(compiled, optimizer, step, x, y))
        return True
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, spec.lr, total_steps=spec.num_steps + 1, pct_start=0.1, cycle_momentum=False
    )
    with _interrupts() as interrupted, _checkpoint(spec, model, optimizer, scheduler) as ck:
        first = ck.load_latest() or 0
        emit(begin | {"step": first})
        for step, (x, y) in islice(enumerate(crops), first, None):
            emit(_step(compiled, optimizer, step, x, y))
            scheduler.step()
            is_last = interrupted.is_set() or step + 1 == spec.num_steps
            if is_last or (step + 1) % spec.save_every == 0:
                ck.save(step + 1)
            if interrupted.is_set():
                ck.wait()
                emit({"event": "stopped", "step": step + 1})
                return False
    return True


def _checkpoint(spec: RunSpec, model: torch.nn.Module, optimizer: Any, scheduler: Any) -> chunkc.Checkpoint:
    assert spec.checkpoints is not None
    return chunkc.Checkpoint(spec.checkpoints, model=model, optimizer=optimizer, scheduler=scheduler, keep=2)


def _step(compiled: Any, optimizer: Any, step: int, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
    start_s = time.perf_counter()
    loss = compiled(x, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    step_s = time.perf_counter() - start_s
    return {"event": "step", "step": step, "loss": loss.item(), "step_s": step_s}


@contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """Inside, Ctrl-C is noted, and the step ends first."""
    interrupted = threading.Event()
    before = signal.signal(signal.SIGINT, lambda number, frame: interrupted.set())
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


def _report(compiled: Any) -> dict[str, Any]:
    """Convert what the demonstration shows of `chunkc.report` to JSON."""
    report = chunkc.report(compiled)
    return {
        "predicted_peak_nbytes": report.predicted_peak_nbytes,
        "reported_peak_nbytes": report.measured_peak_nbytes,
        "moments": [list(moment) for moment in report.moments],
        "chunk_size_nbytes": report.chunk_size_nbytes,
        "num_chunks": report.num_chunks,
        "traffic_nbytes": dict(report.traffic_nbytes),
        "time_s": dict(report.time_s),
        "plan_text": report.plan_text,
    }


def _main() -> None:
    run(RunSpec.from_json(sys.argv[1]), only_replies())


if __name__ == "__main__":
    _main()
