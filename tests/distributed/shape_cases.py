"""Batches whose shapes differ between ranks; run as `rank_cases` is."""

from __future__ import annotations

import gc
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parent))

import rank_cases
from loop_cases import small
from rank_cases import (
    HUGE,
    NUMBERS_NBYTES,
    VOCABULARY,
    adamw,
    bits,
    check_close,
    compiled,
    differs,
    mean,
    mesh,
    of_all,
    take_step,
    told,
)

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

EVALUATED = (1,)
"""After which steps the ranks evaluate, each the batch of its neighbor."""


def batch(step: int, rank: int, *, shapes: Sequence[Any] = SHAPES) -> Tensor:
    of_step = shapes[step]
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(VOCABULARY, of_step[rank % len(of_step)], generator=generator)


def uneven() -> None:
    """A smaller last batch on one rank alone, and then other lengths; evaluations between, of other sizes again. Each
    rank's gradient is of the mean over its own batch, and ranks' means count alike."""
    num_ranks = dist.get_world_size()
    reference: Any = small()
    optimizer, expected = adamw(reference), []
    for step in range(len(SHAPES)):
        losses = [reference(batch(step, rank)) / num_ranks for rank in range(num_ranks)]
        sum(losses).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(sum(losses).detach()))  # type: ignore[union-attr]
        if step in EVALUATED:
            with torch.no_grad():
                evaluated = [float(reference(batch(step, rank + 1))) for rank in range(num_ranks)]
            expected.append(sum(evaluated) / num_ranks)
    cpu_allocator.install()  # what was allocated before is not metered
    least, found, renewed = HUGE, set(), []
    for stage, budget, dynamic in ((3, HUGE, None), (None, None, None), (1, HUGE, True)):
        torch._dynamo.reset()
        model: Any = chunkc.distribute(small(), mesh(), zero_stage=stage)
        options = {"memory_budget": budget or int(1.2 * least), "codegen": "eager", "debug": True}
        run = torch.compile(model, backend="chunkc", dynamic=dynamic, options=options)
        optimizer, losses = adamw(model), []
        for step in range(len(SHAPES)):
            loss = run(batch(step, dist.get_rank()))
            take_step(loss, optimizer)
            losses.append(mean(loss))
            if step in EVALUATED:
                with torch.no_grad():
                    losses.append(mean(run(batch(step, dist.get_rank() + 1))))
        check_close(losses, expected, relative=1e-6)
        report = chunkc.report(model)
        least = report.minimum_budget_nbytes
        within = report.predicted_peak_nbytes + NUMBERS_NBYTES
        assert report.measured_peak_nbytes <= within, "predicted for the largest of any rank"
        assert report.predicted_peak_nbytes <= options["memory_budget"]
        (session,) = sessions_of(model.parameters())
        found.add(bits(model))
        renewed.append(session.transport.num_renewed)
        del model, optimizer, run, session, report, loss  # of stage 1 much stands on the compute tier
        gc.collect()
    assert len(found) == 1, "a budget or a stage changed the result"
    assert of_all(renewed) == [renewed] * num_ranks


def sliced() -> None:
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
    check_close(losses, expected, relative=1e-6)


class Turning(nn.Module):
    """Another graph for long sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small()

    def forward(self, tokens: Tensor) -> Tensor:
        loss = self.inner(tokens)
        return loss + loss.square() if tokens.shape[1] > 6 else loss


def another_graph() -> None:
    torch.manual_seed(0)
    run = compiled(chunkc.distribute(Turning(), mesh(), timeout_s=20), HUGE)
    run(batch(0, 0)).backward()
    refused = told(lambda: run(batch(0, 0, shapes=[[(4, 8 if differs() else 5)]])))
    assert f"ranks differ in the program of the model: rank 1 of {dist.get_world_size()}" in refused


def too_large_on_one() -> None:
    """A batch for which one rank's budget is too small: it is so for all."""
    model: Any = chunkc.distribute(small(), mesh(), timeout_s=20)
    run, start = compiled(model, 100_000), time.monotonic()
    run(batch(0, 0)).backward()
    refused = told(lambda: run(batch(0, 0, shapes=[[(400 if differs() else 4, 5)]])))
    assert re.match("BudgetError: |DistributedError: rank . of [24] cannot go on. BudgetError", refused)
    assert time.monotonic() - start < 60


if __name__ == "__main__":
    rank_cases.run_command_line(globals())
