"""Capture without running: nothing is allocated, nothing of the user's changes, and what cannot be captured is said."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from harness import weights
from plain_modules import ByteGPT, ConvNet, GraphBreaks
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from zoo import CASES, byte_batch

import chunkc
from chunkc.explaining.offline import OfflineGraph, capture_offline
from chunkc.explaining.offline_calls import CallLog
from chunkc.ir.errors import UnsupportedError
from chunkc.runtime.device import cpu_allocator

TRACING_NBYTES = 32 * 1024
"""A few copies of the random generator's state, 5056 bytes each: all that tracing may take."""


class Loss(nn.Module):
    """Any module, and the sum of what it returns."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x).sum()


def capture(model: nn.Module, *args: object, **kwargs: object) -> OfflineGraph:
    """The one graph of a call."""
    (graph,) = capture_offline(model, args, kwargs, codegen="eager").graphs
    return graph


def code(graph: OfflineGraph) -> tuple[str, str]:
    return graph.capture.forward.code, graph.capture.backward.code


@pytest.fixture
def large() -> Loss:
    """16 MiB of parameters."""
    return Loss(nn.Sequential(nn.Linear(2048, 2048), nn.Dropout(0.1), nn.Linear(2048, 1)))


@pytest.fixture
def meter() -> object:
    """Peak of bytes allocated since it was made."""
    cpu_allocator.install()
    gc.collect()
    before = cpu_allocator.current_nbytes()
    cpu_allocator.reset_peak()
    return lambda: cpu_allocator.peak_nbytes() - before


# --- real, meta and fake ---


def test_real_meta_and_fake_models_are_one() -> None:
    batch = byte_batch(0)
    real = capture(ByteGPT(num_layers=1), **batch)
    with torch.device("meta"):
        model = ByteGPT(num_layers=1)
    meta = capture(model, **{key: value.to("meta") for key, value in batch.items()})
    with FakeTensorMode():
        model = ByteGPT(num_layers=1)
        arguments = {key: torch.empty(value.shape, dtype=value.dtype) for key, value in batch.items()}
    fake = capture(model, **arguments)
    assert code(real) == code(meta) == code(fake)
    assert real.movable == meta.movable == fake.movable
    assert len(real.movable) == len(list(ByteGPT(num_layers=1).parameters()))


def test_a_fake_model_takes_real_arguments() -> None:
    with FakeTensorMode():
        model = Loss(nn.Linear(8, 8))
    assert len(capture(model, torch.ones(2, 8)).movable) == 2


def test_fakes_of_two_modes() -> None:
    with FakeTensorMode():
        model = Loss(nn.Linear(8, 8))
    with FakeTensorMode():
        x = torch.ones(2, 8)
    with pytest.raises(UnsupportedError, match="one FakeTensorMode"):
        capture(model, x)


def test_specs_are_the_parameters_and_no_buffers(large: Loss) -> None:
    for model, batch in ((large, {"x": torch.ones(2, 2048)}), (ConvNet(), CASES["convnet"].batch(0))):
        found = {spec.name: (spec.shape, spec.dtype, spec.trainable) for spec in capture(model, **batch).movable}
        assert found == {name: (tuple(p.shape), p.dtype, True) for name, p in model.named_parameters()}


def test_tied_weights_are_one() -> None:
    with torch.device("meta"):
        tied, apart = ByteGPT(num_layers=1, tied=True), ByteGPT(num_layers=1)
    batch = byte_batch(0)
    names = [spec.name for spec in capture(tied, **batch).movable]
    assert "tokens.weight" in names
    assert "head.weight" not in names
    assert len(capture(apart, **batch).movable) == len(names) + 1


def test_parameters_that_share_their_storage_stay() -> None:
    """They cannot move when they train, so they do not move here."""
    flat = torch.ones(2 * 64 * 64)
    model = Loss(nn.Linear(64, 64))
    model.module.weight = nn.Parameter(flat[: 64 * 64].view(64, 64))
    graph = capture(model, torch.ones(2, 64))
    assert [spec.name for spec in graph.fixed] == ["module.weight"]
    assert [spec.name for spec in graph.movable] == ["module.bias"]


# --- what is the user's ---


@pytest.mark.parametrize("name", ["convnet", "big_embedding", pytest.param("gpt2_dropout", marks=pytest.mark.slow)])
def test_the_model_is_as_it_was(name: str) -> None:
    """Parameters, buffers (batch norm's statistics), modes, gradients and the random state."""
    case = CASES[name]
    model, state = case.build(), torch.get_rng_state()
    before, parameters = weights(model), list(model.parameters())
    attributes = copy.copy(vars(model))
    capture(model, **case.batch(0))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(np.array_equal(array, before[key]) for key, array in weights(model).items())
    assert all(new is old and new.grad is None for new, old in zip(model.parameters(), parameters))
    assert vars(model) == attributes
    assert model.training


def test_gradients_are_kept_and_not_copied_and_the_model_trains_on(large: Loss) -> None:
    x, optimizer = torch.ones(2, 2048), torch.optim.SGD(large.parameters(), lr=1e-4)
    large(x).backward()
    grads, before = [p.grad for p in large.parameters()], large.module[0].weight.detach().clone()
    capture(large, x)
    assert all(p.grad is grad for p, grad in zip(large.parameters(), grads))
    large(x).backward()
    optimizer.step()
    assert not torch.equal(before, large.module[0].weight)


def test_nothing_is_allocated(large: Loss, meter: object) -> None:
    x = torch.ones(512, 2048)
    before = meter()  # type: ignore[operator]
    graph = capture(large, x)
    assert meter() - before <= TRACING_NBYTES  # type: ignore[operator]
    assert sum(spec.nbytes for spec in graph.movable) > 16 * 2**20


def test_tensors_in_plain_attributes_are_not_copied(large: Loss, meter: object) -> None:
    """A deep copy of the module would copy them, and one that has a history cannot be copied at all."""

    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)
            self.table, self.more = torch.ones(2**18), {"list": [torch.ones(2**18)]}
            self.scaled = self.linear.weight * 2

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).sum() + self.table.sum() + self.more["list"][0].sum()

    model, x = Holds(), torch.ones(2, 64)
    before = meter()  # type: ignore[operator]
    capture(model, x)
    assert meter() - before <= TRACING_NBYTES  # type: ignore[operator]


