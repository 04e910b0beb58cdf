"""Names as the user knows them, of graphs that are compiled wherever in the model Dynamo breaks it; and what the stack
tells of a graph's caller, while the backend is asked to compile it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import segmented
from torch import Tensor, nn

import chunkc
from chunkc.ir.errors import BudgetError
from chunkc.passes.graphs.graphs import is_compute, module_path
from chunkc.session.session import owner
from chunkc.tracing.caller import called_modules, runs_inside_the_compiled_call
from chunkc.tracing.names import GraphNames, UserNames


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu()).sigmoid()


class Looped(nn.Module):
    """One graph for all blocks, which are alike, and one for `score`."""

    def __init__(self, *, breaks: bool = True) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(8, 8)
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if self.breaks:
                torch._dynamo.graph_break()
        return self.score(x)

    def score(self, x: Tensor) -> Tensor:
        return self.head(x).square().mean()


class Resumed(nn.Module):
    """After the break Dynamo goes on inside a block."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.ModuleDict({"inner": Broken()})

    def forward(self, x: Tensor) -> Tensor:
        return self.outer["inner"](x).mean()


class Broken(Block):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        torch._dynamo.graph_break()
        return self.down(hidden).square()


class Holder(nn.Module):
    """Calls a model that was compiled by itself."""

    def __init__(self, compiled: Any) -> None:
        super().__init__()
        self.part = compiled

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x)


def compiled(model: nn.Module, budget_nbytes: int = 1 << 30) -> Any:
    torch._dynamo.reset()
    return segmented(model, budget_nbytes)


def names_in_session(model: nn.Module) -> set[str]:
    return {hit[1] for parameter in model.parameters() if (hit := owner(parameter)) is not None}


def in_place(model: nn.Module) -> nn.Module:
    torch._dynamo.reset()
    model.compile(backend="chunkc", options={"memory_budget": 1 << 30, "codegen": "eager"})
    return model


def of_a_holder(model: nn.Module) -> nn.Module:
    return Holder(compiled(model))


def function(model: nn.Module) -> Any:
    torch._dynamo.reset()
    options = {"memory_budget": 1 << 30, "codegen": "eager"}
    return torch.compile(lambda x: model(x).sum(), backend="chunkc", options=options)


@pytest.mark.parametrize(
    ("make", "by"),
    [
        *((make, compiled) for make in (Looped, Resumed, Block)),
        (Looped, in_place),
        (Looped, of_a_holder),
        (Block, function),
    ],
)
def test_parameters_have_their_names_in_the_model(make: type[nn.Module], by: Any) -> None:
    """A compiled part is named as the whole knows it, and what a function calls as its variable is."""
    model = make()
    by(model)(torch.ones(2, 8)).sum().backward()
    prefix = "part." if by is of_a_holder else ""
    assert names_in_session(model) == {f"{prefix}{name}" for name, _ in model.named_parameters()}


def test_explained_parts_have_no_name_of_torch_compiles_own() -> None:
    whole = nn.Sequential(Block(), torch.compile(Looped()))
    explained = chunkc.explain(whole, torch.ones(2, 8), memory_budget="1GiB", whole_graph="never")
    modules = {moment.module for moment in explained.moments}
    assert {"0.up", "1.blocks.2.up"} <= modules
    assert not [name for name in modules if "_orig_mod" in name]


@pytest.mark.quick(1)
@pytest.mark.parametrize("make", [Looped, Resumed])
def test_every_call_has_the_module_of_the_model(make: type[nn.Module]) -> None:
    """In training, call by call, and in an explanation: each block its own, though one graph serves all."""
    model = make()
    explained = chunkc.explain(make(), torch.ones(2, 8), memory_budget="1GiB", whole_graph="never")
    modules = {name for name, _ in model.named_modules()}
    assert {moment.module for moment in explained.moments} <= modules
    of_blocks = {moment.module for moment in explained.moments if moment.phase == "backward"}
    if make is Looped:
        assert {"blocks.0.up", "blocks.1.up", "blocks.2.up"} <= of_blocks
        assert {"blocks.0", "blocks.1", "blocks.2"} <= {moment.module for moment in explained.moments}
    else:
        assert {"outer.inner.up", "outer.inner.down"} <= of_blocks
    named = set()
    budget = 1
    for _ in range(8):
        try:
            compiled(model, budget)(torch.ones(2, 8)).backward()
            break
        except BudgetError as error:
            named.add(error.module)
            budget = error.minimum_nbytes
    assert named
    assert named <= modules - {""}


def test_names_of_what_no_module_calls() -> None:
    assert UserNames.of_caller() == UserNames()


def test_tied_parameters_do_not_mislead() -> None:
    """`head.weight` is known as `tokens.weight`: what else the frame reaches keeps its own path."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
            self.head.weight = self.tokens.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.ones(2, 8)).sum()

    found: list[tuple[list[str], set[str]]] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        names = GraphNames(gm).take(inputs, UserNames.of_caller())
        found.append((names, {module_path(node) for node in gm.graph.nodes if is_compute(node)}))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(Tied(), backend=backend)(torch.ones(2, dtype=torch.int64))
    ((names, modules),) = found
    assert set(names) == {"tokens.weight", "head.bias"}
    assert modules == {"", "head"}


# ---------------------------------------------------------------- the caller


def seen(call: Any, breaks: bool) -> list[tuple[bool, list[str]]]:
    """Per graph: whether it runs inside the compiled call, and the classes that are called, the innermost first."""
    found: list[tuple[bool, list[str]]] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        found.append((runs_inside_the_compiled_call(), [type(module).__name__ for module in called_modules()]))
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        call(Looped(breaks=breaks), backend)(torch.ones(2, 8))
    return found


def in_its_place(model: nn.Module, backend: Any) -> nn.Module:
    model.compile(backend=backend)
    return model


def wrapped(model: nn.Module, backend: Any) -> Any:
    return torch.compile(model, backend=backend)


def held(model: nn.Module, backend: Any) -> Any:
    return nn.Sequential(torch.compile(model, backend=backend))


def of_a_function(model: nn.Module, backend: Any) -> Any:
    return torch.compile(lambda x: model(x), backend=backend)


@pytest.mark.parametrize("call", [in_its_place, wrapped, held, of_a_function])
def test_a_graph_of_all_that_is_compiled(call: Any) -> None:
    ((inside, modules),) = seen(call, breaks=False)
    assert not inside
    assert modules[-1:] == {held: ["Sequential"], wrapped: ["OptimizedModule"], of_a_function: []}.get(call, ["Looped"])


@pytest.mark.parametrize("call", [in_its_place, wrapped, held, of_a_function])
def test_graphs_inside_it(call: Any) -> None:
    """One for all blocks, which are alike, and one for the method."""
    part, last = seen(call, breaks=True)
    assert part[0]
    assert part[1][:2] == ["Block", "Looped"]
    assert last[0]
    assert last[1][0] == "Looped"


def test_without_a_caller() -> None:
    assert not runs_inside_the_compiled_call()
    assert list(called_modules()) == []
