"""What ranks that compute layers together plan and measure beside what `chunkc.explain` says of rank 0; run as
`rank_cases` is."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

sys.path.append(str(Path(__file__).parent))

import rank_cases
from explain_cases import by_one, check_explained
from rank_cases import BATCH, HUGE, LENGTH, Result, adamw, compiled, take_step
from tensor_cases import Model, cube, cut, grid, made, parallel

import chunkc
from chunkc.ir.hardware import CPU
from chunkc.ir.shards import ZeroStage
from chunkc.runtime.device import cpu_allocator

TOKENS = BATCH // 2, LENGTH


def subject(mesh: DeviceMesh) -> tuple[Model, tuple[torch.Tensor]]:
    """For the command: what these ranks train."""
    return parallel(made(), place=mesh), (torch.zeros(TOKENS, dtype=torch.int64),)


def layers() -> Result:
    """With room for all where stages are chosen, and with none to spare in stage 3."""
    grid()["dp"], grid()["tp"]
    in_stage_3 = _planned(None, 3, "plain")
    _planned(HUGE, None, "rows")
    return in_stage_3


def layers_otherwise() -> Result:
    """The other way round."""
    grid()["dp"], grid()["tp"]
    in_stage_3 = _planned(HUGE, 3, "plain")
    _planned(None, None, "rows")
    return in_stage_3


def copies() -> Result:
    """Three dimensions, of which the first is of copies, all on one host."""
    cube()["copies", "dp"], cube()["tp"]
    return _planned(HUGE, 3, "copies")


def _planned(budget: int | None, stage: ZeroStage | None, plan: str) -> Result:
    """Steps of one batch, which come to what was said: to the byte for the ranks that have the largest parts, the first
    two of four. Without a budget, in the smallest."""
    place, num_ranks = cube() if plan == "copies" else grid(), dist.get_world_size()

    def explained(budget: int) -> chunkc.Explanation:
        on_copies = {"hardware": CPU.used_by(num_ranks, 1, 2, 2)}
        model, tokens = parallel(made(), plan, place), torch.zeros(TOKENS, dtype=torch.int64)
        on = on_copies if plan == "copies" else {"hardware": "cpu", "mesh": "1x2x2"}
        return by_one(lambda: chunkc.explain(model, tokens, memory_budget=budget, zero_stage=stage, **on))

    if budget is None:
        budget = explained(HUGE).minimum_budget_nbytes
    said = explained(budget)
    torch._dynamo.reset()
    gc.collect()
    cpu_allocator.install()
    foreign_nbytes = cpu_allocator.current_nbytes()
    model: Any = cut(made(), stage, plan)
    run, optimizer = compiled(model, budget), adamw(model)
    tokens = torch.zeros(TOKENS, dtype=torch.int64)
    for _ in range(3):
        take_step(run(tokens), optimizer)
    return check_explained(said, model, run, tokens, foreign_nbytes, is_largest=dist.get_rank() < 2)


if __name__ == "__main__":
    rank_cases.run_command_line(globals())
