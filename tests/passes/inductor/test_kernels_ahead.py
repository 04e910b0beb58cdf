"""C++ kernels of several segments compiled side by side: by Inductor's own cache, as often and with the same errors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch._inductor import codecache, config
from torch._inductor.cpp_builder import CppBuilder
from torch._inductor.exc import CppCompileError
from torch._inductor.utils import fresh_cache
from torch.fx.experimental.proxy_tensor import make_fx

from chunkc.ir.errors import UnsupportedError
from chunkc.passes import codegen
from chunkc.passes.codegen import CompiledSegment, compile_segment, kernels_started, prepare_compiler
from chunkc.passes.inductor import kernels_ahead
from chunkc.passes.inductor.kernels_ahead import CompiledBefore
from chunkc.passes.segments import Segment, SegmentTable, canonical_text, cut, extract

WAIT_S = 300


def segment_of(name: str, function: Callable[[torch.Tensor], torch.Tensor]) -> Segment:
    gm = make_fx(lambda x: (function(x),), tracing_mode="fake")(torch.empty(64))
    (piece,) = extract(gm, cut(gm.graph, groups={}, gradient_groups={}), SegmentTable())
    return Segment(name, piece.segment.module)


def segments() -> list[Segment]:
    functions = {"sine": torch.sin, "cosine": torch.cos, "exponential": torch.exp, "tangent": torch.tanh}
    return [segment_of(name, function) for name, function in functions.items()]


def kernel_of(builder: CppBuilder) -> str:
    """Which of the segments a build is for."""
    with open(builder._sources_args.split()[0]) as source:
        text = source.read()
    (name,) = [name for name in ("sin", "cos", "exp", "tanh") if f".{name}()" in text]
    return name


class Builds:
    """Stands before the C++ compiler: notes what it is run for and by which thread, and may hold or fail it."""

    def __init__(self, before: Callable[[str], None]) -> None:
        self.kernels: list[str] = []
        self.in_main: list[str] = []
        build = CppBuilder.build

        def counted(builder: CppBuilder) -> None:
            name = kernel_of(builder)
            self.kernels.append(name)
            if threading.current_thread() is threading.main_thread():
                self.in_main.append(name)
            before(name)
            build(builder)

        self.build = counted


@pytest.fixture
def new_cache() -> Iterator[None]:
    prepare_compiler().join()
    with fresh_cache(), config.patch(compile_threads=2):
        yield


@pytest.fixture
def builds(new_cache: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[str], None]], Builds]:
    def counting(before: Callable[[str], None] = lambda name: None) -> Builds:
        found = Builds(before)
        monkeypatch.setattr(CppBuilder, "build", found.build)
        return found

    return counting


def compiled(given: list[Segment]) -> list[CompiledSegment]:
    with kernels_started(given, "inductor"):
        return [compile_segment(segment, "inductor", 1) for segment in given]


def test_kernels_of_different_segments_are_compiled_at_the_same_time_and_once(builds: Callable[..., Builds]) -> None:
    two = threading.Barrier(2)
    found = builds(lambda name: two.wait(WAIT_S))  # nobody compiles unless two do
    x = torch.randn(64)
    runs = compiled(segments())
    assert sorted(found.kernels) == ["cos", "exp", "sin", "tanh"]
    assert not found.in_main
    functions = (torch.sin, torch.cos, torch.exp, torch.tanh)
    for run, function in zip(runs, functions, strict=True):
        torch.testing.assert_close(run.run([x])[0], function(x))


@pytest.mark.second_tier
def test_the_code_is_that_of_segments_compiled_one_after_the_other(new_cache: None) -> None:
    ahead = [segment.wrapper for segment in compiled(segments()[:2])]
    with fresh_cache():
        alone = [compile_segment(segment, "inductor", 1).wrapper for segment in segments()[:2]]
    assert [wrapper and wrapper.source for wrapper in ahead] == [wrapper and wrapper.source for wrapper in alone]


@pytest.mark.slow
def test_a_user_who_wants_one_compilation_at_a_time_has_that(builds: Callable[..., Builds]) -> None:
    found = builds()
    with config.patch(compile_threads=1):
        compiled(segments()[:2])
    assert found.kernels == found.in_main == ["sin", "cos"]


@pytest.mark.slow
def test_what_was_compiled_before_is_not_prepared_again(
    builds: Callable[..., Builds], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, asked = builds(), []
    generate = codegen.generated_wrapper
    monkeypatch.setattr(codegen, "generated_wrapper", lambda *args: asked.append(args) or generate(*args))
    compiled(segments()[:2])
    assert len(asked) == len(found.kernels) == 2
    compiled(segments()[:2])
    assert len(asked) == len(found.kernels) == 2
    codecache.CppPythonBindingsCodeCache.cache_clear()  # as in another process
    compiled(segments()[:3])
    assert len(asked) == 2  # one that is new has nobody to be compiled beside
    compiled(segments())
    assert len(found.kernels) == 4


@pytest.mark.slow
def test_a_note_on_kernels_that_are_gone_costs_time_only(builds: Callable[..., Builds]) -> None:
    given, found = segments()[:2], builds()
    for segment in given:
        CompiledBefore().add(canonical_text(segment.module.graph))
    runs = compiled(given)
    assert sorted(found.kernels) == ["cos", "sin"]
    assert torch.equal(runs[0].run([torch.zeros(64)])[0], torch.zeros(64))


def test_a_directory_that_cannot_be_written_has_no_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "a file where a directory should be"
    blocked.touch()
    monkeypatch.setattr(kernels_ahead, "cache_dir", lambda: str(blocked))
    CompiledBefore().add("segment")
    assert "segment" not in CompiledBefore()


def test_nothing_happens_for_eager_code(builds: Callable[..., Builds], monkeypatch: pytest.MonkeyPatch) -> None:
    found = builds()
    monkeypatch.setattr(codegen, "generated_wrapper", None)
    with kernels_started(segments(), "eager"):
        pass
    assert not found.kernels


def test_a_compilers_failure_is_the_one_that_is_raised_without_it(builds: Callable[..., Builds]) -> None:
    def fail(name: str) -> None:
        if name == "cos":
            raise CppCompileError(["g++"], "no room on the disk")

    builds(fail)
    sine, cosine, _, _ = segments()
    with kernels_started([sine, cosine], "inductor"):
        compile_segment(sine, "inductor", 1)
        with pytest.raises(UnsupportedError, match=r"aten\.cos") as ahead:
            compile_segment(cosine, "inductor", 1)
    with fresh_cache(), pytest.raises(UnsupportedError) as alone:
        compile_segment(segments()[1], "inductor", 1)
    assert "no room on the disk" in str(ahead.value.__cause__)
    assert str(ahead.value.__cause__) == str(alone.value.__cause__)


@pytest.mark.slow
def test_a_failure_that_passes_is_forgotten(builds: Callable[..., Builds]) -> None:
    """As where an interrupt of the terminal reaches the C++ compiler too."""

    def fail_ahead(name: str) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise CppCompileError(["g++"], "interrupted")

    found = builds(fail_ahead)
    (one, two) = compiled(segments()[:2])
    assert sorted(found.in_main) == ["cos", "sin"]
    assert torch.equal(one.run([torch.zeros(64)])[0], torch.zeros(64))
    assert torch.equal(two.run([torch.zeros(64)])[0], torch.ones(64))


@pytest.mark.second_tier
def test_an_interrupt_leaves_nothing_behind_and_nothing_broken(builds: Callable[..., Builds]) -> None:
    may_go = threading.Event()
    found = builds(lambda name: may_go.wait(WAIT_S))
    with pytest.raises(KeyboardInterrupt), kernels_started(segments(), "inductor"):
        raise KeyboardInterrupt
    may_go.set()
    runs = compiled(segments())
    assert sorted(found.kernels) == ["cos", "exp", "sin", "tanh"]
    assert {"exp", "tanh"} <= set(found.in_main)  # two were under way at the interrupt, the others were never begun
    assert torch.equal(runs[-1].run([torch.zeros(64)])[0], torch.zeros(64))


def test_the_header_of_all_kernels_is_prepared_before_the_first(new_cache: None) -> None:
    before = codecache._precompile_header.cache_info().misses
    compile_segment(segments()[0], "inductor", 1)
    assert before > 0
    assert codecache._precompile_header.cache_info().misses == before
