"""What ranks do with checkpoints of their training; run as `rank_cases` is."""

from __future__ import annotations

import errno
import os
import random
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

sys.path.append(str(Path(__file__).parent))

import rank_cases
from rank_cases import FILES, HUGE, STAGES, Result, adamw, bits, compiled, differs, mesh, of_all, whole_bits

import chunkc
from chunkc.checkpoint import writing

NEWEST = "step-000000000002"


class Model(nn.Module):
    """Tied weights, a buffer of each rank's own, dropout, rows that ranks cannot share evenly, and a frozen matrix."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(11, 24), nn.LayerNorm(24)
        self.up, self.down, self.gate = nn.Linear(24, 57), nn.Linear(57, 24), nn.Linear(24, 1)
        self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.head = nn.Linear(24, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.zeros(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        inner = nn.functional.dropout(self.up(self.norm(x)).tanh(), 0.1)
        x = x + self.gate(x).sigmoid() * self.down(inner)
        self.count.add_(tokens.float().mean())
        return nn.functional.cross_entropy(self.head(self.frozen(x)).flatten(0, 1).float(), tokens.flatten())


class Run:
    """A model in training, and its checkpoints."""

    def __init__(
        self,
        folder: Path,
        *,
        seed: int = 0,
        stage: int = 3,
        dtype: torch.dtype = torch.float32,
        make: Callable[[Any], Any] = adamw,
        keep: int = 3,
        **how: Any,
    ) -> None:
        torch._dynamo.reset()
        torch.manual_seed(seed)
        self.model = chunkc.distribute(Model().to(dtype), mesh(), zero_stage=stage, **how)  # type: ignore[arg-type]
        torch.manual_seed(seed + 100 * (1 + dist.get_rank()))
        self.compiled = compiled(self.model, HUGE)
        self.optimizer = make(self.model)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.checkpoint = chunkc.Checkpoint(
            folder, model=self.compiled, optimizer=self.optimizer, scheduler=self.scheduler, keep=keep
        )

    def train(self, num_steps: int) -> list[float]:
        """This rank's losses; batches are drawn, so these go on only where generators do."""
        losses = []
        for _ in range(num_steps):
            loss = self.compiled(torch.randint(11, (4, 5)))
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def bits(self) -> Result:
        """Of parameters and states of all ranks, and of what this rank has for itself."""
        return {
            "whole": whole_bits(self.model, self.optimizer),
            "own": [self.model.count.tolist(), self.scheduler.state_dict()["last_epoch"], torch.rand(2).tolist()],
        }


def resumed(folder: Path, num_steps: int, **how: Any) -> None:
    """Trained on, and resumed from a checkpoint that was written meanwhile: the same."""
    run = Run(folder, **how)
    run.train(2)
    run.checkpoint.save(2)
    expected = [2, run.train(num_steps), run.bits()]
    run.checkpoint.close()
    again = Run(folder, seed=7, **how)
    assert [again.checkpoint.load_latest(), again.train(num_steps), again.bits()] == expected, how


def goes_on(folder: Path) -> None:
    """In every stage: losses, weights, states, buffers, schedulers and random generators of each rank."""
    for stage in STAGES:
        resumed(folder / str(stage), 2, stage=stage)


FORMS: dict[str, tuple[torch.dtype, Callable[[Any], Any]]] = {
    "split masters": (torch.bfloat16, lambda m: chunkc.optim.AdamW(m.parameters(), lr=1e-2)),
    "bf16 moments": (torch.float32, lambda m: chunkc.optim.AdamW(m.parameters(), lr=1e-2, moments_dtype="bfloat16")),
    "momentum": (torch.float32, lambda m: chunkc.optim.SGD(m.parameters(), lr=1e-2, momentum=0.9)),
    "plain": (torch.float32, lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2)),
}


def forms(folder: Path) -> None:
    """Forms of states, and an optimizer of PyTorch."""
    for name, (dtype, make) in FORMS.items():
        resumed(folder / name, 1, dtype=dtype, make=make)


def saved(folder: Path) -> Result:
    """Train two steps; save both."""
    run = Run(folder / "steps")
    for step in (1, 2):
        run.train(1)
        run.checkpoint.save(step)
    run.checkpoint.close()
    names = sorted(path.name for path in (folder / "steps").glob("step*2/*"))
    assert [name for name in names if not name.startswith("rank-1.")] == FILES
    return {"bits": run.bits()}


