"""What ranks plan and measure beside what `chunkc.explain` says of rank 0; run as `rank_cases` is."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parent))

import rank_cases
from checkpoint_cases import attempted
from rank_cases import HUGE, Result, adamw, batches, compiled, made, mesh, own

import chunkc
from chunkc.ir.shards import ZeroStage
from chunkc.runtime.device import cpu_allocator
from chunkc.runtime.store.shards import local_shard_of
from chunkc.session.session import owner, sessions_of


def explained() -> Result:
    """In stages of ZeRO, forced and chosen, with room for all, and with none to spare."""
    runs = []
    stage: ZeroStage | None
    for stage in (3, None) if dist.get_world_size() == 2 else (3, 1, None):
        roomy = _explained(HUGE, stage)
        runs += [roomy, _explained(roomy["ranks"]["minimum"], stage)]
    return {"runs": runs}


def _explained(budget: int, stage: ZeroStage | None) -> Result:
    """Steps of one batch: what the last one came to, and what was said."""
    said = chunkc.explain(
        made(),
        own(batches(0)[0]),
        memory_budget=budget,
        world_size=dist.get_world_size(),
        zero_stage=stage,
        hardware="cpu",
    )
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
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        (session,) = sessions_of(model.parameters())
        sent.append(sum(session.transport.sent_nbytes[channel] for channel in ("gathers", "scatters")))
    assert said.ranks is not None
    beside = {"sent": sent[2] - sent[1], "link": said.ranks.link_nbytes["between_devices"]}
    return came_to(said, model, run, tokens, foreign_nbytes) | beside


def came_to(said: chunkc.Explanation, model: Any, run: Any, tokens: torch.Tensor, foreign_nbytes: int) -> Result:
    """What was said of a model's steps on this rank, and what they came to; `foreign_nbytes` are nobody's here."""
    report = chunkc.report(model)
    refusal = attempted(lambda: chunkc.explain(run, tokens))
    parts = [local_shard_of(parameter) for parameter in model.parameters()]
    foreign_nbytes += sum(part.nbytes for part in parts if owner(part) is None)  # of which no graph knows
    return {
        "explained": {
            "peak": said.predicted_peak_nbytes,
            "minimum": said.minimum_budget_nbytes,
            "home": said.home_nbytes,
        },
        "ranks": {
            "peak": report.predicted_peak_nbytes,
            "minimum": report.minimum_budget_nbytes,
            "home": report.home_nbytes,
        },
        "distributed already": refusal,
        "measured": report.measured_peak_nbytes - foreign_nbytes,
        "plans": [text.partition("\nplan:")[0].strip() for text in (said.plan_text, report.plan_text)],
    }


CASES = {case.__name__: case for case in (explained,)}

if __name__ == "__main__":
    rank_cases.run_command_line(CASES)
