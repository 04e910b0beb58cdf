"""Capture: what AOTAutograd does otherwise where a model is on CUDA is played on a CPU. Tracing leaves nothing in the
compute tier: what is charged after the first step is what the step made, and every call takes the same.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import segmented
from memory_curves import step_curves
from torch import Tensor, fx, nn
from torch._functorch import partitioners
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint
from zoo import Case, floats

import chunkc
import chunkc.backend  # what loading allocates comes before the count
import chunkc.compile
from chunkc.passes.graphs.graphs import placeholders, returned, storage_keys
from chunkc.passes.memory.scratch import declared
from chunkc.runtime.device import cpu_allocator
from chunkc.torch_private.aot import LazyGraphModule
from chunkc.tracing.capture import TracedGraphs


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[TracedGraphs]:
    """Graphs that are captured."""
    found: list[TracedGraphs] = []
    monkeypatch.setattr("chunkc.compile.log_capture", lambda capture, losses: found.append(capture))
    return found


class Blocks(nn.Module):
    """Blocks with dropout, recomputed in the backward: the same elements must be dropped again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(self._block, layer, x, use_reentrant=False)
        return x.square().mean()

    def _block(self, layer: nn.Module, x: Tensor) -> Tensor:
        return self.dropout(torch.tanh(layer(x)))


def trained(model: nn.Module, call: Any) -> list[Tensor]:
    torch.manual_seed(1)
    loss = call(torch.randn(8, 64))
    loss.backward()
    gradients = [p.grad for p in model.parameters()]
    return [loss.detach(), *(g for g in gradients if g is not None)]


def test_states_of_random_generators_are_no_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA, AOTAutograd would hand them to both phases as placeholders, which nobody fills."""

    def as_placeholders(fw: fx.GraphModule, bw: fx.GraphModule, *rest: Any) -> Any:
        last_inputs = rest[-2:]
        for module, last in zip((fw, bw), last_inputs, strict=True):
            with module.graph.inserting_after(last):
                module.graph.placeholder(f"rng_state_{rest[-3]}").meta["val"] = torch.Generator()
        return last_inputs

    if not hasattr(partitioners, "supports_graphsafe_rng"):
        pytest.skip("up to PyTorch 2.11 nobody asks which devices have such states")
    monkeypatch.setattr(partitioners, "supports_graphsafe_rng", lambda device: True)
    monkeypatch.setattr(partitioners, "apply_graphsafe_rng_functionalization", as_placeholders)
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Blocks()
    found = trained(model, segmented(model, "64MiB"))
    model.zero_grad()
    expected = trained(model, model)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


class Shared(nn.Module):
    """A layer that several checkpoints call: its weight's view, or cast, would lie on the boundary between them."""

    def __init__(self, autocast: bool) -> None:
        super().__init__()
        self.layer, self.autocast = nn.Linear(64, 64), autocast

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            for _ in range(3):
                x = checkpoint(self._block, x, use_reentrant=False)
        return x.float().square().mean()

    def _block(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


@pytest.mark.parametrize("autocast", [False, True])
def test_nothing_of_a_parameter_is_saved_between_checkpoints(autocast: bool, captured: list[TracedGraphs]) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Shared(autocast)
    found = trained(model, segmented(model, "64MiB"))
    (capture,) = captured
    assert capture.num_user_outputs is not None
    parameters = set(capture.by_placeholder)
    weights = {
        key for node in placeholders(capture.forward.graph) if node.name in parameters for key in storage_keys(node)
    }
    for saved in returned(capture.forward.graph)[capture.num_user_outputs :]:
        if saved.name in parameters:
            continue
        assert not weights & set(storage_keys(saved)), f"{saved} is a view of a parameter"
        assert not {source.name for source in saved.all_input_nodes} & parameters, f"{saved} is a cast of a parameter"
    model.zero_grad()
    for one, other in zip(found, trained(model, model), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2 if autocast else 1e-5, atol=1e-3 if autocast else 1e-6)


class DrawsAgain(nn.Module):
    """The backward draws again: of a dropout's two results it reads the mask alone, and noise is one result."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self._block, x, use_reentrant=False)
        return x.square().mean()

    def _block(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        return x + F.dropout(self.down(torch.tanh(hidden * torch.rand(64))), 0.1)


@pytest.mark.usefixtures("fresh_dynamo", "two_threads")
def test_what_a_backward_draws_again_is_predicted_to_the_byte() -> None:
    case = Case("draws_again", DrawsAgain, lambda seed: {"x": torch.randn(64, 64)})
    moments = [moment for curve in step_curves(case, "eager", whole_graph="never") for moment in curve.moments]
    assert sum(moment.op == "run_with_rng_state" for moment in moments) == 4
    assert not [moment for moment in moments if moment.excess_nbytes]


class Attends(nn.Module):
    """Heads of a checkpointed attention, with dropout or without."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.project, self.dropout = nn.Linear(64, 192), dropout

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._block, x, use_reentrant=False).square().mean()

    def _block(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_checkpoint_keeps_a_generator_s_state_for_what_draws_alone(
    dropout: float, captured: list[TracedGraphs]
) -> None:
    torch.manual_seed(0)
    model, x = Attends(dropout), torch.randn(2, 8, 64)
    found = []
    for run in (model, segmented(model, "64MiB")):
        torch.manual_seed(1)
        loss = run(x)
        loss.backward()
        found.append((loss.detach(), *(p.grad for p in model.parameters())))
        model.zero_grad()
    torch.testing.assert_close(*found)
    (capture,) = captured
    for graph, target in (
        (capture.forward.graph, torch.ops.higher_order.run_and_save_rng_state),
        (capture.backward.graph, torch.ops.higher_order.run_with_rng_state),
    ):
        assert len(graph.find_nodes(op="call_function", target=target)) == (dropout > 0)


class Prints(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch.ops.aten._print("once")
        return x.square().sum()


@pytest.mark.usefixtures("fresh_dynamo")
def test_an_effect_beside_outputs_is_refused_by_name() -> None:
    compiled = torch.compile(Prints(), backend="chunkc", options={"codegen": "eager"})
    with pytest.raises(chunkc.UnsupportedError, match=r"aten\._print.*torch\.compiler\.disable"):
        compiled(torch.ones(3))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)))


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_an_operator_with_graphs_of_its_own_is_refused_by_name(codegen: str) -> None:
    compiled = torch.compile(Branches(), backend="chunkc", options={"codegen": codegen, "whole_graph": "never"})
    with pytest.raises(chunkc.UnsupportedError, match=r"operator cond .*torch\.compiler\.disable"):
        compiled(torch.ones(3, 8))


