"""Deeper models of the ladder train in half of what they need with all values kept, or less, to the same bits.

Values leave in each way, and groups are updated in the backward or after it, inside a hard limit.
"""

from __future__ import annotations

import functools
import gc
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from harness import HUGE, Arrays, array, compile_case, differences, weights
from ladder_modules import AutocastGPT, CheckpointedGPT
from plain_modules import VOCAB, BreaksInLoop, ByteGPT
from torch import Tensor
from zoo import Batch, Case, byte_batch, gpt2, integers, llama

import chunkc
from chunkc.explaining.explain import minimum_budget
from chunkc.runtime.device import cpu_allocator

pytestmark = [pytest.mark.second_tier, pytest.mark.timeout(900)]

LAYERS, LENGTH, NUM_STEPS = 12, 64, 3
MANY = 64
"""Of a model whose blocks are checkpointed already: what is left to save is the inputs of blocks."""


class BreaksTwice(ByteGPT):
    """Three graphs of different blocks."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.embed(x)
        hidden = self.blocks[0](self.blocks[1](self.blocks[2](self.blocks[3](hidden))))
        torch._dynamo.graph_break()
        hidden = self.blocks[4](self.blocks[5](self.blocks[6](self.blocks[7](hidden))))
        torch._dynamo.graph_break()
        hidden = self.blocks[8](self.blocks[9](self.blocks[10](self.blocks[11](hidden))))
        return self.score(hidden, y)


def tokens(seed: int) -> Batch:
    found = integers(seed, (2, LENGTH), VOCAB)
    return {"input_ids": found, "labels": found.clone()}


def of_bytes(name: str, kind: type[ByteGPT], num_layers: int = LAYERS, *, batch: int = 2, num_graphs: int = 1) -> Case:
    return Case(
        name, lambda: kind(num_layers=num_layers), lambda seed: byte_batch(seed, LENGTH, batch), num_graphs=num_graphs
    )


DEEP = {
    case.name: case
    for case in (
        of_bytes("byte_gpt", ByteGPT),
        of_bytes("autocast_gpt", AutocastGPT),
        of_bytes("checkpointed_gpt", CheckpointedGPT, MANY, batch=8),
        of_bytes("breaks_twice", BreaksTwice, num_graphs=3),
        of_bytes("breaks_in_loop", BreaksInLoop, num_graphs=3),
        Case("gpt2_dropout", lambda: gpt2(LAYERS), tokens, transformers=True),
        Case("llama_tied", lambda: llama(tied=True, num_layers=LAYERS), tokens, transformers=True),
    )
}


@dataclass(frozen=True)
class Trained:
    losses: list[np.ndarray]
    weights: Arrays
    report: chunkc.Report
    measured_peak_nbytes: int


def trained(name: str, codegen: str, budget_nbytes: int, activations: str, overlap: str) -> Trained:
    """The budget is the hard limit from the second step on: in the first one, Dynamo traces."""
    cpu_allocator.install()
    gc.collect()
    foreign_nbytes, case = cpu_allocator.current_nbytes(), DEEP[name]
    options = {"activations": activations, "whole_graph": "never"}
    model, compiled = compile_case(case, memory_budget=budget_nbytes, codegen=codegen, **options)
    optimizer = chunkc.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, overlap=overlap)
    losses: list[np.ndarray] = []
    torch.manual_seed(0)
    for step in range(NUM_STEPS):
        batch = case.batch(step)
        with cpu_allocator.hard_limit(foreign_nbytes + budget_nbytes if step else None):
            loss = case.loss(compiled(**batch))
            loss.backward()
            optimizer.step()
        losses.append(array(loss))
        optimizer.zero_grad()
        del batch, loss
    chunkc.synchronize(model)
    report = chunkc.report(compiled)
    assert report.measured_peak_nbytes is not None
    return Trained(losses, weights(model), report, report.measured_peak_nbytes - foreign_nbytes)


@functools.cache
def unlimited(name: str, codegen: str) -> Trained:
    return trained(name, codegen, HUGE, "keep", "none")


@functools.cache
def kept_nbytes(name: str, codegen: str) -> int:
    """The smallest budget in which all values stay, and groups are updated after the backward."""
    return minimum_budget(
        DEEP[name].build(), **DEEP[name].batch(0), memory_budget=1, codegen=codegen, activations="keep"
    )


def variants() -> list[Any]:
    """Three in the second tier; the others are slow."""
    quick = {
        ("byte_gpt", "eager", "auto", "backward"),
        ("breaks_twice", "eager", "auto", "none"),
        ("gpt2_dropout", "eager", "rerun", "backward"),
    }
    ways = product(DEEP, ("eager", "inductor"), ("auto", "offload", "rerun"), ("none", "backward"))
    return [pytest.param(*way, marks=[] if way in quick else pytest.mark.slow) for way in ways]


@pytest.mark.parametrize(("name", "codegen", "activations", "overlap"), variants())
def test_half_of_the_memory_is_enough(name: str, codegen: str, activations: str, overlap: str) -> None:
    budget = kept_nbytes(name, codegen) // 2
    found, expected = trained(name, codegen, budget, activations, overlap), unlimited(name, codegen)
    assert not differences([found.losses, found.weights], [expected.losses, expected.weights])
    assert found.measured_peak_nbytes <= found.report.predicted_peak_nbytes <= budget
