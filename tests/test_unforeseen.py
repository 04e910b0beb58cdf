"""Failures of a compilation that were not foreseen, and inputs and gradients that no chunk can hold: one error each,
which says what to do, and nothing has moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import differences, weights
from torch import Tensor, fx, nn
from torch._dynamo.exc import SkipFrame

import chunkc
from chunkc.session.session import owner
from chunkc.tracing import build

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

OPTIONS = {"memory_budget": 2**30, "codegen": "eager"}


def compiled(model: nn.Module, **arguments: Any) -> Callable[..., Any]:
    return torch.compile(model, backend="chunkc", options=OPTIONS, **arguments)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def fail(error: Exception) -> Callable[..., Any]:
    """A function that fails at the graph's first product."""

    def at_a_node(gm: fx.GraphModule, runs: Any, table: Any, **options: Any) -> Any:
        node = next(node for node in gm.graph.nodes if node.target is torch.ops.aten.relu.default)
        raise error if node is not None else AssertionError

    return at_a_node


@pytest.mark.parametrize("error", [NotImplementedError("Cannot access storage"), KeyError("x"), AssertionError()])
def test_a_failure_inside_is_an_internal_error_that_names_the_place(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = Net(), torch.randn(2, 8)
    before = weights(model)
    call = compiled(model)
    with monkeypatch.context() as patched:
        patched.setattr(build, "extract", fail(error))
        with pytest.raises(chunkc.InternalError) as raised:
            call(x)
    message = str(raised.value)
    assert message.startswith(f"chunkc failed when it compiled aten.relu.default ({type(error).__name__}: ")
    for part in ("a fault of chunkc", "aot_eager", "TORCH_LOGS=", "chunkc explain"):
        assert part in message
    assert type(raised.value.__cause__) is type(error)
    assert "in at_a_node" in raised.value.__notes__[0]
    assert raised.value.__cause__.__traceback__ is None  # whose frames would keep tensors
    assert not differences(weights(model), before)
    assert all(owner(p) is None for p in model.parameters())
    torch.testing.assert_close(call(x), model(x))  # the next call is judged for itself


def test_the_module_is_named_where_the_trace_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def at_a_product(gm: fx.GraphModule, runs: Any, table: Any, **options: Any) -> Any:
        node = [node for node in gm.graph.nodes if node.target is torch.ops.aten.addmm.default][1]
        raise TypeError(f"{len(node.args)} arguments\nand more lines")

    monkeypatch.setattr(build, "extract", at_a_product)
    with pytest.raises(chunkc.InternalError, match=r"aten\.addmm\.default in down \(TypeError: 3 arguments\)"):
        compiled(Net())(torch.randn(2, 8))


def test_so_is_one_outside_of_any_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> bool:
        raise ZeroDivisionError

    monkeypatch.setattr("chunkc.backend.is_between_calls", broken)
    with pytest.raises(chunkc.InternalError, match="ZeroDivisionError: no reason given"):
        compiled(Net())(torch.randn(2, 8))


def test_so_is_one_in_a_later_compilation_that_dynamo_does_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that look alike share Dynamo's graph, which chunkc compiles for each of them."""
    blocks = nn.ModuleList(Net() for _ in range(2))

    def forward(x: Tensor) -> Tensor:
        for block in blocks:
            torch._dynamo.graph_break()
            x = block(x)
        return x

    call = torch.compile(forward, backend="chunkc", options=OPTIONS)
    first, later = Net(), Net()
    one = torch.compile(Net.forward, backend="chunkc", options=OPTIONS)
    one(first, torch.randn(2, 8))
    monkeypatch.setattr(build, "extract", fail(RuntimeError("later")))
    with pytest.raises(chunkc.InternalError, match="RuntimeError: later"):
        one(later, torch.randn(2, 8))
    with pytest.raises(chunkc.InternalError, match="RuntimeError: later"):
        call(torch.randn(2, 8))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (SkipFrame("no"), None),
        (IndexError("ours"), chunkc.InternalError),
        (chunkc.FileError("as it is"), chunkc.FileError),
    ],
)
def test_other_errors_are_as_they_are(
    error: Exception, kind: type[Exception] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dynamo skips a function where a backend asks for it."""
    monkeypatch.setattr(build, "extract", fail(error))
    model, x = Net(), torch.randn(2, 8)
    if kind is None:
        torch.testing.assert_close(compiled(model)(x), model(x))
        return
    with pytest.raises(kind) as raised:
        compiled(model)(x)
    assert type(raised.value) is kind


# ---------------------------------------------------------------- sparse and nested


class Bag(nn.Module):
    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(64, 8, sparse=sparse)
        self.word = nn.Embedding(64, 8, sparse=sparse)

    def forward(self, index: Tensor) -> Tensor:
        return self.bag(index) + self.word(index).sum(1)


def test_a_sparse_gradient_is_refused_by_name_and_a_dense_one_is_right() -> None:
    index = torch.randint(64, (4, 3))
    sparse = Bag(sparse=True)
    with pytest.raises(chunkc.UnsupportedError, match=r"gradient of bag\.weight and of 1 more .* sparse=False"):
        compiled(sparse)(index)
    assert all(owner(p) is None for p in sparse.parameters())
    with torch.no_grad():
        torch.testing.assert_close(compiled(sparse)(index), sparse(index))  # an evaluation makes no gradients

    dense, plain = Bag(sparse=False), Bag(sparse=True)
    plain.load_state_dict(dense.state_dict())
    for model in (compiled(dense), plain):
        model(index).square().sum().backward()
    for ours, theirs in zip(dense.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad.to_dense())


class Jagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        rows = batch["rows"]
        if not rows.is_nested:
            rows = torch.nested.nested_tensor_from_jagged(rows, batch["offsets"])
        return self.up(rows).values()


def test_a_nested_input_is_refused_by_name_and_its_tensors_are_not() -> None:
    model = Jagged()
    rows = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)], layout=torch.jagged)
    with pytest.raises(chunkc.UnsupportedError, match=r"batch\['rows'\] \(NestedTensor\).*offsets\(\)") as e:
        compiled(model)({"rows": rows})
    assert "share memory" not in str(e.value)
    torch._dynamo.reset()
    inside = {"rows": rows.values(), "offsets": rows.offsets().clone()}
    torch.testing.assert_close(compiled(model)(inside), model.up(rows.values()))


def test_nested_tensors_of_other_lengths_are_refused_or_traced_one_by_one() -> None:
    """Where no step serves all of their lengths, each has to be traced by Dynamo."""

    def trained(call: Any, model: Jagged, *lengths: int) -> None:
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        rows = torch.randn(int(offsets[-1]), 8)
        out = call({"rows": rows, "offsets": offsets})
        torch.testing.assert_close(out, model.up(rows))
        out.sum().backward()

    model = Jagged()
    call = compiled(model)
    trained(call, model, 3, 5)
    trained(call, model, 4, 6)
    with pytest.raises(chunkc.UnsupportedError, match=r"nested tensor is made.*dynamic=False"):
        trained(call, model, 2, 2, 5)
    torch._dynamo.reset()
    call = compiled(model, dynamic=False)
    for lengths in ((3, 5), (4, 6), (2, 2, 5)):
        trained(call, model, *lengths)
