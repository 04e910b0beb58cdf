"""Tracing leaves nothing in the compute tier: what is charged after the first step is what the step made, and what
the first call takes is what every call takes."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from memory_curves import step_curves
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zoo import Case, floats

import chunkc.backend  # what loading allocates comes before the count
from chunkc.passes.memory.scratch import declared
from chunkc.runtime.device import cpu_allocator


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


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
@pytest.mark.usefixtures("_custom")
def test_the_check_of_custom_operators_can_be_an_error(codegen: str) -> None:
    compiled = compiled_anew(codegen)
    with (
        torch._functorch.config.patch(error_on_custom_op_aliasing=True),
        pytest.raises(RuntimeError, match="chunkc_tracing_tests::same"),
    ):
        compiled(floats(0, (4, 8)))
