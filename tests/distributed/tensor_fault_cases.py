"""Faults of ranks that compute layers together: those of `rank_cases`, and some more; run as that is."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

sys.path.append(str(Path(__file__).parent))

import rank_cases
from rank_cases import HUGE, Result, batches, compiled, ended_by, fault, refusal, told
from tensor_cases import grid, own

import chunkc
from chunkc.ir.shards import ZeroStage
from chunkc.passes.graphs import collectives


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(12, 8), nn.Linear(8, 6), nn.Linear(6, 8)
        self.extra = nn.Linear(3, 3, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.down(self.up(self.embed(tokens))).square().mean()


def layers() -> Tiny:
    styles = {"embed": RowwiseParallel(input_layouts=Replicate()), "up": ColwiseParallel(), "down": RowwiseParallel()}
    model = Tiny()
    parallelize_module(model, grid()["tp"], styles)
    return model


def tiny(**how: Any) -> Any:
    return chunkc.distribute(layers(), grid()["dp"], **how)


@fault
def killed_in_a_layer(run: Any, model: nn.Module) -> None:
    """A rank ends in the middle of a forward."""
    meet, calls = collectives.Rendezvous.__call__, [0]

    def ends(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return meet(*args)

    with patch.object(collectives.Rendezvous, "__call__", ends if dist.get_rank() == 1 else meet):
        run(own(batches(0)[0]))
    run(own(batches(0)[0]))


def hung() -> Result:
    def action(run: Any, model: nn.Module) -> None:
        if dist.get_rank() == 1:
            time.sleep(6)
        run(own(batches(0)[0])).backward()

    return ended_by(action, timeout_s=4)


def another_codegen() -> Result:
    model, whole_graph = tiny(), "never" if dist.get_rank() == 1 else "auto"
    return refusal(lambda: compiled(model, HUGE, whole_graph=whole_graph)(own(batches(0)[0])))


def another_stage() -> Result:
    model = layers()
    kept = model.up.weight
    zero_stage: ZeroStage = 3 if dist.get_rank() == 1 else 2
    found = refusal(lambda: chunkc.distribute(model, grid()["dp"], zero_stage=zero_stage))
    return {**found, "kept": model.up.weight is kept}


def refused_on_one() -> Result:
    """One rank's arguments or model are refused before anything moves; then all go on."""

    def attempt(**given: Any) -> str:
        model = layers()
        if given.pop("views", False):
            model.extra.weight.data = model.extra.weight.data.t()
        return told(lambda: chunkc.distribute(model, **{"mesh": grid()["dp"], "timeout_s": 20} | given))

    start, is_one = time.monotonic(), dist.get_rank() == 1
    messages = [attempt(views=is_one), attempt(home="nowhere" if is_one else "cpu"), attempt()]
    return {"message": "\n".join(messages), "took": time.monotonic() - start}


@fault
def lamb_of_others(run: Any, model: Any) -> None:
    """A rank has fewer gradients than the others of its layers when LAMB adds up norms."""
    if dist.get_rank() == 1:
        model.down.bias.grad = None
    chunkc.optim.LAMB(model.parameters()).step()


if __name__ == "__main__":
    rank_cases.tiny = tiny
    rank_cases.own = own
    rank_cases.run_command_line(vars(rank_cases) | globals())