def held_by(function: Any) -> list[Any]:
    """What a function's closure holds, and what functions in it do."""
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    return [found for value in cells for found in (value, *(held_by(value) if callable(value) else ()))]


def test_what_autograd_s_tracer_may_keep_holds_no_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch 2.11 keeps these functions with the graph: a batch would stay until the model goes."""
    given: dict[str, Any] = {}

    def tracing(gm: fx.GraphModule, inputs: Any, **functions: Any) -> Any:
        given.update(functions)
        return traced(gm, inputs, **functions)

    traced = chunkc.tracing.capture.aot_module_simplified
    monkeypatch.setattr(chunkc.tracing.capture, "aot_module_simplified", tracing)
    torch._dynamo.reset()
    torch.compile(nn.Linear(8, 8), backend="chunkc", options={"codegen": "eager"})(torch.ones(2, 8)).sum().backward()
    held = [value for function in given.values() for value in held_by(function)]
    assert held
    assert not [leaf for leaf in pytree.tree_leaves(held) if isinstance(leaf, Tensor)]


def test_the_graph_that_dynamo_keeps_holds_no_autograd_nodes() -> None:
    """They hold real tensors: the `128` of `x / 128` as an int64, in memory that no plan counts."""
    torch._dynamo.reset()
    kept: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, *arguments: Any, **options: Any) -> Any:
        kept.append(gm)
        return chunkc.backend.chunkc(gm, *arguments, **options)

    model = nn.Linear(4, 4)
    options = {"memory_budget": 1 << 24, "codegen": "eager"}
    torch.compile(lambda x: (model(x) / 128).sum(), backend=backend, options=options)(torch.ones(2, 4)).backward()
    (gm,) = kept
    values = [node.meta["example_value"] for node in gm.graph.nodes if "example_value" in node.meta]
    assert values
    assert not any(value.requires_grad for value in values)


def test_no_phase_is_copied_or_written_as_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """AOTAutograd would copy the backward for its compiler; a partitioner's graphs would be compiled as Python."""
    copied: list[str] = []
    made: list[TracedGraphs] = []
    capture = chunkc.compile.capture_graph

    def noted(*args: Any, **kwargs: Any) -> Any:
        call, graphs = capture(*args, **kwargs)
        made.append(graphs)
        return call, graphs

    monkeypatch.setattr(chunkc.compile, "capture_graph", noted)
    monkeypatch.setattr(fx.GraphModule, "__deepcopy__", lambda self, memo: copied.append(type(self).__name__))
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    call = segmented(model, 10**9)
    call(torch.randn(8, 64)).sum().backward()
    (graphs,) = made
    assert not copied
    assert all(isinstance(module, LazyGraphModule) and module._needs_recompile() for module in graphs.graphs())


