"""Values that forwards save go home until the backward: the same bits, in less memory, inside a hard limit."""

from __future__ import annotations

import functools
import gc

import pytest
import torch
from harness import (
    TINY,
    assert_same_training,
    compile_case,
    differences,
    everything_fits,
    gradients,
    minimum_nbytes,
    refuse,
    session_of,
    train,
)
from torch import nn
from torch.utils.checkpoint import checkpoint
from zoo import LADDER

import chunkc


@functools.cache
def least_nbytes(name: str, activations: str, home: str = "cpu", codegen: str = "eager") -> int:
    """The smallest budget that `BudgetError` names for a model in one graph."""
    error = refuse(LADDER[name], memory_budget=TINY, home=home, codegen=codegen, activations=activations)
    return error.minimum_nbytes


SECOND = pytest.mark.second_tier

CONVNET_SHARE = 0.95 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 0.98
"""Without AVX-512 the scratch of convolutions is bounded, and more of the smallest budget is that."""

MODELS = [
    pytest.param("byte_gpt", "cpu", "eager", 0.75, marks=SECOND),
    pytest.param("checkpointed_gpt", "cpu", "eager", 1.0, marks=SECOND),
    pytest.param("gpt2_dropout", "disk", "eager", 0.75, marks=SECOND),
    pytest.param("llama_tied", "cpu", "eager", 0.8, marks=[SECOND, pytest.mark.slow]),
    pytest.param("convnet", "cpu", "eager", CONVNET_SHARE, marks=SECOND),
    pytest.param("autocast_gpt", "disk", "eager", 0.9, marks=[SECOND, pytest.mark.slow]),
    pytest.param("byte_gpt", "cpu", "inductor", 0.8, marks=[SECOND, pytest.mark.slow]),
    pytest.param("gpt2_dropout", "cpu", "inductor", 0.8, marks=[SECOND, pytest.mark.slow]),
]


@pytest.mark.parametrize(("name", "home", "codegen", "share"), MODELS)
def test_forced_copies_train_to_the_same_bits_in_less(name: str, home: str, codegen: str, share: float) -> None:
    nbytes = least_nbytes(name, "offload", home, codegen)
    assert nbytes <= share * minimum_nbytes(name, home, codegen)
    result = train(LADDER[name], memory_budget=nbytes, home=home, codegen=codegen, activations="offload", debug=True)
    assert_same_training(result, everything_fits(name, codegen))
    assert result.measured_peak_nbytes <= result.predicted_peak_nbytes <= nbytes
    assert result.allocator_peak_nbytes <= nbytes
    if (name, codegen) == ("byte_gpt", "eager"):
        assert result.measured_peak_nbytes == result.predicted_peak_nbytes


@pytest.mark.second_tier
@pytest.mark.parametrize("part", [0.3, *(pytest.param(part, marks=pytest.mark.slow) for part in (0.0, 0.7))])
def test_as_much_goes_home_as_the_budget_needs(part: float) -> None:
    """Between the smallest budgets with and without copies, each budget has a plan, and the peak is as predicted."""
    least, most = least_nbytes("byte_gpt", "auto"), minimum_nbytes("byte_gpt")
    assert least == least_nbytes("byte_gpt", "offload")
    nbytes = int(least + part * (most - least))
    result = train(LADDER["byte_gpt"], memory_budget=nbytes, activations="auto", whole_graph="never")
    assert_same_training(result, everything_fits("byte_gpt"))
    assert result.predicted_peak_nbytes <= nbytes
    dropped = sum(tensor.nbytes for tensor in LADDER["byte_gpt"].batch(0).values()) + 4
    unused = result.predicted_peak_nbytes - result.measured_peak_nbytes
    assert unused in (0, dropped), "the fullest moment may be of an update, before which the loop drops batch and loss"


@pytest.mark.second_tier
@pytest.mark.parametrize("name", ["sometimes_unused", pytest.param("graph_breaks", marks=pytest.mark.slow)])
def test_several_graphs_train_to_the_same_bits(name: str) -> None:
    nbytes = 2 * minimum_nbytes(name)
    result = train(LADDER[name], memory_budget=nbytes, limit=False, activations="offload")
    assert_same_training(result, everything_fits(name))


def _compiled(activations: str, budget_nbytes: int | None = None) -> tuple[nn.Module, nn.Module]:
    nbytes = budget_nbytes or 2 * minimum_nbytes("short_gpt")
    return compile_case(LADDER["short_gpt"], memory_budget=nbytes, activations=activations, whole_graph="never")


