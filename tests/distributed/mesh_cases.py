"""Meshes of two dimensions, scalars, and models from the meta device; run as `rank_cases` is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

sys.path.append(str(Path(__file__).parent))

import rank_cases
from loop_cases import Small
from rank_cases import (
    HUGE,
    arrays,
    batches,
    bits,
    check_close,
    check_weights,
    compiled,
    mean,
    mesh,
    of_all,
    own,
    told,
    whole_bits,
)

import chunkc
from chunkc.session.session import sessions_of


class Scaled(nn.Module):
    """With a scalar, which every rank has, and random numbers of each rank's own."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.inner = Small()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.drop = drop

    def forward(self, tokens: Tensor) -> Tensor:
        loss = self.inner(tokens) * self.scale
        return nn.functional.dropout(loss.expand(4), self.drop).mean() if self.drop else loss


def scaled(seed: int = 0, drop: float = 0.0) -> Scaled:
    torch.manual_seed(seed)
    return Scaled(drop)


def lamb(model: nn.Module) -> Any:
    return chunkc.optim.LAMB(model.parameters(), lr=1e-2, eps=1e-3)


def steps(run: Any, model: nn.Module, optimizer: Any, part: Any, whole: Any) -> list[float]:
    losses = []
    for step in range(3):
        loss = run(part(batches(step)[0]))
        loss.backward()
        norm = optimizer.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses += [whole(loss), float(norm)]
    return losses


def grid() -> Any:
    """Two copies of each part, or two ranks with a copy each."""
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2))


def copies(folder: Path) -> None:
    """On a mesh of two dimensions and on one, in two stages; saved on one and loaded on the other. With LAMB and a
    scalar, and from the meta device."""
    reference: Any = scaled()
    expected = steps(reference, reference, lamb(reference), lambda batch: batch, lambda loss: loss.item())
    weights, found, parts, saved = arrays(reference), [], [], set()
    for stage, place, budget in ((3, grid(), HUGE), (1, grid(), 80_000), (3, mesh(), HUGE)):
        torch._dynamo.reset()
        model: Any = chunkc.distribute(scaled(), place, zero_stage=stage)
        optimizer, run = lamb(model), compiled(model, budget)
        check_close(steps(run, model, optimizer, own, mean), expected, relative=1e-6)
        check_weights(model, weights, 2e-6)
        if not found:
            (session,) = sessions_of(model.parameters())
            is_alone = dist.get_world_size() == 2
            assert (session.transport.sent_nbytes["gathers"] == 0) == is_alone, "one rank in a row has everything"
        found.append(bits(model))
        parts.append(sum(p.to_local().numel() for p in model.parameters()))
        if place is not mesh():
            with chunkc.Checkpoint(folder / f"checkpoint {stage}", model=run, optimizer=optimizer) as checkpoint:
                checkpoint.save(1)
            chunkc.save(model, folder / f"weights {stage}")
            saved.add(whole_bits(model, optimizer))
    assert found[0] == found[1], "a budget or a stage changed the result"
    assert parts[0] >= 1.5 * parts[2], "a part of a copy, instead of one of all"
    other: Any = chunkc.distribute(scaled(seed=1), mesh())
    optimizer = lamb(other)
    with chunkc.Checkpoint(folder / "checkpoint 3", model=other, optimizer=optimizer) as checkpoint:
        assert checkpoint.load_latest() == 1
    assert saved == {whole_bits(other, optimizer)}
    torch._dynamo.reset()
    with torch.device("meta"):
        empty: Any = Scaled()
    chunkc.distribute(empty, grid())
    assert sum(p.to_local().numel() for p in empty.parameters()) == parts[0]
    chunkc.load(empty, folder / "weights 3")
    assert bits(empty) == found[0]
    evaluated = mean(compiled(empty, HUGE)(own(batches(5)[0])).detach())
    with torch.no_grad():
        check_close([evaluated], [float(reference(batches(5)[0]))], relative=1e-6)


def drops() -> None:
    """Ranks draw their own random numbers, the same in every stage and budget: with copies, then on a flat mesh."""
    least, found = HUGE, []
    places = [(3, grid(), HUGE), (1, grid(), HUGE), (3, mesh(), HUGE), (3, mesh(), None), (2, mesh(), HUGE)]
    for stage, place, budget in places:
        torch._dynamo.reset()
        model: Any = chunkc.distribute(scaled(drop=0.5), place, zero_stage=stage)
        optimizer = lamb(model)
        torch.manual_seed(100 + dist.get_rank())
        run = compiled(model, budget or least)
        losses = steps(run, model, optimizer, lambda batch: batch, lambda loss: loss.item())
        found.append((losses, bits(model)))
        least = chunkc.report(model).minimum_budget_nbytes
    assert found[0] == found[1]
    assert found[2] == found[3] == found[4]
    first, second, *_ = of_all(found)
    assert first[0][0] != second[0][0]
    assert first[2][0] != second[2][0]
    assert first[0][1] == second[0][1], "copies stay copies"


def overflow_behind_a_scalar() -> None:
    """PyTorch asks the ranks by the first gradient, and of a scalar each has all: then they are asked here."""
    model: Any = chunkc.distribute(scaled(), mesh())
    parameters = [model.scale, *(p for p in model.parameters() if p is not model.scale)]
    optimizer, scaler = chunkc.optim.AdamW(parameters), torch.amp.GradScaler("cpu", init_scale=4.0)
    run, before = compiled(model, HUGE), bits(model)
    scaler.scale(run(own(batches(0)[0]))).backward()
    if dist.get_rank() == dist.get_world_size() - 1:
        model.inner.embed.weight.grad.to_local()[-1] = torch.inf
    assert "ranks differ in whether a gradient overflowed" in told(lambda: scaler.step(optimizer))
    assert bits(model) == before


if __name__ == "__main__":
    rank_cases.run_command_line(globals())