# ---------------------------------------------------------------- what tracing leaves in the compute tier


class Scaled(nn.Module):
    """PyTorch makes tensors of the numbers while Dynamo traces, and its autograd nodes keep them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) / 128).pow(2).sum() / 3


class Mapped(Scaled):
    """Inside `vmap`, where Dynamo's values are batched ones that nothing can be asked of afterwards."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(super().forward)(x).sum()


class Recomputed(Scaled):
    """In a graph inside the graph."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


@pytest.mark.parametrize("kind", [Scaled, Mapped, Recomputed])
def test_numbers_in_the_traced_code_are_not_kept(kind: type[nn.Module]) -> None:
    cpu_allocator.install()
    torch._dynamo.reset()
    model, x = kind(), torch.randn(4, 8)
    gc.collect()
    before = cpu_allocator.current_nbytes()
    compiled = torch.compile(model, backend="chunkc", options={"memory_budget": 1 << 30, "codegen": "eager"})
    compiled(x).backward()
    model.zero_grad(set_to_none=True)
    gc.collect()
    assert cpu_allocator.current_nbytes() == before


class Numbers(nn.Module):
    """Its numbers become tensors while operators run, before and after a custom operator, `copy` or `same`."""

    def __init__(self, custom: str | None = None) -> None:
        super().__init__()
        self.linear, self.custom = nn.Linear(8, 8), custom

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x + 0.5)
        if self.custom is not None:
            x = getattr(torch.ops.chunkc_tracing_tests, self.custom)(x)
        return (x * 2.0 - torch.arange(8) * 3).square().sum()


@pytest.fixture
def _custom() -> Iterator[None]:
    """Two custom operators: `same` returns what it is given, and does not say so."""
    names = ("copy", "same")
    with torch.library._scoped_library("chunkc_tracing_tests", "DEF") as library:
        for name, function in zip(names, (torch.clone, lambda x: x), strict=True):
            library.define(f"{name}(Tensor x) -> Tensor")
            library.impl(name, function, "CPU")
            library.impl(name, torch.empty_like, "Meta")
            operator = getattr(torch.ops.chunkc_tracing_tests, name).default
            torch.library.register_autograd(operator, lambda ctx, g: g.clone(), lib=library)
            chunkc.declare_scratch(f"chunkc_tracing_tests::{name}", lambda args, kwargs, outputs, threads: 0)
        yield
    for name in names:
        declared._declared.pop(f"chunkc_tracing_tests::{name}")


@pytest.mark.second_tier
@pytest.mark.parametrize("custom", [None, "copy"])
@pytest.mark.usefixtures("_custom")
def test_the_first_call_takes_what_was_predicted(custom: str | None) -> None:
    case = Case("numbers", lambda: Numbers(custom), lambda seed: {"x": floats(seed, (4, 8))})
    forward, _ = step_curves(case, "eager", steps=1, whole_graph="never")
    assert {"aten.add", "aten.mul"} <= {moment.op for moment in forward.moments}
    assert not [moment for moment in forward.moments if moment.excess_nbytes]


def compiled_anew(codegen: str) -> Any:
    """A model whose custom operator returns its input, before its first call."""
    torch._dynamo.reset()
    options = {"memory_budget": 1 << 30, "codegen": codegen, "whole_graph": "never"}
    return torch.compile(Numbers("same"), backend="chunkc", options=options)


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
@pytest.mark.usefixtures("_custom")
def test_custom_operators_are_checked_in_their_first_call(codegen: str) -> None:
    compiled = compiled_anew(codegen)
    # PyTorch makes the warning an error where the environment has CI.
    with torch._functorch.config.patch(error_on_custom_op_aliasing=False):
        with pytest.warns(UserWarning, match="chunkc_tracing_tests::same"):
            compiled(floats(0, (4, 8)))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            compiled(floats(0, (4, 8)))


@pytest.mark.usefixtures("_custom")
def test_the_check_of_custom_operators_can_be_an_error() -> None:
    compiled = compiled_anew("eager")
    with (
        torch._functorch.config.patch(error_on_custom_op_aliasing=True),
        pytest.raises(RuntimeError, match="chunkc_tracing_tests::same"),
    ):
        compiled(floats(0, (4, 8)))
