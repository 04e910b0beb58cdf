"""C++ kernels of several segments compiled side by side: by Inductor's own cache, as often and with the same errors."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch._inductor import codecache, config, cpu_vec_isa
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.cpp_builder import CppBuilder
from torch._inductor.exc import CppCompileError
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import fresh_cache
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx

from chunkc.ir.errors import UnsupportedError
from chunkc.passes.codegen import CompiledSegment, Show, compile_segment, compiled_together, prepare_compiler
from chunkc.passes.segments.cuts import cut
from chunkc.passes.segments.segments import Segment, SegmentTable, extract
from chunkc.torch_private import inductor
from chunkc.torch_private.fake import detect_fake_mode
from chunkc.torch_private.inductor import without_waiting

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


def test_vector_instructions_are_tried_until_some_work(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    class Tried(str):
        def __bool__(self) -> bool:
            tried.append(str(self))
            return self != "avx512 avx512_vnni"

        def bit_width(self) -> int:
            return 512 if "512" in self else 256

    isas = [Tried("amx_tile"), Tried("avx512 avx512_vnni"), Tried("avx512"), Tried("avx2")]
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    for module in (inductor, cpu_vec_isa):
        monkeypatch.setattr(module, "x86_isa_checker", lambda: ["avx2", "avx512", "avx512_vnni"])
        monkeypatch.setattr(module, "supported_vec_isa_list", isas)
    unpatched = functools.cache(inductor._all_vector_isas.__wrapped__)
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", unpatched)
    monkeypatch.setattr(inductor, "_all_vector_isas", unpatched)
    inductor.try_vector_isas()
    assert cpu_vec_isa.pick_vec_isa() == "avx512"
    assert tried == ["avx512 avx512_vnni", "avx512"]
    with config.patch({"cpp.simdlen": 256}):
        assert cpu_vec_isa.pick_vec_isa() == "avx2"
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    assert cpu_vec_isa.pick_vec_isa() == "avx2"
    inductor.try_vector_isas()  # once is enough
    assert tried.count("avx512") == 2


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


def compiled(given: list[Segment], show: Show = lambda what, done, of: None) -> list[CompiledSegment]:
    with compiled_together(show) as compile_one:
        return [compile_one(segment, "inductor", 1) for segment in given]


def test_kernels_of_different_segments_are_compiled_at_the_same_time_and_once(builds: Callable[..., Builds]) -> None:
    two = threading.Barrier(2)
    found = builds(lambda name: two.wait(WAIT_S))  # nobody compiles unless two do
    x = torch.randn(64)
    runs = compiled(segments()[:2])
    assert sorted(found.kernels) == ["cos", "sin"]
    assert not found.in_main
    for run, function in zip(runs, (torch.sin, torch.cos), strict=True):
        torch.testing.assert_close(run.run([x])[0], function(x))


@pytest.mark.second_tier
def test_the_code_is_that_of_segments_compiled_one_after_the_other(new_cache: None) -> None:
    together = [segment.wrapper for segment in compiled(segments()[:2])]
    with fresh_cache():
        alone = [compile_segment(segment, "inductor", 1).wrapper for segment in segments()[:2]]
    assert [wrapper and wrapper.source for wrapper in together] == [wrapper and wrapper.source for wrapper in alone]


@pytest.mark.slow
def test_a_user_who_wants_one_compilation_at_a_time_has_that(builds: Callable[..., Builds]) -> None:
    found = builds()
    with config.patch(compile_threads=1):
        compiled(segments()[:2])
    assert found.kernels == found.in_main == ["sin", "cos"]


def test_each_segment_is_lowered_once_and_while_others_compile(
    builds: Callable[..., Builds], monkeypatch: pytest.MonkeyPatch
) -> None:
    lowered: list[str] = []
    all_lowered = threading.Event()
    found = builds(lambda name: all_lowered.wait(WAIT_S))  # no kernel is compiled before all segments are lowered

    def counted(lowering: GraphLowering) -> object:
        lowered.append(str(lowering))
        if len(lowered) == 3:
            all_lowered.set()
        return generate(lowering)

    generate = GraphLowering.codegen
    monkeypatch.setattr(GraphLowering, "codegen", counted)
    compiled(segments()[:3])
    assert len(lowered) == len(found.kernels) == 3


@pytest.mark.slow
def test_another_process_finds_what_was_compiled(builds: Callable[..., Builds]) -> None:
    found = builds()
    compiled(segments()[:2])
    codecache.CppPythonBindingsCodeCache.cache_clear()
    codecache.PyCodeCache.cache_clear()
    runs = compiled(segments()[:3])
    assert sorted(found.kernels) == ["cos", "exp", "sin"]
    assert torch.equal(runs[1].run([torch.zeros(64)])[0], torch.ones(64))


def test_progress_names_what_is_waited_for(builds: Callable[..., Builds]) -> None:
    builds()
    shown: list[tuple[str, int, int | None]] = []
    compiled(segments()[:2], lambda what, done, of: shown.append((what, done, of)))
    assert shown == [("compiling kernels", 0, 2), ("compiling kernels", 1, 2)]


def test_nothing_happens_for_eager_code(builds: Callable[..., Builds]) -> None:
    found = builds()
    with compiled_together(lambda what, done, of: None) as compile_one:
        run = compile_one(segments()[1], "eager", 1).run
        assert torch.equal(run([torch.zeros(64)])[0], torch.ones(64))
    assert not found.kernels


def test_others_wait_for_their_kernels_meanwhile(builds: Callable[..., Builds]) -> None:
    """Another thread that compiles with Inductor at the same time runs what it has compiled at once."""
    builds()
    found: list[torch.Tensor] = []

    def elsewhere() -> None:
        with V.set_fake_mode(detect_fake_mode(cosine.example_inputs)):
            found.append(compile_fx_inner(cosine.module, cosine.example_inputs)([torch.zeros(64)])[0])

    cosine = segments()[1]
    with without_waiting(threading.Event()) as modules:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert not modules
    assert torch.equal(found[0], torch.ones(64))


def test_a_compilers_failure_is_the_one_that_is_raised_without_it(builds: Callable[..., Builds]) -> None:
    def fail(name: str) -> None:
        if name == "cos":
            raise CppCompileError(["g++"], "no room on the disk")

    builds(fail)
    with pytest.raises(UnsupportedError, match=r"aten\.cos") as together:
        compiled(segments()[:2])
    with fresh_cache(), pytest.raises(UnsupportedError) as alone:
        compile_segment(segments()[1], "inductor", 1)
    assert "no room on the disk" in str(together.value.__cause__)
    assert "no room on the disk" in str(alone.value.__cause__)
    with pytest.raises(UnsupportedError, match=r"aten\.cos"):
        compiled(segments()[:2])  # again, since nothing keeps what has no kernels


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

    def interrupt(what: str, done: int, of: int | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compiled(segments(), interrupt)
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