@pytest.mark.second_tier
def test_a_graph_that_is_kept_runs_again_and_two_forwards_keep_their_own() -> None:
    def grads(activations: str) -> object:
        model, compiled = _compiled(activations)
        first, second = (compiled(**LADDER["short_gpt"].batch(seed)) for seed in (0, 1))
        second.backward(retain_graph=True)
        found = [gradients(model)]
        second.backward()
        first.backward()
        if activations == "offload":
            room = session_of(model).saved_room
            assert room.nbytes > 0
            del first, second
            assert room.in_use_nbytes == 0
        return [*found, gradients(model)]

    assert not differences(grads("offload"), grads("keep"))


@pytest.mark.second_tier
def test_an_abandoned_forward_gives_everything_back() -> None:
    model, compiled = _compiled("offload")
    room = session_of(model).saved_room
    compiled(**LADDER["short_gpt"].batch(0)).backward()
    most = room.nbytes
    for seed in range(3):
        loss = compiled(**LADDER["short_gpt"].batch(seed))
        assert room.in_use_nbytes == most
        del loss
        gc.collect()
        assert room.in_use_nbytes == 0
    assert room.nbytes == most
    loss = compiled(**LADDER["short_gpt"].batch(0))
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.second_tier
def test_where_the_budget_suffices_nothing_goes_home() -> None:
    nbytes = minimum_nbytes("short_gpt")
    model, compiled = _compiled("auto", nbytes)
    compiled(**LADDER["short_gpt"].batch(0)).backward()
    assert session_of(model).saved_room.nbytes == 0
    plan = chunkc.report(compiled).plan_text
    _, kept = _compiled("keep", nbytes)
    kept(**LADDER["short_gpt"].batch(0)).backward()
    assert plan.splitlines()[1:] == chunkc.report(kept).plan_text.splitlines()[1:]


@pytest.mark.second_tier
def test_hooks_that_copy_what_stands_for_values_are_refused() -> None:
    _, compiled = _compiled("offload")
    with torch.autograd.graph.save_on_cpu():  # which leaves alone what is on the CPU already, stand-ins too
        compiled(**LADDER["short_gpt"].batch(0)).backward()
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved):
        loss = compiled(**LADDER["short_gpt"].batch(0))
    with pytest.raises(chunkc.UnsupportedError, match='activations="keep"'):
        loss.backward()


@pytest.mark.second_tier
def test_explain_says_what_training_does() -> None:
    """The smallest budget, the peak, and what goes home, before anything runs."""
    case = LADDER["short_gpt"]
    nbytes = least_nbytes("short_gpt", "offload")
    explanation = chunkc.explain(case.build(0), **case.batch(0), memory_budget=nbytes, activations="offload")
    assert (explanation.fits, explanation.minimum_budget_nbytes) == (True, nbytes)
    model, compiled = _compiled("offload", nbytes)
    compiled(**case.batch(0)).backward()
    assert chunkc.report(compiled).predicted_peak_nbytes == explanation.predicted_peak_nbytes
    assert session_of(model).saved_room.nbytes == sum(explanation.saved_at_home.values()) > 0
    assert sum(explanation.peak.contents.values()) == explanation.predicted_peak_nbytes
    moved = {kind: sum(e.nbytes for e in explanation.events if e.kind == kind) for kind in ("offload", "reload")}
    assert set(moved.values()) == {session_of(model).saved_room.nbytes}


@pytest.mark.second_tier
def test_sizes_that_differ_from_call_to_call() -> None:
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
        assert (session_of(model).saved_room.nbytes > 0) == (activations == "offload")
        return [loss.detach().numpy().copy() for loss in losses], gradients(model)

    assert not differences(results("offload"), results("keep"))


class Checkpointed(nn.Module):
    """Calls a compiled part inside a checkpoint of the user's, which drops what it saves and runs it again."""

    def __init__(self, options: dict[str, object]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.part = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.2), nn.Linear(256, 64))
        self.run = torch.compile(self.part, backend="chunkc", options=options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.run, x, use_reentrant=False).square().mean()


@pytest.mark.second_tier
def test_a_checkpoint_around_a_compiled_part_is_respected() -> None:
    def grads(activations: str) -> object:
        torch._dynamo.reset()
        options = {"memory_budget": 1 << 24, "codegen": "eager", "whole_graph": "never", "activations": activations}
        model = Checkpointed(options)
        model(torch.randn(64, 64, requires_grad=True)).backward()
        assert (session_of(model).saved_room.nbytes > 0) == (activations == "offload")
        return gradients(model)

    torch.manual_seed(1)
    state = torch.get_rng_state()
    offloaded = grads("offload")
    torch.set_rng_state(state)
    assert not differences(offloaded, grads("keep"))
