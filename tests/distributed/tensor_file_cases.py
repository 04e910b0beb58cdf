"""Tensor parallelism, and files: checkpoints of training and weights; run as `rank_cases` is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

sys.path.append(str(Path(__file__).parent))

import rank_cases
from rank_cases import FILES, HUGE, Result, adamw, bits, compiled, mesh, of_all, whole_bits
from tensor_cases import cut, grid, made, train

import chunkc


def whole_of(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


class Run:
    """A model in training, and its checkpoints."""

    def __init__(self, folder: Path, make: Callable[[nn.Module], Any], seed: int = 0, optimizer: Any = adamw) -> None:
        torch._dynamo.reset()
        self.model = make(made(seed))
        torch.manual_seed(100 * seed + dist.get_rank() // 2)
        self.optimizer = optimizer(self.model)
        self.checkpoint = chunkc.Checkpoint(folder, model=self.model, optimizer=self.optimizer)

    def drawn(self) -> list[float]:
        """What the generator gives next, which tells it from others."""
        return torch.rand(2).tolist()


def flat(model: nn.Module) -> nn.Module:
    return chunkc.distribute(model, mesh())


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "adamw": adamw,
    "torch": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, foreach=False),
}


def goes_on(folder: Path, name: str = "adamw") -> Result:
    """Saved on two rows of two ranks of a layer while training goes on, and resumed there: losses, weights and random
    numbers to the bit."""
    run = Run(folder / name, cut, optimizer=OPTIMIZERS[name])
    step = compiled(run.model, HUGE)
    train(step, run.model, run.optimizer, range(1))
    with torch.random.fork_rng():
        found: Result = {"whole": whole_bits(run.model, run.optimizer), "drawn": run.drawn()}
    run.checkpoint.save(1)
    expected = [train(step, run.model, run.optimizer, range(1, 2)), bits(run.model), run.drawn()]
    run.checkpoint.close()
    other = Run(folder / name, cut, seed=7, optimizer=OPTIMIZERS[name])
    step = compiled(other.model, HUGE)
    assert other.checkpoint.load_latest() == 1
    assert of_all(whole_bits(other.model, other.optimizer)) == [found["whole"]] * dist.get_world_size()
    resumed = [train(step, other.model, other.optimizer, range(1, 2)), bits(other.model), other.drawn()]
    assert resumed == expected
    names = sorted(path.name for path in (folder / name).glob("step*1/*"))
    assert [name for name in names if not name.startswith("rank-")] == FILES
    return found


def loaded(folder: Path) -> Result:
    """On another number of rows, and on ranks that compute layers by themselves; and what those save."""
    found: Result = {}
    for name, make in (("layers", cut), ("flat", flat)):
        run = Run(folder / "adamw", make, seed=7)
        run.checkpoint.load_latest()
        found[name] = {"whole": whole_bits(run.model, run.optimizer), "drawn": run.drawn()}
    with chunkc.Checkpoint(folder / "of flat ones", model=run.model, optimizer=run.optimizer) as checkpoint:
        checkpoint.save(5)
    run = Run(folder / "of flat ones", cut, seed=8)
    found["step"] = run.checkpoint.load_latest()
    found["back"] = whole_bits(run.model, run.optimizer)
    return found


def alone(folder: Path) -> Result:
    """By one process, into a model that is not distributed."""
    run = Run(folder / "adamw", lambda model: model, seed=7)
    step = run.checkpoint.load_latest()
    return {"step": step, "whole": whole_bits(run.model, run.optimizer)}


class Odd(nn.Module):
    """Rows and columns that ranks cannot share evenly, weights that two modules share, a buffer, and a scalar."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 5)
        self.tied, self.images = nn.Linear(5, 7, bias=False), nn.Conv2d(3, 5, 2)
        self.scale = nn.Parameter(torch.tensor(float(seed)))
        self.register_buffer("count", torch.full((3,), float(seed)))
        self.tie()

    def tie(self) -> None:
        self.tied.weight = self.up.weight


def odd(seed: int = 0, device: str = "cpu") -> nn.Module:
    with torch.device(device):
        model = Odd(seed)
    parallelize_module(model, grid()["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model.tie()
    return chunkc.distribute(model, grid()["dp"])


def digest(model: nn.Module) -> list[Any]:
    return [[name, whole_of(value).tolist()] for name, value in model.state_dict().items()]


def weights(folder: Path) -> Result:
    """Written by rank 0 alone; read by all into other weights, and into a model from the meta device."""
    model = odd()
    place = folder if dist.get_rank() == 0 else folder / "nowhere"
    chunkc.save(model, place / "one.safetensors")
    chunkc.save(model, place / "several", max_shard_size=100)
    with chunkc.Checkpoint(folder / "odd", model=model) as checkpoint:
        checkpoint.save(1)
    whole = digest(model)
    for name in ("one.safetensors", "several"):
        other = odd(seed=1)
        chunkc.load(other, folder / name)
        assert digest(other) == whole, name
    other = odd(seed=1)
    chunkc.Checkpoint(folder / "odd", model=other).load_latest()
    assert digest(other) == whole
    empty = odd(device="meta")
    chunkc.load(empty, folder / "several")
    assert digest(empty) == whole
    assert of_all(whole) == [whole] * dist.get_world_size()
    return {"whole": whole}


def weights_elsewhere(folder: Path) -> Result:
    found = []
    for name in ("one.safetensors", "several"):
        model = flat(Odd(seed=1))
        chunkc.load(model, folder / name)
        found.append(digest(model))
    model = odd(seed=1)
    chunkc.load(model, folder / "several")
    assert found == [digest(model)] * 2
    return {"whole": found[0]}


if __name__ == "__main__":
    rank_cases.run_command_line(globals())
