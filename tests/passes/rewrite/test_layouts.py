"""Results lie as the traced graph says they do, in whatever order operands lie; and the user's regions that are to be
compiled once.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from harness import HUGE
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import chunkc
from chunkc.passes.graphs.graphs import is_compute, module_path
from chunkc.passes.rewrite.layouts import OPERANDS_ALIKE
from chunkc.passes.rewrite.regions import renamed_modules, write_out_regions
from chunkc.tracing.names import GraphNames, UserNames

aten = torch.ops.aten
SHAPE = (4, 6, 8, 10)
ONES = torch.ones(6)


def stats() -> tuple[Tensor, Tensor]:
    return torch.zeros(6), torch.ones(6)


ELEMENTWISE: dict[Any, tuple] = {
    aten.softplus_backward.default: (1, 20),
    aten.hardtanh_backward.default: (0, 1),
    aten.hardswish_backward.default: (),
    aten.hardsigmoid_backward.default: (),
    aten.logit_backward.default: (0.1,),
    aten._log_softmax_backward_data.default: (1, torch.float32),
}
OF_THREE: dict[Any, tuple] = {
    aten.mse_loss_backward.default: (0,),
    aten.smooth_l1_loss_backward.default: (0, 1.0),
    aten.huber_loss_backward.default: (0, 1.0),
    aten.binary_cross_entropy_backward.default: (None, 0),
}
OF_ONE: dict[Any, tuple] = {
    aten.log_sigmoid_forward.default: (),
    aten.roll.default: ([1], [1]),
    aten._native_batch_norm_legit.no_stats: (None, None, True, 0.1, 1e-5),
    aten.native_batch_norm.default: (None, None, None, None, True, 0.1, 1e-5),
    aten._native_batch_norm_legit_no_training.default: (None, None, *stats(), 0.1, 1e-5),
}
OTHERS = {
    aten.elu_backward.default: lambda a, b: (a, 1, 1, 1, False, b),
    aten.glu_backward.default: lambda a, b: (a[:, :3], b, 1),
    aten.native_dropout_backward.default: lambda a, b: (a, b > 0.5, 2.0),
    aten._native_batch_norm_legit.default: lambda a, b: (a, None, None, *stats(), True, 0.1, 1e-5),
    aten._native_batch_norm_legit_functional.default: lambda a, b: (a, None, None, *stats(), True, 0.1, 1e-5),
    aten._batch_norm_with_update.default: lambda a, b: (a, ONES, ONES, *stats(), 0.1, 1e-5),
    aten._batch_norm_with_update_functional.default: lambda a, b: (a, ONES, ONES, *stats(), 0.1, 1e-5),
    aten.native_batch_norm_backward.default: lambda a, b: (a, b, ONES, None, None, *stats(), True, 1e-5, [True] * 3),
    aten.batch_norm_backward.default: lambda a, b: (
        a, b, ONES, None, None, *stats(), True, 1e-5, [True] * 3, torch.empty(0)
    ),
}  # fmt: skip


def laid(order: str) -> Tensor:
    """Random numbers in one of four orders."""
    x = torch.rand(SHAPE)
    if order == "channels last":
        return x.contiguous(memory_format=torch.channels_last)
    if order == "last two swapped":
        return x.transpose(2, 3).contiguous().transpose(2, 3)
    return x.transpose(0, 1).contiguous().transpose(0, 1) if order == "first two swapped" else x


ORDERS = ("contiguous", "channels last", "last two swapped", "first two swapped")


def calls(operator: Any) -> list[tuple]:
    num_tensors = 2 if operator in ELEMENTWISE or operator in OTHERS else 3 if operator in OF_THREE else 1
    found = []
    for orders in itertools.product(ORDERS, repeat=num_tensors):
        tensors = [laid(order) for order in orders]
        if operator in OTHERS:
            found.append(OTHERS[operator](*tensors))
        else:
            found.append((*tensors, *(ELEMENTWISE | OF_THREE | OF_ONE)[operator]))
    return found


class Checked(fx.Interpreter):
    """Runs a traced graph and notes whose result lies otherwise than was traced."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.wrong: list[str] = []

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op == "call_function":
            for real, traced in zip(pytree.tree_leaves(result), pytree.tree_leaves(n.meta["val"]), strict=True):
                sizes = [size > 1 for size in real.shape] if isinstance(real, Tensor) else []
                if any(many and a != b for many, a, b in zip(sizes, real.stride(), traced.stride(), strict=True)):
                    self.wrong.append(f"{n.target}: {real.stride()}, traced {traced.stride()}")
        return result


def wrong(operator: Any, args: tuple, table: dict) -> list[str]:
    leaves, spec = pytree.tree_flatten(args)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def call(*given: Tensor) -> Any:
        rest = iter(given)
        return operator(*pytree.tree_unflatten([next(rest) if isinstance(x, Tensor) else x for x in leaves], spec))

    checked = Checked(make_fx(call, tracing_mode="fake", decomposition_table=table)(*tensors))
    found, expected = checked.run(*tensors), operator(*pytree.tree_map_only(Tensor, Tensor.clone, args))
    for one, other in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
        torch.testing.assert_close(one, other)
    return checked.wrong


@pytest.mark.parametrize("operator", list(OPERANDS_ALIKE), ids=str)
def test_results_lie_as_traced(operator: Any) -> None:
    assert not [line for args in calls(operator) for line in wrong(operator, args, OPERANDS_ALIKE)]


