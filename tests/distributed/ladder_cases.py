"""Models of the ladder on ranks: what each rank computes, has, sends and measures; run as `rank_cases` is."""

from __future__ import annotations

import gc
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]

import rank_cases
from rank_cases import (
    HUGE,
    NUMBERS_NBYTES,
    adamw,
    arrays,
    bits,
    check_close,
    check_weights,
    compiled,
    mean,
    mesh,
    of_all,
)
from zoo import CASES as MODELS

import chunkc
from chunkc.ir.shards import ZeroStage
from chunkc.runtime.device import cpu_allocator
from chunkc.session.session import sessions_of

NUM_STEPS = 3
EVERY_WAY = tuple((stage, home) for stage in (3, 2, 1, None) for home in ("cpu", "disk"))
FEW_WAYS: tuple[tuple[ZeroStage | None, str], ...] = ((None, "disk"),)


def climbed(name: str, ways: tuple[tuple[ZeroStage | None, str], ...], folder: Path) -> None:
    """Of one model: ranks train as one process with all batches, in each stage with each home.

    Budgets are the least of a stage; where the plan chooses, half-way to room for all.
    """
    case, num_ranks = MODELS[name], dist.get_world_size()
    reference = case.build()
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-3)
    expected = []
    for step in range(NUM_STEPS):
        of_ranks = []
        for rank in range(num_ranks):
            loss = case.loss(reference(**case.batch(step * num_ranks + rank))) / num_ranks
            loss.backward()
            of_ranks.append(loss.item())
        plain.step()
        plain.zero_grad()
        expected.append(sum(of_ranks))
    weights = arrays(reference)
    del reference, plain
    gc.collect()
    cpu_allocator.install()
    found = set()
    for stage, home in ways:
        where, budget = "cpu" if home == "cpu" else f"disk:{folder}", HUGE
        for _ in range(2):
            found_bits, least, most = _run(name, stage, where, budget, expected, weights)
            found.add(found_bits)
            budget = (least + most) // 2 if stage is None else least
    assert len(found) == 1, "a budget, a stage or a home changed the result"


def _run(
    name: str, stage: ZeroStage | None, where: str, budget: int, expected: list[float], weights: list[Any]
) -> tuple[str, int, int]:
    """Train, and check results, bytes and messages; the bits, the smallest budget and the predicted peak."""
    torch._dynamo.reset()
    gc.collect()
    case, rank, num_ranks = MODELS[name], dist.get_rank(), dist.get_world_size()
    model: nn.Module = chunkc.distribute(case.build(), mesh(), zero_stage=stage, home=where)
    run, optimizer = compiled(model, budget), adamw(model)
    losses: list[float] = []

    def train(steps: range) -> None:
        for step in steps:
            loss = case.loss(run(**case.batch(step * num_ranks + rank)))
            loss.backward()
            losses.append(mean(loss))
            optimizer.step()
            optimizer.zero_grad()

    with cpu_allocator.hard_limit(cpu_allocator.current_nbytes() + budget):
        train(range(NUM_STEPS - 1))
    (session,) = sessions_of(model.parameters())
    before = chunkc.report(model)
    sent = dict(session.transport.sent_nbytes)
    with cpu_allocator.hard_limit(before.predicted_peak_nbytes + NUMBERS_NBYTES + _batch_nbytes(case)):
        train(range(NUM_STEPS - 1, NUM_STEPS))
    report, groups = chunkc.report(model), session.store.layout.groups
    check_close(losses, expected, within=1e-6, relative=1e-6)
    check_weights(model, weights, 1e-5)
    measured, predicted = report.measured_peak_nbytes, report.predicted_peak_nbytes
    assert measured - predicted <= NUMBERS_NBYTES, "less, where outputs are dropped before the next step"
    assert predicted <= budget
    parts = [(g, s.spec) for g in groups for s in g.slices]
    gathered = sum(
        spec.home_nbytes * report.plan_text.count(f"prefetch(param:{g.index}, gather)")
        for g, spec in parts
        if not g.replicated_kinds
    )
    standing = sum(spec.home_nbytes for g, spec in parts if g.replicated_kinds and g.trainable)
    trained = sum(spec.whole_nbytes for g, spec in parts if g.trainable)
    own = sum(spec.home_nbytes for g, spec in parts if g.trainable)
    gathers, scatters = (session.transport.sent_nbytes[c] - sent[c] for c in ("gathers", "scatters"))
    assert gathers == (num_ranks - 1) * (gathered + standing)
    assert scatters == trained - own
    of_ranks = of_all((own, gathers + scatters))
    assert sum(nbytes for nbytes, _ in of_ranks) == trained, "each rank has its part, and no more"
    assert own <= 1.1 * trained / num_ranks
    times = sum(nbytes for _, nbytes in of_ranks) / (trained * (num_ranks - 1))
    assert times <= 3.03, "half as much more in stage 3"
    if stage in (1, 2):
        assert abs(times - 2) <= 0.01 * 2, "as plain data parallelism"
    return bits(model), report.minimum_budget_nbytes, predicted


def _batch_nbytes(case: Any) -> int:
    return sum(v.nbytes for v in case.batch(0).values() if isinstance(v, torch.Tensor))


if __name__ == "__main__":
    few = {"few": partial(climbed, "llama", FEW_WAYS)}
    rank_cases.run_command_line({name: partial(climbed, name, EVERY_WAY) for name in MODELS} | few)
