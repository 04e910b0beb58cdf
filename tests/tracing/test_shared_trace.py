"""Equal blocks that are compiled one by one share one trace, and each trains its own parameters, to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
import torch.nn.functional as F
from harness import differences
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import chunkc
import chunkc.compile
from chunkc.tracing.capture import TracedGraphs
from chunkc.tracing.shared_trace import Bindings, SharedTrace, Traces, trace_key

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

NUM_BLOCKS = 4


class Block(nn.Module):
    """Of a user's class; a buffer counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(32), nn.Linear(32, 32)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + F.gelu(self.linear(self.norm(x)))


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)


class Model(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 32)
        self.layers = nn.ModuleList(block() for _ in range(NUM_BLOCKS))

    def forward(self, tokens: Tensor, *, with_checkpoints: bool = False) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if with_checkpoints else layer(x)
        return x.square().mean()


def pair(block: Callable[[], nn.Module] = Block) -> tuple[Model, Model]:
    """Return a plain model and an equal one with compiled blocks."""
    torch.manual_seed(0)
    plain = Model(block)
    model, options = copy.deepcopy(plain), {"codegen": "eager", "memory_budget": "1MiB"}
    for layer in model.layers:
        layer.compile(backend="chunkc", options=options)
    return plain, model


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collect the graphs that are traced."""
    found: list[Any] = []
    capture_graph = chunkc.compile.capture_graph

    def noted(gm: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(gm)
        return capture_graph(gm, *args, **kwargs)

    monkeypatch.setattr(chunkc.compile, "capture_graph", noted)
    return found


def tokens() -> Tensor:
    return torch.arange(24).reshape(2, 12) % 16


def assert_equal(model: Model, plain: Model, *, buffers: bool = True) -> None:
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert not differences([p.grad], [q.grad]), name
    for (name, b), other in zip(model.named_buffers(), plain.buffers(), strict=True):
        assert not buffers or torch.equal(b, other), name


@pytest.mark.parametrize("block", [Block, encoder_layer])
@pytest.mark.parametrize("with_checkpoints", [False, True])
def test_blocks_are_traced_once(traced: list[Any], block: Callable[[], nn.Module], with_checkpoints: bool) -> None:
    plain, model = pair(block)
    counters.clear()
    for step in range(2):
        losses = []
        for one in (plain, model):
            torch.manual_seed(step)
            loss = one(tokens(), with_checkpoints=with_checkpoints)
            loss.backward()
            losses.append(loss.detach())
        assert not differences(losses[:1], losses[1:])
        assert_equal(
            model, plain, buffers=not with_checkpoints
        )  # AOTAutograd writes them last: a recomputation ends before
    assert counters["stats"]["unique_graphs"] == 1
    assert len(traced) == 1
    assert all(chunkc.report(layer).num_instructions > 0 for layer in model.layers)


def test_backwards_come_in_any_order_and_twice(traced: list[Any]) -> None:
    plain, model = pair()
    x = torch.randn(2, 32)
    for one in (plain, model):
        losses = [layer(x).square().sum() for layer in one.layers]
        for at in (2, 0, 3, 1):
            losses[at].backward(retain_graph=True)
        losses[0].backward()
        asked = torch.autograd.grad(one.layers[3](x).sum(), list(one.layers[3].parameters()))
        one.layers[1].linear.weight.grad += asked[2]
    assert_equal(model, plain)
    assert len(traced) == 1


def test_blocks_that_share_a_parameter() -> None:
    plain, model = pair()
    for one in (plain, model):
        one.layers[2].linear.weight = one.layers[0].linear.weight
        one.layers[3].linear = one.layers[1].linear
        one.layers[3].norm = one.layers[1].norm  # all parameters of another block: traced by itself
        one(tokens()).backward()
    assert_equal(model, plain)


def test_blocks_without_trained_parameters_are_traced_one_by_one(traced: list[Any]) -> None:
    plain, model = pair()
    for one in (plain, model):
        one.layers.requires_grad_(False)
        one(tokens()).backward()
    assert not differences([model.embedding.weight.grad], [plain.embedding.weight.grad])
    assert len(traced) == NUM_BLOCKS


def test_a_block_that_is_gone_is_forgotten(traced: list[Any]) -> None:
    plain, model = pair()
    model(tokens()).backward()
    first = copy.deepcopy(model.layers[0])
    for module in (plain, model):
        module.layers[0] = copy.deepcopy(module.layers[0])
    model.layers[0].compile(backend="chunkc", options={"codegen": "eager", "memory_budget": "1MiB"})
    del first
    for one in (plain, model):
        one.zero_grad()
        one(tokens()).backward()
    plain.layers[0].calls, model.layers[0].calls = torch.zeros(()), torch.zeros(())
    for at in range(1, NUM_BLOCKS):
        plain.layers[at].calls += 1
    assert_equal(model, plain)


def test_inputs_that_autograd_reads_otherwise_have_other_keys() -> None:
    x, weight = torch.randn(4, 4), nn.Parameter(torch.randn(4, 4))
    names = [None, "weight"]
    key = trace_key([x, weight], names)
    assert key is not None
    assert key == trace_key([torch.randn(4, 4), nn.Parameter(torch.randn(4, 4))], names)
    for other in (
        [x.t(), weight],
        [x.double(), weight],
        [x[:2], weight],
        [x.clone().requires_grad_(), weight],
        [x.clone().requires_grad_() * 2, weight],
        [x, nn.Parameter(weight.detach(), requires_grad=False)],
        [weight.detach(), weight],
        [torch.randn(4, 4, dtype=torch.complex64).conj(), weight],
        [3, weight],
    ):
        assert trace_key(other, names) != key
    assert trace_key([x, weight], [None, None]) != key
    assert trace_key([True, weight], names) != trace_key([1, weight], names)
    assert trace_key([x.to_sparse(), weight], names) is None
    assert trace_key([object(), weight], names) is None


def test_nothing_else_may_be_bound_to_the_same_parameters() -> None:
    bindings, weight, other = Bindings(), nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    assert not bindings.can_add([])
    assert bindings.can_add([weight])
    bindings.add([weight], [], lambda: None)
    assert not bindings.can_add([weight])
    assert not bindings.can_add([weight, other])
    assert bindings.can_add([other])
    del weight
    assert bindings.can_add([other])


def test_a_forgotten_trace_keeps_no_graphs() -> None:
    """Else each of many shapes would keep compiled code and plans for as long as the model lives."""

    class Graph:
        forward = backward = staticmethod(lambda arguments: arguments)

    traces, weight = Traces(1), nn.Parameter(torch.zeros(2))
    for shape in range(2):
        bindings, graph = Bindings(), Graph()
        call = bindings.add([weight], [graph], lambda: None)
        traces.keep(shape, SharedTrace(bindings, call, TracedGraphs(), ["weight"]))
        if shape == 0:
            first = ref(graph)
        del bindings, graph, call
    assert first() is None
