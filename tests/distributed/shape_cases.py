"""Batches whose shapes differ between ranks; run as `rank_cases` is."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parent))

import rank_cases
from loop_cases import small
from rank_cases import HUGE, VOCABULARY, Result, adamw, bits, compiled, differs, mean, mesh

import chunkc
from chunkc.runtime.device import cpu_allocator
from chunkc.session.session import sessions_of

SHAPES = (
    ((4, 5), (4, 5)),
    ((4, 5), (3, 5)),  # a last batch that is smaller on one rank
    ((2, 7), (4, 3)),
    ((4, 5), (4, 5)),
)
"""Of each rank's batch, step by step; more ranks go on from the beginning."""


def batch(step: int, rank: int, *, shapes: Sequence[Any] = SHAPES) -> Tensor:
    of_step = shapes[step]
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(VOCABULARY, of_step[rank % len(of_step)], generator=generator)


def uneven() -> Result:
    """Each rank's gradient is of the mean over its own batch, and ranks' means count alike."""
    num_ranks = dist.get_world_size()
    reference: Any = small()
    optimizer, expected = adamw(reference), []
    for step in range(len(SHAPES)):
        losses = [reference(batch(step, rank)) / num_ranks for rank in range(num_ranks)]
        sum(losses).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            evaluated = [float(reference(batch(step, rank + 1))) for rank in range(num_ranks)]
        expected += [float(sum(losses).detach()), sum(evaluated) / num_ranks]  # type: ignore[union-attr]
    found: Result = {"expected": expected, "runs": []}
    cpu_allocator.install()  # what was allocated before is not metered
    least = HUGE
    for stage, budget, dynamic in ((3, HUGE, None), (None, None, None), (1, HUGE, True)):
        torch._dynamo.reset()
        model: Any = chunkc.distribute(small(), mesh(), zero_stage=stage)
        options = {"memory_budget": budget or int(1.2 * least), "codegen": "eager", "debug": True}
        run = torch.compile(model, backend="chunkc", dynamic=dynamic, options=options)
        optimizer, losses = adamw(model), []
        for step in range(len(SHAPES)):
            loss = run(batch(step, dist.get_rank()))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                losses += [mean(loss), mean(run(batch(step, dist.get_rank() + 1)))]
        report = chunkc.report(model)
        least = report.minimum_budget_nbytes
        (session,) = sessions_of(model.parameters())
        found["runs"].append(
            {
                "losses": losses,
                "bits": bits(model),
                "peaks": (report.measured_peak_nbytes, report.predicted_peak_nbytes, options["memory_budget"]),
                "renewed": session.transport.num_renewed,
            }
        )
        del model, optimizer, run, session, report, loss  # of stage 1 much stands on the compute tier
        gc.collect()
    return found


def sliced() -> Result:
    """Each rank takes a slice of a batch for all, whose size changes: a view, which begins elsewhere on every rank."""
    reference: Any = small()
    model: Any = chunkc.distribute(small(), mesh())
    run, losses, expected = compiled(model, HUGE), [], []
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    for each in (4, 4, 3, 2):
        generator = torch.Generator().manual_seed(each)
        whole = torch.randint(VOCABULARY, (num_ranks * each, 5), generator=generator)
        with torch.no_grad():
            expected.append(float(reference(whole)))
        loss = run(whole[rank * each :][:each])
        loss.backward()
        losses.append(mean(loss))
    return {"expected": expected, "runs": [{"losses": losses, "bits": "", "peaks": (0, 0, 0)}]}


class Turning(nn.Module):
    """Another graph for long sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small()

    def forward(self, tokens: Tensor) -> Tensor:
        loss = self.inner(tokens)
        return loss + loss.square() if tokens.shape[1] > 6 else loss


def ended_by(action: Callable[[Any], Any]) -> Result:
    torch.manual_seed(0)
    run = compiled(chunkc.distribute(Turning(), mesh(), timeout_s=20), HUGE)
    try:
        run(batch(0, 0)).backward()
        action(run)
    except chunkc.ChunkcError as error:
        return {"message": f"{type(error).__name__}: {error}"}
    return {"message": "none"}


def another_graph() -> Result:
    return ended_by(lambda run: run(batch(0, 0, shapes=[[(4, 8 if differs() else 5)]])))


def too_large_on_one() -> Result:
    """A batch for which one rank's budget is too small: it is so for all."""
    model: Any = chunkc.distribute(small(), mesh(), timeout_s=20)
    run = compiled(model, 100_000)
    try:
        run(batch(0, 0)).backward()
        run(batch(0, 0, shapes=[[(400 if differs() else 4, 5)]]))
    except chunkc.ChunkcError as error:
        return {"message": f"{type(error).__name__}: {error}"}
    return {"message": "none"}


CASES: dict[str, Callable[[], Result]] = {
    case.__name__: case for case in (uneven, sliced, another_graph, too_large_on_one)
}

if __name__ == "__main__":
    rank_cases.run_command_line(CASES)