def loaded(folder: Path) -> Result:
    """Load what any number of ranks has saved, train on, and save the next step."""
    run = Run(folder / "steps", seed=7)
    before = torch.get_rng_state()
    step = run.checkpoint.load_latest()
    assert step is not None
    kept = torch.equal(torch.get_rng_state(), before)
    found = run.bits()
    run.train(1)
    run.checkpoint.save(step + 1)
    run.checkpoint.close()
    return {"step": step, "bits": found, "kept": kept, "after": run.bits()}


def slowly(write: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    def late(*args: Any) -> Any:
        time.sleep(seconds)
        return write(*args)

    return late


def meanwhile(folder: Path) -> None:
    """The next step waits until this rank's parts are read; without the wait, the change is noticed on all ranks."""
    run = Run(folder)
    run.train(1)
    expected = whole_bits(run.model, run.optimizer)
    with patch.object(writing, "_write_all", slowly(writing._write_all, 0.05)):
        run.checkpoint.save(1)
        run.train(1)
        run.checkpoint.wait()
        with patch("chunkc.optim.optimizer.await_readers", lambda parameters: None):
            run.checkpoint.save(2)
            run.train(1)
        check_told(run.checkpoint.wait, "CheckpointError .* was changed while it was being saved")
    run.checkpoint.close()
    other = Run(folder, seed=7)
    assert other.checkpoint.load_latest() == 1
    assert whole_bits(other.model, other.optimizer) == expected


# --- faults: of a model that is not trained ---


def attempted(action: Callable[[], Any]) -> str:
    """The error, or what came of it."""
    start = time.monotonic()
    try:
        return f"{action()} after {time.monotonic() - start:.0f} s"
    except chunkc.ChunkcError as error:
        return f"{type(error).__name__} after {time.monotonic() - start:.0f} s: {error}"


def check_told(action: Callable[[], Any], expected: str) -> None:
    found = attempted(action)
    assert re.match(expected, found), found


def linear(seed: int = 0, **how: Any) -> nn.Module:
    torch.manual_seed(seed)
    return chunkc.distribute(nn.Sequential(nn.Linear(8, 7), nn.BatchNorm1d(7)), mesh(), **how)


def left_in(folder: Path) -> list[str]:
    """What is in a directory, once all ranks have come here."""
    dist.barrier()
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


FAULTS: dict[str, tuple[int, str, int]] = {
    "full disk": (1, "write", errno.ENOSPC),
    "full disk of rank 0": (0, "write", errno.ENOSPC),
    "read-only": (1, "open", errno.EROFS),
    "no name": (0, "rename", errno.EIO),
    "no directory": (0, "mkdir", errno.EROFS),
}
"""On which rank which call fails, and how."""


def faults(folder: Path) -> None:
    """A call fails on one rank, which is an error of all that names it; then none does."""
    for name, (rank, call, number) in FAULTS.items():
        place = folder / name.replace(" ", "-")
        ck = chunkc.Checkpoint(place, model=linear())
        ck.save(1)
        ck.wait()
        real = getattr(os, call)

        def failing(*args: Any, **kwargs: Any) -> Any:
            if call == "open" and "model.safetensors" not in str(args[0]):  # noqa: B023
                return real(*args, **kwargs)  # noqa: B023
            raise OSError(number, os.strerror(number))  # noqa: B023

        with patch.object(os, call, failing if dist.get_rank() == rank else real):
            told = attempted(lambda: (ck.save(2), ck.wait()))  # noqa: B023
        assert re.match(r"CheckpointError after \d s: ", told), told
        assert os.strerror(number) in told
        assert (dist.get_rank() != rank) == (f"rank {rank} of {dist.get_world_size()}: " in told), "which rank it was"
        assert left_in(place) == ["step-000000000001"]
        ck.save(2)
        ck.close()
        assert left_in(place) == ["step-000000000001", NEWEST]


def elsewhere(folder: Path) -> None:
    """Several models; another model; ranks with directories of their own, or other steps; what is not distributed."""
    rank, model, plain = dist.get_rank(), linear(), nn.Linear(2, 2)

    def saves(place: str, model: Any, step: int = 1) -> Callable[[], None]:
        return lambda: chunkc.Checkpoint(folder / place, model=model).save(step)

    check_told(
        saves(str(rank), model), "CheckpointError .* is not there as rank 0 has it: all ranks save to one directory"
    )
    two, again = {"a": model, "b": linear(1)}, {"a": linear(8), "b": linear(9)}
    with chunkc.Checkpoint(folder / "two", model=two) as ck:
        assert ck.load_latest() is None
        ck.save(1)
        ck.wait()
        assert chunkc.Checkpoint(folder / "two", model=again).load_latest() == 1
        assert all(bits(two[name]) == bits(again[name]) for name in two)
    other = chunkc.distribute(nn.Sequential(nn.Linear(8, 9)), mesh())
    check_told(
        chunkc.Checkpoint(folder / "two", model={"a": model, "b": other}).load_latest,
        "CheckpointError .* cannot be loaded: the checkpoint is of another model: ",
    )
    differs_in = (
        r"DistributedError .* ranks differ in the phase: rank 1 of . .*save\(2\) instead of Checkpoint.save\(1\)"
    )
    check_told(saves("step", model, 1 + differs()), differs_in)
    refused = "UnsupportedError .* there are several processes, and the model is not distributed over them"
    check_told(saves("plain", plain), refused)
    mixed = "UnsupportedError .* b/weight is not distributed as a/0.weight is"
    check_told(saves("mixed", {"a": model, "b": plain}), mixed)


def plain(folder: Path) -> Result:
    """Save a model that is not trained, and say what is in it."""
    model = linear()
    model[1].running_mean.fill_(float(dist.get_rank()))
    with chunkc.Checkpoint(folder / "plain", model=model) as ck:
        ck.save(2)
    values = {name: (v.full_tensor() if isinstance(v, DTensor) else v) for name, v in model.state_dict().items()}
    return {"whole": {name: value.tolist() for name, value in values.items()}}


def damaged(folder: Path) -> None:
    """Each file of the newest checkpoint is damaged once: all ranks name it, and take the one before."""
    model = linear()
    with chunkc.Checkpoint(folder, model=model) as ck:
        for step in (1, 2):
            with torch.no_grad():
                model[0].weight.fill_(float(step))
            ck.save(step)
            ck.wait()
    newest = folder / NEWEST
    names = sorted(path.name for path in newest.iterdir())
    assert len(names) == 1 + 3 * dist.get_world_size()
    generator = random.Random(0)
    for name in names:
        content = (newest / name).read_bytes()
        dist.barrier()
        if dist.get_rank() == 0:
            at = generator.randrange(len(content))
            (newest / name).write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        dist.barrier()
        other = linear(7)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert chunkc.Checkpoint(folder, model=other).load_latest() == 1
        assert other[0].weight.to_local().detach().unique().tolist() == [1.0]
        said = [str(one.message) for one in told if "damaged" in str(one.message)]
        assert re.search(f"{NEWEST} is damaged and left out: {re.escape(name)} is damaged", said[0])
        assert of_all(said) == [said] * dist.get_world_size(), "all say the same"
        dist.barrier()
        if dist.get_rank() == 0:
            (newest / name).write_bytes(content)
    for checkpoint in folder.glob("step-*"):
        (checkpoint / "model.safetensors").unlink(missing_ok=True)
    dist.barrier()
    warnings.simplefilter("ignore")
    other = linear(7)
    before = bits(other)
    check_told(
        chunkc.Checkpoint(folder, model=other).load_latest,
        r"(?s)CheckpointError .* is whole:.*step-0*2 .*step-0*1 ",
    )
    assert bits(other) == before, "nothing has changed"


def ended(folder: Path, ending: Callable[[], Any]) -> Result:
    """Rank 1 ends while it writes, or hangs; with what rank 0 is told, and what is there then."""
    ck = chunkc.Checkpoint(folder, model=linear(timeout_s=3))
    ck.save(1)
    ck.wait()
    write = writing._write_all

    def at_last(*args: Any) -> Any:
        if differs():
            ending()
        return write(*args)

    with patch.object(writing, "_write_all", at_last):
        told = attempted(lambda: (ck.save(2), ck.wait()))
    found = {"told": told, "again": attempted(lambda: (ck.save(3), ck.wait()))}
    left = sorted(path.name for path in folder.iterdir() if path.name != ".lock")
    return found | {"names": left}


def killed(folder: Path) -> Result:
    return ended(folder / "killed", lambda: os.kill(os.getpid(), signal.SIGKILL))


def hung(folder: Path) -> Result:
    return ended(folder / "hung", lambda: time.sleep(5))


if __name__ == "__main__":
    rank_cases.run_command_line(globals())
