"""What ranks plan and measure beside what `chunkc.explain` says of rank 0; run as `rank_cases` is."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parent))

import rank_cases
from rank_cases import HUGE, Result, adamw, batches, compiled, made, mesh, of_all, own, take_step, told

import chunkc
from chunkc.ir.shards import ZeroStage
from chunkc.runtime.device import cpu_allocator
from chunkc.runtime.store.shards import local_shard_of
from chunkc.session.session import owner, sessions_of

PADDING = 1.15
"""Chunks are gathered with the gaps that align parameters, which are no messages; these parameters are tiny."""


def by_one(explain: Callable[[], chunkc.Explanation]) -> chunkc.Explanation:
    """What rank 0 says."""
    return of_all(explain() if dist.get_rank() == 0 else None)[0]


def explained() -> None:
    """To the byte, in stages of ZeRO, forced and chosen, with room for all and none to spare."""
    stage: ZeroStage | None
    for stage in (3, None) if dist.get_world_size() == 2 else (3, 1, None):
        _explained(_explained(HUGE, stage), stage)


def _explained(budget: int, stage: ZeroStage | None) -> int:
    """Steps of one batch: what the last one came to is what was said; the smallest budget."""
    on = {"world_size": dist.get_world_size(), "zero_stage": stage, "hardware": "cpu"}
    said = by_one(lambda: chunkc.explain(made(), own(batches(0)[0]), memory_budget=budget, **on))
    torch._dynamo.reset()
    gc.collect()
    cpu_allocator.install()
    foreign_nbytes = cpu_allocator.current_nbytes()
    model = chunkc.distribute(made(), mesh(), zero_stage=stage)
    run, optimizer = compiled(model, budget), adamw(model)
    tokens = own(batches(0)[0]).clone()
    sent: list[int] = []
    for _ in range(3):
        loss = run(tokens)
        take_step(loss, optimizer)
        (session,) = sessions_of(model.parameters())
        sent.append(sum(session.transport.sent_nbytes[channel] for channel in ("gathers", "scatters")))
    assert said.ranks is not None
    come_to = check_explained(said, model, run, tokens, foreign_nbytes, is_largest=dist.get_rank() == 0)
    if dist.get_rank() == 0:
        assert sent[2] - sent[1] <= said.ranks.link_nbytes["between_devices"] < PADDING * (sent[2] - sent[1])
    return come_to["minimum"]


def check_explained(
    said: chunkc.Explanation, model: Any, run: Any, tokens: torch.Tensor, foreign_nbytes: int, *, is_largest: bool
) -> Result:
    """Check that a model's steps on this rank came to what was said; `foreign_nbytes` are nobody's here.

    Args:
        is_largest: this rank has the largest parts, of which explanations are.
    """
    report = chunkc.report(model)
    refusal = told(lambda: chunkc.explain(run, tokens))
    assert "is distributed already: explain the model as it is before" in refusal
    parts = [local_shard_of(parameter) for parameter in model.parameters()]
    foreign_nbytes += sum(part.nbytes for part in parts if owner(part) is None)  # of which no graph knows
    assert report.measured_peak_nbytes - foreign_nbytes == report.predicted_peak_nbytes
    assert report.minimum_budget_nbytes == said.minimum_budget_nbytes
    assert report.predicted_peak_nbytes <= said.predicted_peak_nbytes, "less where the optimizer's step is the peak"
    assert report.home_nbytes <= said.home_nbytes
    if is_largest:
        assert report.predicted_peak_nbytes == said.predicted_peak_nbytes
        assert report.home_nbytes == said.home_nbytes
    plan, made = (text.partition("\nplan:")[0].strip() for text in (said.plan_text, report.plan_text))
    assert plan == made
    return {"peak": report.predicted_peak_nbytes, "minimum": report.minimum_budget_nbytes, "plan": plan}


if __name__ == "__main__":
    rank_cases.run_command_line(globals())
