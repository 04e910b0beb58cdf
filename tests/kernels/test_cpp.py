"""Updates on the CPU are compiled by a C++ compiler; where there is none, the error says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._inductor.codecache import CppCodeCache
from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

from chunkc.ir.errors import UnsupportedError
from chunkc.kernels.cpp import load
from chunkc.kernels.elementwise_cpu import warm_up_format
from chunkc.kernels.formats import AdamFormat


def fail_with(failure: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every compilation fail."""

    def failing(*_: Any, **__: Any) -> None:
        raise failure

    monkeypatch.setattr(CppCodeCache, "load", failing)


@pytest.mark.parametrize("failure", [InvalidCxxCompiler(), CppCompileError(["g++"], "no such file")])
def test_a_compiler_that_does_not_work_is_the_users_to_mend(
    failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_with(failure, monkeypatch)
    with pytest.raises(UnsupportedError, match="install a C") as caught:
        load("")
    assert caught.value.__cause__ is failure


def test_only_gcc_gets_flags_that_clang_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[str, ...]] = []
    monkeypatch.setattr(CppCodeCache, "load", lambda source, extra_flags: found.append(extra_flags))
    for is_gcc in (True, False):
        monkeypatch.setattr("chunkc.kernels.cpp.is_gcc", lambda is_gcc=is_gcc: is_gcc)
        load("")
    of_gcc, of_clang = found
    assert {*of_gcc} - {*of_clang} == {"-ftree-loop-vectorize"}


def test_an_update_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(InvalidCxxCompiler(), monkeypatch)
    never_compiled = AdamFormat(torch.float64, torch.float16)
    with pytest.raises(UnsupportedError, match="set CXX"):
        warm_up_format(never_compiled, l2=True, scaled=True)


def test_other_errors_are_raised_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = ValueError("a bug")
    fail_with(failure, monkeypatch)
    with pytest.raises(ValueError, match="a bug") as caught:
        load("")
    assert caught.value is failure
