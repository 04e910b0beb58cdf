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
from rank_cases import HUGE, NUMBERS_NBYTES, Result, adamw, arrays, bits, compiled, mean, mesh
from zoo import CASES as MODELS

import chunkc
from chunkc.ir.shards import ZeroStage
from chunkc.runtime.device import cpu_allocator
from chunkc.session.session import sessions_of

NUM_STEPS = 3
EVERY_WAY = tuple((stage, home) for stage in (3, 2, 1, None) for home in ("cpu", "disk"))
FEW_WAYS: tuple[tuple[ZeroStage | None, str], ...] = ((None, "disk"),)


def climbed(name: str, ways: tuple[tuple[ZeroStage | None, str], ...], folder: Path) -> Result:
    """Of one model: losses of one process with all batches, and what ranks come to in each stage with each home.

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
    found: Result = {"expected": expected, "num_ranks": num_ranks, "runs": []}
    for stage, home in ways:
        where = "cpu" if home == "cpu" else f"disk:{folder}"
        roomy = _run(name, stage, where, HUGE)
        least, most = roomy["minimum"], roomy["peaks"][1]
        budget = (least + most) // 2 if stage is None else least
        for run in (roomy, _run(name, stage, where, budget)):
            pairs = zip(run.pop("weights"), weights, strict=True)
            run["difference"] = max(float(abs(value - other).max()) for value, other in pairs)
            found["runs"].append({**run, "home": home})
    return found


def _run(name: str, stage: ZeroStage | None, where: str, budget: int) -> Result:
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
    parts = [(g, s.spec) for g in groups for s in g.slices]
    return {
        "stage": stage,
        "budget": budget,
        "losses": losses,
        "bits": bits(model),
        "weights": arrays(model),
        "minimum": report.minimum_budget_nbytes,
        "peaks": (report.measured_peak_nbytes, report.predicted_peak_nbytes),
        "sent": {channel: n - sent[channel] for channel, n in session.transport.sent_nbytes.items()},
        "gathered": sum(
            s.spec.home_nbytes * report.plan_text.count(f"prefetch(param:{g.index}, gather)")
            for g in groups
            if not g.replicated_kinds
            for s in g.slices
        ),
        "standing": sum(spec.home_nbytes for g, spec in parts if g.replicated_kinds and g.trainable),
        "trained": sum(spec.whole_nbytes for g, spec in parts if g.trainable),
        "own": sum(spec.home_nbytes for g, spec in parts if g.trainable),
        "whole": len([g for g in groups if g.replicated_kinds]) / len(groups),
        "at_home": report.home_nbytes,
    }


def _batch_nbytes(case: Any) -> int:
    return sum(v.nbytes for v in case.batch(0).values() if isinstance(v, torch.Tensor))


NAMES = ("gpt2", "bert", "vit", "llama", "mixtral", "t5")
CASES = {name: partial(climbed, name, EVERY_WAY) for name in NAMES}
CASES["few"] = partial(climbed, "llama", FEW_WAYS)

if __name__ == "__main__":
    rank_cases.run_command_line(CASES, CASES)