@pytest.mark.parametrize(
    "make", [lambda: Loss(nn.Linear(16, 16)), lambda: nn.Linear(16, 16)], ids=["user's", "torch's"]
)
def test_explained_often_and_compiled_afterwards(make: object) -> None:
    """Dynamo counts recompilations by class: explaining must not use up those of training."""
    torch._dynamo.reset()
    x = torch.ones(2, 16)
    for _ in range(20):
        capture(make(), x)  # type: ignore[operator]
    model = make()  # type: ignore[operator]
    compiled = torch.compile(model, backend="chunkc", options={"memory_budget": "64MiB", "codegen": "eager"})
    compiled(x).sum().backward()
    assert chunkc.report(model).predicted_peak_nbytes > 0
    capture(make(), x)  # type: ignore[operator]


def test_what_was_compiled_stays_compiled() -> None:
    torch._dynamo.reset()
    model, x, calls = Loss(nn.Linear(16, 16)), torch.ones(2, 16), []

    def backend(gm: torch.fx.GraphModule, inputs: object) -> object:
        calls.append(gm)
        return gm.forward

    compiled = torch.compile(model, backend=backend)
    compiled(x)
    for _ in range(3):
        capture(model, x)
        compiled(x)
    assert len(calls) == 1


def test_a_compiled_model_is_explained_as_the_model(large: Loss) -> None:
    x = torch.ones(2, 2048)
    compiled = torch.compile(large, backend="chunkc", options={"memory_budget": "64MiB", "codegen": "eager"})
    before = capture(compiled, x)
    compiled(x).backward()
    after = capture(compiled, x)
    plain = capture(large, x)
    assert code(before) == code(after) == code(plain)
    assert before.movable == after.movable == plain.movable


