"""A model of three times the memory that it is given: a run that builds, trains and saves it, and one that resumes it.

Each runs in a process of its own, with the same folder, forked from one that has imported everything. It prints for
each stage the most bytes that the process took in addition to those before there was a model, and the prediction of
`chunkc explain`.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from plain_modules import FeedForward
from torch import Tensor, nn

import chunkc
from chunkc.runtime.device import cpu_allocator

BUDGET_NBYTES = 64 * 2**20
NUM_STEPS = 5
OPTIONS = {"memory_budget": BUDGET_NBYTES, "codegen": "eager", "whole_graph": "never"}


class Model(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(FeedForward(width) for _ in range(depth)))
        self.head = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x)).square().mean()


def status_nbytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


@contextmanager
def stage(name: str, peaks: dict[str, int], before_nbytes: int) -> Iterator[None]:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    yield
    peaks[name] = status_nbytes("VmHWM") - before_nbytes


def batch(width: int) -> Tensor:
    return torch.randn(8, width, generator=torch.Generator().manual_seed(1))


def train(call: nn.Module, optimizer: chunkc.optim.AdamW, x: Tensor, num_steps: int) -> list[float]:
    """Train some steps while the allocator refuses every byte over the budget; return the losses."""
    losses = []
    with cpu_allocator.hard_limit(cpu_allocator.current_nbytes() + BUDGET_NBYTES):
        for _ in range(num_steps):
            loss = call(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            del loss
    return losses


def live(width: int, depth: int, folder: Path, before_nbytes: int) -> tuple[dict[str, int], list[float]]:
    """Build, load, train, save; the peak of each stage, and the losses."""
    peaks: dict[str, int] = {}
    home = f"disk:{folder}"
    x = batch(width)
    with stage("building", peaks, before_nbytes), chunkc.init(home=home):
        torch.manual_seed(0)
        model = Model(width, depth)
    with stage("saving", peaks, before_nbytes):
        chunkc.save(model, folder / "first")
    with stage("building again", peaks, before_nbytes):
        del model
        with torch.device("meta"):
            model = Model(width, depth)
        chunkc.place(model, home=home, init="reset_parameters")
    with stage("loading", peaks, before_nbytes):
        chunkc.load(model, folder / "first")
    call = torch.compile(model, backend="chunkc", options=OPTIONS)
    optimizer = chunkc.optim.AdamW(model.parameters(), lr=1e-3)
    with stage("training", peaks, before_nbytes):
        losses = train(call, optimizer, x, NUM_STEPS)
    with stage("saving trained", peaks, before_nbytes):
        chunkc.save(call, folder / "trained", max_shard_size="100MB")
    with (
        chunkc.Checkpoint(folder / "checkpoints", model=model, optimizer=optimizer) as checkpoint,
        stage("saving a checkpoint", peaks, before_nbytes),
    ):
        checkpoint.save(NUM_STEPS)
        checkpoint.wait()
    return peaks, losses


def resume(width: int, depth: int, folder: Path, before_nbytes: int) -> tuple[dict[str, int], list[float]]:
    """Build anew, load the checkpoint, train on, evaluate; the peak of each stage, and the losses."""
    peaks: dict[str, int] = {}
    x = batch(width)
    with stage("building", peaks, before_nbytes), chunkc.init(home=f"disk:{folder}"):
        model = Model(width, depth)
    call = torch.compile(model, backend="chunkc", options=OPTIONS)
    optimizer = chunkc.optim.AdamW(model.parameters(), lr=1e-3)
    with stage("resuming", peaks, before_nbytes):
        checkpoint = chunkc.Checkpoint(folder / "checkpoints", model=model, optimizer=optimizer)
        assert checkpoint.load_latest() == NUM_STEPS
    with stage("training", peaks, before_nbytes):
        losses = train(call, optimizer, x, NUM_STEPS)
    with stage("evaluating", peaks, before_nbytes), torch.no_grad():
        model.eval()
        losses.append(call(x).item())
    return peaks, losses


def main(run: Callable[..., tuple[dict[str, int], list[float]]], folder: Path, width: int, depth: int) -> None:
    cpu_allocator.install()
    torch.set_num_threads(1)
    (folder / "small").mkdir(exist_ok=True)
    run(64, 2, folder / "small", 0)  # what is loaded and compiled once for all models
    torch._dynamo.reset()
    with torch.device("meta"):
        model, x = Model(width, depth), torch.empty(8, width)
    host = chunkc.explain(model, x, home="disk", optimizer="adamw", **OPTIONS).host
    assert host is not None
    parameters_nbytes = sum(p.nbytes for p in model.parameters())
    del model, x
    gc.collect()
    before_nbytes = status_nbytes("VmRSS")
    peaks, losses = run(width, depth, folder, before_nbytes)
    said = {
        "building": host.building,
        "loading": host.loading,
        "training": host.training,
        "saving": host.saving,
        "resuming": host.resuming,
    }
    print(json.dumps({"parameters": parameters_nbytes, "peaks": peaks, "said": said, "losses": losses}))


if __name__ == "__main__":
    for run in (live, resume):
        if (child := os.fork()) == 0:
            main(run, Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
            break
        if os.waitpid(child, 0)[1]:
            sys.exit(1)