@pytest.mark.parametrize("operator", [*ELEMENTWISE, aten.elu_backward.default], ids=str)
def test_strides_of_dimensions_of_one_do_not_matter(operator: Any) -> None:
    """A contiguous tensor may have any stride there, and `contiguous` leaves it: this never ended."""
    shape, strides = (4, 6, 1, 8), [(48, 8, 8, 1), (48, 8, 1, 1), (48, 8, 48, 1), (48, 1, 1, 6), (48, 1, 48, 6)]
    for one, other in itertools.product(strides, repeat=2):
        operands = (torch.rand(192).as_strided(shape, one), torch.rand(192).as_strided(shape, other))
        args = OTHERS[operator](*operands) if operator in OTHERS else (*operands, *ELEMENTWISE[operator])
        assert not wrong(operator, args, OPERANDS_ALIKE)


@pytest.mark.parametrize("operator", list(OPERANDS_ALIKE), ids=str)
def test_it_is_needed(operator: Any) -> None:
    """Who reads this after it failed: PyTorch has mended the operator, and it can leave the list."""
    assert any(wrong(operator, args, {}) for args in calls(operator))


class Gates(nn.Module):
    """As linear attention has them: a gate of another order than its gradient, then a product."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        gates = nn.functional.softplus(self.linear(x)).transpose(1, 2)
        return (gates.contiguous().cumsum(-1) * torch.arange(16)).square().mean()


def test_a_view_of_such_a_gradient_is_trained() -> None:
    torch.manual_seed(0)
    model, x = Gates(), torch.randn(3, 16, 8)
    model(x).backward()
    expected = model.linear.weight.grad.clone()  # type: ignore[union-attr]
    model.zero_grad(set_to_none=True)
    torch.compile(model, backend="chunkc", options={"memory_budget": HUGE, "codegen": "eager"})(x).backward()
    torch.testing.assert_close(model.linear.weight.grad, expected)


class NormOfWords(nn.Module):
    """As PatchTST has it: a batch norm over transposed words, whose results are then taken as rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x).transpose(1, 2)).transpose(1, 2)).square().mean()


def test_a_norm_of_words_is_evaluated_and_trained() -> None:
    torch.manual_seed(0)
    plain, model = NormOfWords(), NormOfWords()
    model.load_state_dict(plain.state_dict())
    compiled = torch.compile(model, backend="chunkc", options={"memory_budget": HUGE, "codegen": "eager"})
    x = torch.randn(3, 16, 8)
    for way in (plain, compiled):
        way(x).backward()
    torch.testing.assert_close(model.first.weight.grad, plain.first.weight.grad)
    with torch.no_grad():
        torch.testing.assert_close(compiled.eval()(x), plain.eval()(x))


# ---------------------------------------------------------------- regions

region = torch.compiler.nested_compile_region


@region
def halved(x: Tensor) -> Tensor:
    return x * 0.5 + torch.tensor([0.25])


@region
def block(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.tanh(layer(halved(x))) + halved(x), x.mean()


class Regions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, mean = block(layer, x)
            x = x + mean
        return checkpoint(lambda x: halved(halved(x)).sin(), x, use_reentrant=False)


@pytest.mark.usefixtures("fresh_dynamo")
def test_regions_are_written_out_where_they_are_called() -> None:
    called = torch.ops.higher_order.invoke_subgraph
    seen: list[int] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        given = [value.clone() for value in inputs]
        expected = torch.fx.Interpreter(gm).run(*given)
        seen.append(len(gm.graph.find_nodes(op="call_function", target=called)))
        write_out_regions(gm)
        gm.graph.lint()
        seen.append(len(gm.graph.find_nodes(op="call_function", target=called)))
        torch.testing.assert_close(gm(*given), expected, rtol=0, atol=0)
        return gm.forward

    with torch.no_grad():
        torch.compile(Regions(), backend=backend)(torch.randn(4, 16))
    assert seen[0] > 1
    assert seen[1] == 0


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("grad", [True, False])
def test_models_with_regions_train(grad: bool) -> None:
    model, x = Regions(), torch.randn(4, 16)
    compiled = torch.compile(model, backend="chunkc", options={"codegen": "eager", "whole_graph": "never"})
    with torch.set_grad_enabled(grad):
        found, expected = compiled(x), model(x)
    torch.testing.assert_close(found, expected)
    if grad:
        gradients = torch.autograd.grad(expected.sum(), list(model.parameters()))
        found.sum().backward()
        torch.testing.assert_close([p.grad for p in model.parameters()], list(gradients))
    assert chunkc.report(compiled).minimum_budget_nbytes


def test_renamed_modules() -> None:
    traced = ["", "blocks.0.up.weight", "blocks.0.up.bias", "blocks.0.scale", "head.weight"]
    called = ["", "blocks.3.up.weight", "blocks.3.up.bias", "blocks.3.scale", "head.weight"]
    assert renamed_modules(traced, called) == {"blocks.0": "blocks.3"}
    assert renamed_modules(traced, traced) == {}


@pytest.mark.usefixtures("fresh_dynamo")
def test_operations_are_named_after_the_modules_of_their_call() -> None:
    model = Regions()
    names: list[str] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        GraphNames(gm).take(inputs, UserNames.seen_from(model))
        write_out_regions(gm)
        names.extend(dict.fromkeys(module_path(node) for node in gm.graph.nodes if is_compute(node)))
        return gm.forward

    torch.compile(model, backend=backend)(torch.randn(4, 16))
    assert [name for name in names if name] == ["layers.0", "layers.1", "layers.2"]
