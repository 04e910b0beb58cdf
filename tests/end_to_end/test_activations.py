"""Values that forwards save leave until the backward: the same bits, in less memory, inside a hard limit. They go home
(`"offload"`), or are made again (`"rerun"`).
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import ref

import pytest
import torch
from harness import (
    HUGE,
    TINY,
    adamw,
    array,
    assert_same_training,
    compile_case,
    counted,
    differences,
    everything_fits,
    gradients,
    minimum_nbytes,
    refuse,
    session_of,
    train,
    train_steps,
    weights,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zoo import LADDER, Case, floats

import chunkc
from chunkc.policy import activation_search, captured_step, decide
from chunkc.policy.captured_step import Captured
from chunkc.runtime.device import cpu_allocator
from chunkc.torch_private import onednn

SECOND = pytest.mark.second_tier


class Norms(nn.Module):
    """Convolutions whose batch norms update their statistics: most of its memory is what they save."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(3 if i == 0 else 16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
            for i in range(6)
        )
        self.head = nn.Linear(16, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            images = block(images)
        return self.head(images.mean((2, 3))).square().mean()


@SECOND
@pytest.mark.parametrize("codegen", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_batch_norms_are_repeated_with_the_statistics_that_they_read(codegen: str) -> None:
    """Their buffers have other contents by then; what the repeated ones make of these is nobody's."""
    case = Case("norms", Norms, lambda seed: {"images": floats(seed, (4, 3, 16, 16))})
    how: dict[str, Any] = {"codegen": codegen, "whole_graph": "never"}
    kept = refuse(case, memory_budget=TINY, **how).minimum_nbytes
    nbytes = refuse(case, memory_budget=TINY, activations="rerun", **how).minimum_nbytes
    is_known = onednn.uses_avx512()  # else the scratch of convolutions is bounded
    assert nbytes < (0.7 if is_known else 0.82) * kept
    result = train(case, memory_budget=nbytes, activations="rerun", debug=True, **how)
    assert_same_training(result, train(case, memory_budget=HUGE, limit=False, **how))
    assert any(name.endswith("running_var") for name in result.weights)
    assert result.measured_peak_nbytes <= result.predicted_peak_nbytes <= nbytes


@SECOND
def test_an_abandoned_forward_gives_its_slots_back() -> None:
    cpu_allocator.install()
    _, compiled = compiled_gpt("rerun")
    compiled(**LADDER["short_gpt"].batch(0)).backward()
    batch = LADDER["short_gpt"].batch(0)
    gc.collect()
    gc.disable()
    try:
        left = set()
        for _ in range(3):
            loss = compiled(**batch)
            held = cpu_allocator.current_nbytes()
            del loss
            left.add(cpu_allocator.current_nbytes())  # chunks in slots, for a backward that does not come
            assert max(left) < held
        assert len(left) == 1
    finally:
        gc.enable()


class Biased(nn.Module):
    """Its backward needs neither the bias nor what goes in, but to run the first half again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bias = nn.Parameter(torch.zeros(64))
        self.first, self.second = nn.Linear(64, 256, bias=False).requires_grad_(False), nn.Linear(256, 64)
        self.gain = nn.Parameter(torch.ones(256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.sin(self.first(x + self.bias)) * self.gain)


def _biased() -> tuple[Biased, Callable[[torch.Tensor], torch.Tensor]]:
    torch._dynamo.reset()
    options = {"memory_budget": 1 << 24, "codegen": "eager", "chunk_size": 65536, "activations": "rerun"}
    model = Biased()
    return model, torch.compile(model, backend="chunkc", options=options)


@SECOND
@pytest.mark.parametrize("what", ["input", "bias"])
def test_what_was_changed_in_place_is_refused_where_it_is_read_again(what: str) -> None:
    model, compiled = _biased()
    x = torch.randn(32, 64)
    compiled(x).sum().backward()
    assert repeated(compiled)
    out = compiled(x).sum()
    with torch.no_grad():
        (x if what == "input" else model.bias).add_(1.0)
    with pytest.raises(chunkc.UnsupportedError, match="was changed in place between its forward and its backward"):
        out.backward()
    compiled(x).sum().backward()


@SECOND
def test_a_retained_graph_of_an_output_that_is_kept_leaks_nothing() -> None:
    """What the backward reads again may be the user's output, whose graph keeps what the backward reads."""
    torch._dynamo.reset()

    class Returning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(64, 256), nn.Linear(256, 64)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = self.a(x)
            return hidden, self.b(torch.sin(hidden).relu()).square()

    options = {"memory_budget": 1 << 24, "codegen": "eager", "chunk_size": 65536, "activations": "rerun"}
    compiled = torch.compile(Returning(), backend="chunkc", options=options)
    x = torch.randn(32, 64)
    for out in compiled(x):
        out.sum().backward(retain_graph=True)
    del out
    gc.collect()
    gc.disable()
    try:
        hidden, out = compiled(x)
        gone = ref(hidden.untyped_storage())
        (hidden.sum() + out.sum()).backward()
        del hidden, out
        assert gone() is None
    finally:
        gc.enable()


def explained(activations: str, budget_nbytes: int) -> chunkc.Explanation:
    case = LADDER["byte_gpt"]
    settings = {"memory_budget": budget_nbytes, "activations": activations, "whole_graph": "never"}
    return chunkc.explain(case.build(0), **case.batch(0), hardware="cpu", **settings)


@SECOND
@pytest.mark.parametrize("part", [0.05, pytest.param(0.9, marks=pytest.mark.slow)])
def test_auto_takes_the_quickest_way_and_trains_to_the_same_bits(part: float) -> None:
    case, most = LADDER["byte_gpt"], minimum_nbytes("byte_gpt")
    least = least_nbytes("byte_gpt", "auto")
    assert least <= least_nbytes("byte_gpt", "rerun")
    nbytes = int(least + part * (most - least))
    auto = explained("auto", nbytes)
    others = [explained(way, nbytes) for way in ("offload", "rerun")]
    assert auto.fits
    assert auto.step_time_s.total <= min(one.step_time_s.total for one in others if one.fits)
    result = train(case, memory_budget=nbytes, activations="auto", whole_graph="never")
    assert_same_training(result, everything_fits("byte_gpt"))
    assert result.measured_peak_nbytes == result.predicted_peak_nbytes == auto.predicted_peak_nbytes


def only_mixes(monkeypatch: pytest.MonkeyPatch) -> list[Captured]:
    """Let plans seem quicker that both copy and drop values; collects all that were timed."""
    timed: list[Captured] = []

    def step_s(seen: Captured, *_: object, **__: object) -> float:
        timed.append(seen)
        return 1.0 - (bool(seen.forward.copied) and bool(seen.forward.remade))

    monkeypatch.setattr("chunkc.policy.decide.step_s", step_s)
    return timed


@SECOND
def test_copies_and_reruns_in_one_step_train_to_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    least, most = least_nbytes("byte_gpt", "rerun"), minimum_nbytes("byte_gpt")
    timed = only_mixes(monkeypatch)
    nbytes = int(0.9 * least + 0.1 * most)
    result = train(LADDER["byte_gpt"], memory_budget=nbytes, activations="auto", whole_graph="never", debug=True)
    assert any(seen.forward.copied and seen.forward.remade for seen in timed)
    assert_same_training(result, everything_fits("byte_gpt"))
    assert result.measured_peak_nbytes == result.predicted_peak_nbytes <= nbytes
    explanation = explained("auto", nbytes)
    assert explanation.saved_at_home
    assert explanation.saved_again
    assert explanation.predicted_peak_nbytes == result.predicted_peak_nbytes


# ---------------------------------------------------------------- offloaded or recomputed

both_ways = pytest.mark.parametrize("way", ["offload", "rerun"])


def kept_and_two_forwards(activations: str) -> object:
    """A graph that is kept runs again, and two forwards keep their own values."""
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


def other_sizes(activations: str) -> object:
    """Of dynamic shapes, sizes are read off what the backward is given, stand-ins among it."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.GELU())
    options = {"memory_budget": 1 << 24, "codegen": "eager", "whole_graph": "never", "activations": activations}
    compiled = torch.compile(model, backend="chunkc", options=options, dynamic=True)
    losses = [compiled(torch.ones(batch, 64)).square().sum() for batch in (32, 48, 32)]
    for loss in losses:
        loss.backward()
    assert ways_taken(model) == {activations} - {"keep"}
    return [array(loss) for loss in losses], gradients(model)


def inside_a_checkpoint(activations: str) -> object:
    """Of the user's, which drops what the compiled part saves and runs it again."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    part = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Dropout(0.2), nn.Linear(64, 64))
    options = {"memory_budget": 1 << 24, "codegen": "eager", "chunk_size": 16384, "whole_graph": "never"}
    run = torch.compile(part, backend="chunkc", options=options | {"activations": activations})
    torch.manual_seed(1)
    checkpoint(run, torch.randn(64, 64, requires_grad=True), use_reentrant=False).square().mean().backward()
    assert ways_taken(part) == {activations} - {"keep"}
    return gradients(part)


@functools.cache
def kept(script: Callable[[str], object]) -> object:
    return script("keep")


@SECOND
@both_ways
@pytest.mark.parametrize("script", [kept_and_two_forwards, other_sizes, inside_a_checkpoint])
def test_results_are_those_of_values_that_are_kept(script: Callable[[str], object], way: str) -> None:
    assert not differences(script(way), kept(script))


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
    for kind in ("write_back", "prefetch"):
        saved = [e for e in explanation.events if e.kind == kind and e.name.startswith("forward.")]
        assert sum(e.nbytes for e in saved) == at_home


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


# ---------------------------------------------------------------- activations="auto"

SEARCHES = (
    (activation_search, "leanest"),
    (activation_search, "leanest_activation_plan"),
    (activation_search, "quickest"),
    (decide, "first_or_quickest"),
    (decide, "SearchSpace"),
)


def trained(name: str, **options: Any) -> tuple[list[Any], Any]:
    """The results of two steps, and the model."""
    case = LADDER[name]
    model, compiled = compile_case(case, **options)
    optimizer = adamw(model.parameters())
    losses = train_steps(case, compiled, optimizer, range(2))
    return [*losses, weights(model)], model


@pytest.mark.parametrize("name", ["byte_gpt", pytest.param("graph_breaks", marks=SECOND)])
def test_where_all_fits_it_is_what_keep_is_and_nothing_is_searched_for(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches = [counted(monkeypatch, module, function) for module, function in SEARCHES]
    profiles = counted(monkeypatch, captured_step, "_profile")
    found = {}
    for activations in ("keep", "auto"):
        for count in (*searches, profiles):
            count.calls = 0
        results, model = trained(name, memory_budget=HUGE, whole_graph="auto", activations=activations)
        assert activations == "keep" or [count.calls for count in searches] == [0] * len(searches)
        found[activations] = results, profiles.calls, chunkc.report(model).plan_text
    (kept, kept_profiles, kept_plan), (results, num_profiles, plan) = found["keep"], found["auto"]
    assert plan == kept_plan
    assert not differences(results, kept)
    assert num_profiles <= kept_profiles


# --- several graphs ---


class FewParametersFirst(nn.Module):
    """Its first graph has few of the parameters, and most of the saved values."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.lift = nn.Linear(32, 256)
        self.back = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.front:
            x = torch.tanh(layer(x))
        torch._dynamo.graph_break()
        x = self.lift(x.mean(1))
        for layer in self.back:
            x = torch.tanh(layer(x))
        return x.square().mean()


FEW_FIRST = Case("few_first", FewParametersFirst, lambda seed: {"x": floats(seed, (16, 256, 32))}, num_graphs=2)


def plans_of_steps(budget_nbytes: int, whole_graph: str, activations: str) -> tuple[list[str], list[Any], Any]:
    """The plans of three steps, the parameters after them, and the model."""
    options = {"memory_budget": budget_nbytes, "whole_graph": whole_graph, "activations": activations}
    model, compiled = compile_case(FEW_FIRST, place=False, **options)
    optimizer, plans = adamw(model.parameters()), []
    for step in range(3):
        train_steps(FEW_FIRST, compiled, optimizer, range(step, step + 1))
        plans.append(chunkc.report(model).plan_text)
    return plans, weights(model), model


@pytest.mark.parametrize("whole_graph", ["never", "auto"])
def test_of_several_graphs_each_keeps_its_values_once_the_step_is_known_to_fit(whole_graph: str) -> None:
    """While the first step runs it is not known that the second graph, with all the parameters, saves little."""
    _, _, model = plans_of_steps(HUGE, "never", "keep")
    budget_nbytes = 2 * chunkc.report(model).predicted_peak_nbytes
    kept, kept_weights, _ = plans_of_steps(budget_nbytes, whole_graph, "keep")
    plans, found, model = plans_of_steps(budget_nbytes, whole_graph, "auto")
    assert plans[0] != kept[0]
    assert plans[1] == plans[2]
    assert not any(word in plans[2] for word in ("prefetch", "evict", "recomputed"))
    if whole_graph == "never":
        assert plans[1:] == kept[1:]
    assert not differences(found, kept_weights)
    assert session_of(model).store.resident == frozenset(range(len(session_of(model).store.layout.groups)))


def test_of_several_graphs_nothing_is_away_from_the_first_step_on_where_there_is_room_for_as_much_of_each() -> None:
    kept, *_ = plans_of_steps(HUGE, "auto", "keep")
    assert plans_of_steps(HUGE, "auto", "auto")[0] == kept


def test_explain_says_of_several_graphs_what_training_comes_to() -> None:
    _, _, model = plans_of_steps(HUGE, "never", "keep")
    budget_nbytes = int(0.9 * chunkc.report(model).predicted_peak_nbytes)
    _, _, model = plans_of_steps(budget_nbytes, "never", "auto")
    options = {"memory_budget": budget_nbytes, "whole_graph": "never", "codegen": "eager"}
    explained = chunkc.explain(FEW_FIRST.build(), **FEW_FIRST.batch(0), **options)
    assert explained.predicted_peak_nbytes == chunkc.report(model).predicted_peak_nbytes


# --- hooks on saved tensors ---


def copying() -> AbstractContextManager[None]:
    return torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved)


def test_hooks_that_copy_get_the_values_where_all_can_be_kept() -> None:
    """Without hooks, the first graph's values are away in this budget."""
    _, _, model = plans_of_steps(HUGE, "never", "keep")
    budget_nbytes = 2 * chunkc.report(model).predicted_peak_nbytes

    def step(activations: str, hooks: AbstractContextManager[Any]) -> tuple[list[Any], set[str]]:
        options = {"memory_budget": budget_nbytes, "whole_graph": "never", "activations": activations}
        model, compiled = compile_case(FEW_FIRST, place=False, **options)
        with hooks:
            loss = compiled(**FEW_FIRST.batch(0))
        loss.backward()
        return gradients(model), ways_taken(model)

    kept, _ = step("keep", copying())
    for hooks, away in ((nullcontext(), True), (copying(), False), (torch.autograd.graph.save_on_cpu(), False)):
        found, ways = step("auto", hooks)
        assert bool(ways) == away
        assert not differences(found, kept)


# ---------------------------------------------------------------- models


@functools.cache
def least_nbytes(name: str, activations: str) -> int:
    """Return the smallest budget that `BudgetError` names for a model in one graph."""
    return refuse(LADDER[name], memory_budget=TINY, activations=activations).minimum_nbytes


def compiled_gpt(activations: str, budget_nbytes: int | None = None) -> tuple[nn.Module, nn.Module]:
    """Return the ladder's `short_gpt` and its compiled self, with room for two forwards."""
    nbytes = budget_nbytes or 2 * minimum_nbytes("short_gpt")
    return compile_case(LADDER["short_gpt"], memory_budget=nbytes, activations=activations, whole_graph="never")


def repeated(compiled: nn.Module) -> set[str]:
    """Return the calls that the latest backward has repeated."""
    return {label for label, *_ in chunkc.report(compiled).moments if "rerun" in label}


def ways_taken(model: nn.Module) -> set[str]:
    """Return the ways in which values were offloaded or recomputed."""
    gone_home = session_of(model).saved_room.nbytes > 0
    return {way for way, taken in (("offload", gone_home), ("rerun", repeated(model) != set())) if taken}
