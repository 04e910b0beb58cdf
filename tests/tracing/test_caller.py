"""What the stack tells of a graph's caller, while the backend is asked to compile it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from chunkc.tracing.caller import called_modules, runs_inside_the_compiled_call


class Part(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


class Whole(nn.Module):
    def __init__(self, *, breaks: bool) -> None:
        super().__init__()
        self.parts, self.breaks = nn.ModuleList([Part(), Part()]), breaks

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
            if self.breaks:
                torch._dynamo.graph_break()
        return self.last(x)

    def last(self, x: Tensor) -> Tensor:
        return x.square()


def seen(call: Any, breaks: bool) -> list[tuple[bool, list[str]]]:
    """Per graph: whether it runs inside the compiled call, and the classes that are called, the innermost first."""
    found: list[tuple[bool, list[str]]] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        found.append((runs_inside_the_compiled_call(), [type(module).__name__ for module in called_modules()]))
        return gm.forward

    torch._dynamo.reset()
    call(Whole(breaks=breaks), backend)(torch.ones(2))
    return found


def in_place(model: nn.Module, backend: Any) -> nn.Module:
    model.compile(backend=backend)
    return model


def wrapped(model: nn.Module, backend: Any) -> Any:
    return torch.compile(model, backend=backend)


def held(model: nn.Module, backend: Any) -> Any:
    return nn.Sequential(torch.compile(model, backend=backend))


def function(model: nn.Module, backend: Any) -> Any:
    return torch.compile(lambda x: model(x), backend=backend)


@pytest.mark.parametrize("call", [in_place, wrapped, held, function])
def test_a_graph_of_all_that_is_compiled(call: Any) -> None:
    ((inside, modules),) = seen(call, breaks=False)
    assert not inside
    assert modules[-1:] == {held: ["Sequential"], wrapped: ["OptimizedModule"], function: []}.get(call, ["Whole"])


@pytest.mark.parametrize("call", [in_place, wrapped, held, function])
def test_graphs_inside_it(call: Any) -> None:
    """One for both parts, which are alike, and one for the method."""
    part, last = seen(call, breaks=True)
    assert part[0]
    assert part[1][:2] == ["Part", "Whole"]
    assert last[0]
    assert last[1][0] == "Whole"


def test_without_a_caller() -> None:
    assert not runs_inside_the_compiled_call()
    assert list(called_modules()) == []
