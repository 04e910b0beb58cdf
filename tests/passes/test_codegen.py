"""What Inductor refuses reaches the user with the module's name and a way out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import chunkc
from chunkc.passes import codegen
from chunkc.passes.memory.inductor import memory


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.projection(x).square().sum()


def called(options: dict[str, Any]) -> None:
    call = torch.compile(Named(), backend="chunkc", options={"memory_budget": 1 << 30, **options})
    call(torch.randn(4, 8))


def test_a_segment_that_inductor_cannot_compile(monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("no such lowering\nand much more")

    monkeypatch.setattr(codegen, "compile_fx_inner", refuse)
    with pytest.raises(chunkc.UnsupportedError) as error:
        called({"codegen": "inductor", "whole_graph": "never"})
    message = str(error.value)
    assert "cannot compile projection (" in message
    assert "aten.addmm" in message
    assert "AssertionError: no such lowering; compile with" in message
    assert '"codegen": "eager"' in message
    called({"codegen": "eager"})


def test_a_lack_of_memory_is_what_it_is(monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None) -> None:
    def exhausted(*args: Any) -> None:
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(codegen, "compile_fx_inner", exhausted)
    with pytest.raises(Exception, match="none left") as error:
        called({"codegen": "inductor"})
    assert not isinstance(error.value, chunkc.UnsupportedError)


def test_an_operator_that_does_not_tell_its_shape() -> None:
    def silent(x: int, *, y: int) -> None:
        raise RuntimeError(f"meta of {x}, {y}")

    with pytest.raises(chunkc.UnsupportedError, match=r"silent.* does not tell .*RuntimeError: meta of 1, 2"):
        memory._shape_of(silent, (1,), {"y": 2})


def test_arguments_of_every_kind() -> None:
    """Nodes inside of lists and of mappings, constants without a literal."""
    seen: list[Any] = []

    def called_with(*args: Any, **kwargs: Any) -> Tensor:
        seen.append((args, kwargs))
        return torch.zeros(())

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(called_with, ([x, [None, x]], math.inf, torch.bfloat16), {"like": x, "to": {"a": x}})
    graph.call_function(called_with, (first, -3, "it's", True))
    graph.output((first, None))
    value = torch.ones(2)
    found = codegen.EagerSegment(torch.fx.GraphModule({}, graph))([value])
    assert seen[0] == (((value, (None, value)), math.inf, torch.bfloat16), {"like": value, "to": {"a": value}})
    assert found == (seen[1][0][0],)
    assert seen[1][0][1:] == (-3, "it's", True)