def test_graphs_are_not_kept_alive() -> None:
    """Dynamo keeps every backend; an explanation's graphs must not stay with it."""
    graph = capture(Loss(nn.Linear(16, 16)), torch.ones(2, 16))
    reference = weakref.ref(graph.capture.forward)
    del graph
    gc.collect()
    assert reference() is None


def test_a_model_in_one_graph_is_captured_without_guards_and_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr(CallLog, "run", refused)
    monkeypatch.setattr(torch._dynamo.guards.CheckFunctionManager, "__init__", refused)
    model, x = Loss(nn.Linear(16, 16)), torch.ones(2, 16)
    (call,) = capture_offline(model, (x,), {}, codegen="eager").calls
    assert len(call.arguments) == 3
    assert call.outputs == (None,) * len(call.names)
    with pytest.raises(AssertionError):
        capture_offline(GraphBreaks(), (), byte_batch(0), codegen="eager")


# --- what a model may do ---


@pytest.mark.parametrize("nested", [False, True])
def test_graph_breaks_give_several_graphs(nested: bool) -> None:
    with torch._dynamo.config.patch(nested_graph_breaks=nested):
        graphs = capture_offline(GraphBreaks(), (), byte_batch(0), codegen="eager").graphs
    assert len(graphs) == 3
    names = {spec.name for graph in graphs for spec in graph.movable}
    assert names == {name for name, _ in GraphBreaks().named_parameters()}


def test_without_gradients_there_is_no_backward(large: Loss) -> None:
    x = torch.ones(2, 2048)
    with torch.no_grad():
        assert capture(large, x).capture.backward is None
    assert capture(large.requires_grad_(False), x).capture.backward is None


class Branches(nn.Module):
    """Looks at values in the middle of the forward."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.linear = how, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.how == "if" and y.sum() > 0:
            y = y + 1
        if self.how == "item":
            y = y * y.sum().item()
        if self.how == "mask":
            y = y[y > 0]
        if self.how == "nonzero":
            y = y[torch.nonzero(y.sum(1)).squeeze(1)]
        return y.sum()


class Wrong(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x @ torch.ones(3, 3)).sum()


def uncopyable() -> nn.Module:
    model = Loss(nn.Linear(4, 4))
    model.lock = (value for value in range(3))
    return model


@pytest.mark.parametrize(
    ("make", "x", "match"),
    [
        *(
            (lambda how=how: Branches(how), torch.ones(4, 8), "needs the values of tensors")
            for how in ("if", "item", "mask", "nonzero")
        ),
        (Wrong, torch.ones(4, 8), "cannot be traced: .*same reduction dim"),
        (nn.Identity, torch.ones(4, 8), "no graph"),
        (lambda: Loss(nn.Linear(8, 8)), torch.eye(8).to_sparse(), "make it dense"),
        (uncopyable, torch.ones(2, 4), "cannot be copied"),
    ],
    ids=["if", "item", "mask", "nonzero", "shapes", "nothing", "sparse", "no copy"],
)
def test_what_cannot_be_captured_is_said_in_one_line(make: Callable[[], nn.Module], x: Tensor, match: str) -> None:
    with pytest.raises(UnsupportedError, match=match) as error:
        capture(make(), x)
    assert "\n" not in str(error.value)


def test_errors_of_the_forward_are_the_users() -> None:
    class Raises(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("no such layer")

    with pytest.raises(KeyError, match="no such layer"):
        capture(Raises(), torch.ones(4, 8))
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        capture(Branches("no"))
