"""Training for long: what a step keeps of plans and compiled variants has a limit, and inputs count as they are. Of a
caller who keeps ever more values, residents leave, then a graph that was whole is cut; it trains on.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.utils.checkpoint
from harness import graphs_made, session_of, take_step
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import chunkc
from chunkc import backend, variants
from chunkc.policy import decide as policy
from chunkc.runtime.device import cpu_allocator
from chunkc.session import compiled_step as graph
from chunkc.session import session
from chunkc.tracing import steps
from chunkc.tracing.build import Builder

WIDTH, NUM_STEPS = 64, 40


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    cpu_allocator.install()
    torch._dynamo.reset()
    gc.collect()
    yield
    torch._dynamo.reset()


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))


def compiled(model: nn.Module, budget: int = 4 << 20, **options: Any) -> Any:
    return torch.compile(model, backend="chunkc", options={"codegen": "eager", "memory_budget": budget, **options})


def rows(num_rows: int) -> Tensor:
    return torch.randn(num_rows, WIDTH, generator=torch.Generator().manual_seed(num_rows))


@pytest.mark.parametrize("budget", [4 << 20, 160_000])
def test_outputs_that_are_kept_neither_fill_memory_with_plans_nor_make_a_new_one_each_step(
    budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that keeps every output has other bytes held at every step."""
    made: list[int] = []
    step_plan = graph.step_plan

    def counted(of: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        made.append(request.external_nbytes)
        return step_plan(of, request, *args, **kwargs)

    monkeypatch.setattr(graph, "step_plan", counted)
    monkeypatch.setattr(steps, "MAX_PLANS", 5)
    monkeypatch.setattr(session, "MAX_UPDATE_PLANS", 4)
    model = build()
    call = compiled(model, budget, whole_graph="never")
    optimizer = chunkc.optim.AdamW(model.parameters())
    outputs = []
    with graphs_made() as made_graphs:
        for _ in range(NUM_STEPS):
            output = call(rows(1))
            outputs.append(output.detach())
            take_step(output.sum(), optimizer)
            (found,) = made_graphs
            assert len(found.steps.at("forward", (), can_skip_segmentation=True).plans) <= 5
            assert len(session_of(model).update_plans) <= 4
            assert session_of(model).records.predicted_peak_nbytes <= budget
    assert len(set(made)) <= 2 + 2 * (NUM_STEPS * outputs[0].nbytes * policy.EXTERNAL_GRANULES // budget)


def test_variants_by_shape_are_forgotten_but_not_those_of_other_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "MAX_SHAPES", 3)
    compilations: list[Any] = []

    def compile_for(inputs: Any) -> Any:
        compilations.append(inputs)
        return lambda *args: len(args[1])

    one, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    found = variants.Variants(compile_for)
    found.compile([other, rows(1)])
    for num_rows in (1, 2, 3, 1, 4):  # 2 is the one not used for longest
        assert found(one, rows(num_rows)) == num_rows
    assert len(compilations) == 5
    for num_rows in (1, 3, 4):
        found(one, rows(num_rows))
    found(other, rows(1))
    assert len(compilations) == 5
    found(one, rows(2))
    assert len(compilations) == 6


def test_variants_of_parameters_that_are_gone_are_forgotten() -> None:
    compiled: weakref.WeakSet[Any] = weakref.WeakSet()

    def compile_for(inputs: Any) -> Any:
        def call(*args: Any) -> None: ...

        compiled.add(call)
        return call

    found = variants.Variants(compile_for)
    for _ in range(5):
        found(nn.Parameter(torch.zeros(2)), rows(2))
    gc.collect()
    found(nn.Parameter(torch.zeros(2)), rows(2))
    assert len(compiled) == 1


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_whole_storage_of_an_input_counts(dynamic: bool) -> None:
    """A view of a large tensor, where the step was traced with a tensor of its own."""
    model = build()
    call = compiled(model)
    sizes = (4, 6, 5) if dynamic else (5,)
    for num_rows in sizes:
        call(rows(num_rows)).sum().backward()
    large = rows(3000)
    call(large[:5]).sum().backward()
    records = session_of(model).records.latest
    for phase in ("forward", "backward"):
        predicted = {m.name: m.nbytes for m in records[phase].plan.moments}
        for name, nbytes in records[phase].measurement.peaks:
            assert nbytes is not None
            if name in predicted:
                assert predicted[name] >= large.nbytes
    budget = session_of(model).budget_nbytes
    with pytest.raises(chunkc.BudgetError):
        call(torch.zeros(budget // (4 * WIDTH) + 1, WIDTH)[:5])


@pytest.mark.parametrize("last_first", [False, True])
def test_kept_gradients_of_outputs_of_several_shapes(last_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two forwards of different shapes in flight, then their backwards in either order, with gradients kept outside."""
    kept: list[frozenset[str]] = []
    kept_inputs = graph._kept_inputs

    def noted(*args: Any) -> frozenset[str]:
        kept.append(kept_inputs(*args))
        return kept[-1]

    monkeypatch.setattr(graph, "_kept_inputs", noted)
    model, plain = build(), build()
    hooked: list[Tensor] = []
    for module in (model, plain):
        module[2].weight.register_hook(lambda g: hooked.append(g.clone()))
    call = compiled(model, 250_000, whole_graph="never")
    gradients = {n: torch.ones(n, WIDTH) for n in (20, 3)}
    foreign = cpu_allocator.current_nbytes()
    for module in (call, plain):
        for _ in range(3):
            outputs = [module(rows(n)) for n in (20, 3)]
            for out in outputs[:: -1 if last_first else 1]:
                out.backward(gradients[len(out)])
    assert all(kept)
    assert chunkc.report(model).predicted_peak_nbytes <= 250_000
    assert chunkc.report(model).measured_peak_nbytes - foreign <= 250_000  # type: ignore[operator]
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)  # type: ignore[arg-type]
    half = len(hooked) // 2
    assert half == 6
    assert all(torch.equal(a, b) for a, b in zip(hooked[:half], hooked[half:]))


class Dropping(nn.Module):
    """Recomputes a block with dropout, for which the backward is given the state of the random generator."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False).sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize("sizes", [(4,), (4, 6, 3, 5)])
def test_a_saved_generators_state_is_no_size_of_the_inputs(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its length is a symbol in tracing, which no input has."""
    warnings: list[str] = []
    monkeypatch.setattr(backend.logger, "warning", lambda text, *args: warnings.append(text % args))
    torch.manual_seed(0)
    model, plain = Dropping(), Dropping()
    plain.load_state_dict(model.state_dict())
    call = compiled(model)
    losses = []
    for module in (call, plain):
        for num_rows in sizes:
            torch.manual_seed(num_rows)
            loss = module(rows(num_rows))
            loss.backward()
            losses.append(loss.detach())
    assert not warnings
    assert all(torch.equal(a, b) for a, b in zip(losses, losses[len(sizes) :]))
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)  # type: ignore[arg-type]


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def test_what_tracing_leaves_in_cycles_is_gone_before_the_first_run(no_collection: None) -> None:
    """As Dynamo's frames do, which refer to each other and to what the model was called with."""
    left: list[StorageWeakRef] = []

    def tracing(*args: Any, **options: Any) -> Any:
        frames: list[Any] = [[torch.ones(64)]]
        left.append(StorageWeakRef(frames[0][0].untyped_storage()))
        frames[0].append(frames[0])
        compiled = backend.chunkc(*args, **options)

        def run(*arguments: Any) -> Any:
            frames.clear()
            return compiled(*arguments)

        return run

    call = torch.compile(build(), backend=tracing, options={"codegen": "eager", "memory_budget": 4 << 20})
    call(rows(5)).sum().backward()
    assert [storage.expired() for storage in left] == [True]


def test_outputs_that_only_a_cycle_keeps_are_collected_before_a_budget_is_too_small(no_collection: None) -> None:
    model = build()
    call = compiled(model)
    call(rows(64)).sum().backward()
    held: list[Any] = [call(rows(64)).detach() for _ in range(10)]
    found = session_of(model)
    found.agree(replace(found.terms, budget_nbytes=1))
    with pytest.raises(chunkc.BudgetError) as refused:
        call(rows(64))
    too_small = refused.value.minimum_nbytes - 1  # even if all residents left
    found.agree(replace(found.terms, budget_nbytes=too_small))
    with pytest.raises(chunkc.BudgetError):
        call(rows(64))
    held.append(held)
    del held
    call(rows(64)).sum().backward()


def test_a_whole_graph_is_not_cut_for_the_room_of_what_only_a_cycle_keeps(no_collection: None) -> None:
    model = build()
    call = compiled(model)
    call(rows(64)).sum().backward()
    found = session_of(model)
    peak_nbytes = chunkc.report(model).predicted_peak_nbytes
    held: list[Any] = [torch.zeros(1 << 20)]
    found.live.watch(held)
    found.agree(replace(found.terms, budget_nbytes=peak_nbytes + 1024))
    held.append(held)
    del held
    with mock.patch.object(Builder, "_described", side_effect=AssertionError("cut")):
        call(rows(64)).sum().backward()


# ---------------------------------------------------------------- values that grow

BUDGET_NBYTES = 8_600_000  # whole and all resident at first


class Block(nn.Module):
    """A residual layer, one chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(x))


class Stack(nn.Module):
    """A loss, and the rows that it is of."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            x = block(x)
        return x.square().mean(), x


def train(codegen: str, budget_nbytes: int, *, keeping: bool) -> tuple[list[tuple[int, int, int]], list[Any]]:
    """Per step: bytes at most, groups that stay, calls of the forward. And losses and weights."""
    torch._dynamo.reset()
    gc.collect()
    torch.manual_seed(0)
    foreign_nbytes = cpu_allocator.current_nbytes()
    model = Stack()
    options = {"memory_budget": budget_nbytes, "codegen": codegen, "whole_graph": "auto", "activations": "keep"}
    call = torch.compile(model, backend="chunkc", options=options)
    optimizer = chunkc.optim.AdamW(model.parameters(), lr=1e-3)
    steps, results, kept = [], [], []
    for number in range(32):
        x = torch.randn(128, 256, generator=torch.Generator().manual_seed(number))
        cpu_allocator.reset_peak()
        loss, rows = call(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        session = session_of(model)
        peak_nbytes = cpu_allocator.peak_nbytes() - foreign_nbytes
        steps.append(
            (peak_nbytes, len(session.store.resident), len(session.records.latest["forward"].measurement.peaks))
        )
        results.append(loss.item())
        if keeping:
            kept.append(rows.detach())
        del x, loss, rows
    return steps, [*results, *(p.detach().clone() for p in model.parameters())]


@pytest.mark.second_tier
@pytest.mark.parametrize("codegen", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_whole_graph_is_cut_in_the_end(codegen: str) -> None:
    steps, results = train(codegen, BUDGET_NBYTES, keeping=True)
    peaks, residents, calls = zip(*steps, strict=True)
    assert max(peaks) <= BUDGET_NBYTES
    assert (residents[0], calls[0]) == (6, 1)
    assert list(residents) == sorted(residents, reverse=True)
    assert 1 in calls[residents.index(4) :]  # some have left a graph that is whole still
    assert (residents[-1], calls[-1]) == (0, 6)
    _, expected = train(codegen, 1 << 30, keeping=False)
    for found, reference in zip(results, expected, strict=True):
        torch.testing.assert_close(found, reference, rtol=0.0 if codegen == "eager" else 1e-5, atol=0.0)
