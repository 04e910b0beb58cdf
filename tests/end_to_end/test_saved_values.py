"""Values that forwards save leave until the backward: the same bits, in less memory, inside a hard limit.

They go home (`"offload"`), or are made again (`"rerun"`; `test_recompute.py` is about these alone).
"""

from __future__ import annotations

import gc

import pytest
import torch
from harness import (
    counted,
    differences,
    gradients,
    session_of,
)
from saved_cases import compiled_gpt, least_nbytes, repeated, ways_taken
from torch import nn
from torch.utils.checkpoint import checkpoint
from zoo import LADDER

import chunkc

SECOND = pytest.mark.second_tier

both_ways = pytest.mark.parametrize("way", ["offload", "rerun"])


@SECOND
@both_ways
def test_a_graph_that_is_kept_runs_again_and_two_forwards_keep_their_own(way: str) -> None:
    def grads(activations: str) -> object:
        model, compiled = compiled_gpt(activations)
        first, second = (compiled(**LADDER["short_gpt"].batch(seed)) for seed in (0, 1))
        second.backward(retain_graph=True)
        found = [gradients(model)]
        second.backward()
        assert ways_taken(model) == {activations} - {"keep"}
        first.backward()
        del first, second
        assert session_of(model).saved_room.in_use_nbytes == 0
        return [*found, gradients(model)]

    assert not differences(grads(way), grads("keep"))


@SECOND
@both_ways
def test_hooks_that_copy_what_stands_for_values_are_refused(way: str) -> None:
    _, compiled = compiled_gpt(way)
    with torch.autograd.graph.save_on_cpu():  # which leaves alone what is on the CPU already, stand-ins too
        compiled(**LADDER["short_gpt"].batch(0)).backward()
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved):
        loss = compiled(**LADDER["short_gpt"].batch(0))
    with pytest.raises(chunkc.UnsupportedError, match='activations="keep"'):
        loss.backward()


@SECOND
@both_ways
def test_explain_says_what_training_does(way: str) -> None:
    """The smallest budget, the peak, and what leaves, before anything runs."""
    case = LADDER["short_gpt"]
    nbytes = least_nbytes("short_gpt", way)
    explanation = chunkc.explain(case.build(0), **case.batch(0), memory_budget=nbytes, activations=way)
    assert (explanation.fits, explanation.minimum_budget_nbytes) == (True, nbytes)
    model, compiled = compiled_gpt(way, nbytes)
    compiled(**case.batch(0)).backward()
    assert chunkc.report(compiled).predicted_peak_nbytes == explanation.predicted_peak_nbytes
    assert sum(explanation.peak.contents.values()) == explanation.predicted_peak_nbytes
    assert {moment.call for moment in explanation.moments if "rerun" in moment.call} == repeated(compiled)
    assert ways_taken(model) == {way}
    at_home = session_of(model).saved_room.nbytes
    assert at_home == sum(explanation.saved_at_home.values())
    for kind in ("offload", "reload"):
        assert sum(e.nbytes for e in explanation.events if e.kind == kind) == at_home


@SECOND
@both_ways
def test_sizes_that_differ_from_call_to_call(way: str) -> None:
    """Of dynamic shapes, sizes are read off what the backward is given, stand-ins among it."""

    def results(activations: str) -> object:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.GELU())
        options = {"memory_budget": 1 << 24, "codegen": "eager", "whole_graph": "never", "activations": activations}
        compiled = torch.compile(model, backend="chunkc", options=options, dynamic=True)
        losses = [compiled(torch.ones(batch, 64)).square().sum() for batch in (32, 48, 32)]
        for loss in losses:
            loss.backward()
        assert ways_taken(model) == {activations} - {"keep"}
        return [loss.detach().numpy().copy() for loss in losses], gradients(model)

    assert not differences(results(way), results("keep"))


class Checkpointed(nn.Module):
    """Calls a compiled part inside a checkpoint of the user's, which drops what it saves and runs it again."""

    def __init__(self, options: dict[str, object]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.part = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Dropout(0.2), nn.Linear(64, 64))
        self.run = torch.compile(self.part, backend="chunkc", options=options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.run, x, use_reentrant=False).square().mean()


@SECOND
@both_ways
def test_a_checkpoint_around_a_compiled_part_is_respected(way: str) -> None:
    def grads(activations: str) -> object:
        torch._dynamo.reset()
        options = {"memory_budget": 1 << 24, "codegen": "eager", "chunk_size": 16384, "whole_graph": "never"}
        model = Checkpointed(options | {"activations": activations})
        torch.manual_seed(1)
        model(torch.randn(64, 64, requires_grad=True)).backward()
        assert ways_taken(model.part) == {activations} - {"keep"}
        return gradients(model)

    assert not differences(grads(way), grads("keep"))


# ---------------------------------------------------------------- home


@SECOND
def test_an_abandoned_forward_gives_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model, compiled = compiled_gpt("offload")
    room = session_of(model).saved_room
    compiled(**LADDER["short_gpt"].batch(0)).backward()
    most, allocations = room.nbytes, counted(monkeypatch, room._home, "allocate")
    for seed in range(3):
        loss = compiled(**LADDER["short_gpt"].batch(seed))
        assert room.in_use_nbytes == most
        del loss
        gc.collect()
        assert room.in_use_nbytes == 0
    assert room.nbytes == most
    assert allocations.calls == 0, "regions are used again"
    loss = compiled(**LADDER["short_gpt"].batch(0))
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
