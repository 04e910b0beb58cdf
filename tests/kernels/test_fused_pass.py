"""Updates on the CPU are compiled by a C++ compiler; where there is none, the error says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._inductor.codecache import CppCodeCache
from torch._inductor.exc import CppCompileError, InductorError, InvalidCxxCompiler

from chunkc.ir.errors import UnsupportedError
from chunkc.kernels import fused_pass
from chunkc.kernels.cpu_loop import has_loop, library
from chunkc.kernels.formats import AdamFormat
from chunkc.kernels.fused_pass import compile_pass, compiler_required

FAILURES = [InvalidCxxCompiler(), CppCompileError(["g++"], "no such file")]


def wrapped(inside: Exception) -> InductorError:
    """As Inductor raises what happens inside it."""
    return InductorError(inside, None)


@pytest.mark.parametrize("failure", [*FAILURES, *map(wrapped, FAILURES)])
def test_a_compiler_that_does_not_work_is_the_users_to_mend(failure: Exception) -> None:
    with pytest.raises(UnsupportedError, match="install a C") as caught, compiler_required():
        raise failure
    assert caught.value.__cause__ is failure


@pytest.mark.parametrize("failure", [ValueError("a bug"), wrapped(ValueError("a bug"))])
def test_whatever_else_happens_is_raised_as_it_is(failure: Exception) -> None:
    with pytest.raises(type(failure), match="a bug") as caught, compiler_required():
        raise failure
    assert caught.value is failure


def failing(*_: Any, **__: Any) -> None:
    raise InvalidCxxCompiler


def by_inductor() -> None:
    compile_pass(lambda x: x.mul_(2), [(torch.float32, ())], [], parallel=False)


def by_itself() -> None:
    fmt = AdamFormat(torch.bfloat16, torch.float32, master=True)
    assert has_loop(fmt)
    library(fmt, l2=True, scaled=True)


@pytest.mark.parametrize("compiling", [by_inductor, by_itself])
def test_either_way_of_compiling_says_it(compiling: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    library.cache_clear()
    monkeypatch.setattr(fused_pass, "compile_fx_inner", failing)
    monkeypatch.setattr(CppCodeCache, "load", failing)
    with pytest.raises(UnsupportedError, match="set CXX"):
        compiling()
