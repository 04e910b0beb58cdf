"""Inductor's code generation alone: the same wrapper and the same bytes as its compiler's, and no compiler started. C++
kernels of several segments are compiled several in a file, found by Inductor as its own, and with the same errors.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import HUGE, compile_case
from torch._inductor import codecache, config, cpu_vec_isa
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.cpp_builder import CppBuilder
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.exc import CppCompileError, InvalidCxxCompiler
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import fresh_cache
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx
from zoo import CASES

from chunkc.explaining.explain import explain
from chunkc.ir.errors import UnsupportedError
from chunkc.ir.program import SegmentMemory
from chunkc.passes import codegen
from chunkc.passes.codegen import (
    CompiledSegment,
    Show,
    compile_segment,
    compiled_together,
    describe_segment,
    find_vector_isa,
    prepare_compiler,
)
from chunkc.passes.graphs.graphs import placeholders
from chunkc.passes.memory.inductor.wrapper_source import wrapper_of
from chunkc.passes.segments.cuts import cut
from chunkc.passes.segments.segments import Segment, SegmentTable, canonical_text, extract
from chunkc.torch_private import inductor
from chunkc.torch_private.fake import detect_fake_mode
from chunkc.torch_private.inductor import WaitingKernels, without_waiting
from chunkc.torch_private.kernel_batches import in_one_file
from chunkc.tracing import build


def segment_of(function: Callable[..., object], *shapes: tuple[int, ...]) -> Segment:
    args = [torch.empty(shape) for shape in shapes]
    gm = make_fx(function, tracing_mode="fake", decomposition_table=select_decomp_table())(*args)
    with V.set_fake_mode(detect_fake_mode([node.meta["val"] for node in placeholders(gm.graph)])):
        joint_graph_passes(gm)  # random numbers by Inductor's own operators, as in a captured graph
    (piece,) = extract(gm, cut(gm.graph, groups={}, gradient_groups={}), SegmentTable())
    return piece.segment


def mlp(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    hidden = torch.relu(torch.mm(x, w))
    return hidden, torch.mm(hidden, v) + 1


def norm(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    variance, mean = torch.var_mean(x, -1, keepdim=True)
    return mean, (x - mean) * torch.rsqrt(variance + 1e-5) * w


def convolution(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    image = torch.conv2d(x, w, padding=1)
    return torch.relu(image).mean((2, 3)), image


def image_as_rows(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    image = torch.conv2d(torch.conv2d(x, w, padding=1), w, padding=1)
    return (image.view(x.shape[0], -1) * 2,)


def bias(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A pass of Inductor's makes it one operator; of another width, it would pad the rows."""
    hidden = torch.mm(x, w) + b
    return (torch.exp(torch.mm(hidden, w.t())),)


def chain(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    for _ in range(5):
        x = torch.exp(-x)
    return (x,)


FUNCTIONS = {
    "mlp": (mlp, (32, 64), (64, 128), (128, 16)),
    "norm": (norm, (64, 128), (128,)),
    "convolution": (convolution, (2, 3, 16, 16), (8, 3, 3, 3)),
    "image_as_rows": (image_as_rows, (2, 16, 32, 32), (16, 16, 3, 3)),
    "bias": (bias, (64, 32), (32, 2050), (2050,)),
    "chain": (chain, (1000,)),
}
SLOW, SECOND = pytest.mark.slow, pytest.mark.second_tier
MARKS = {"mlp": (), "norm": (), "convolution": SECOND}
NAMES = [pytest.param(name, marks=MARKS.get(name, SLOW)) for name in FUNCTIONS]


@pytest.mark.parametrize("name", NAMES)
def test_the_source_is_the_compilers(name: str) -> None:
    described, compiled = segment_of(*FUNCTIONS[name]), segment_of(*FUNCTIONS[name])
    source = wrapper_of(described).source
    assert "def call" in source
    assert source == compile_fx_inner(compiled.module, compiled.example_inputs).source_code


@pytest.mark.parametrize("name", ["norm", "image_as_rows", "bias"])
def test_the_segment_is_left_as_it_is(name: str) -> None:
    segment = segment_of(*FUNCTIONS[name])
    before = canonical_text(segment.module.graph)
    first = wrapper_of(segment).source
    assert canonical_text(segment.module.graph) == before
    assert wrapper_of(segment).source == first


@pytest.mark.parametrize("fallback_random", [False, True])
def test_the_users_settings_of_inductor_count(fallback_random: bool) -> None:
    with config.patch(fallback_random=fallback_random):
        segment = segment_of(lambda x: (torch.rand_like(x) + x,), (64,))
        memory = describe_segment(segment, "inductor", 1)
        assert any("rand" in step.op and step.op.startswith("aten") for step in memory.steps) is fallback_random
        assert memory == compile_segment(segment, "inductor", 1).memory


def test_fusion_saves_bytes_that_the_graph_does_not_show() -> None:
    segment = segment_of(*FUNCTIONS["chain"])
    fused, eager = describe_segment(segment, "inductor", 1), describe_segment(segment, "eager", 1)
    assert max(step.nbytes for step in fused.steps) == 4000
    assert max(step.nbytes for step in eager.steps) == 8000


@pytest.fixture
def no_compiler(tmp_path: Path) -> Iterator[None]:
    """There is no C++ compiler, and nothing of earlier compilations is found."""
    find_vector_isa().join()
    with config.patch({"cpp.cxx": (None, str(tmp_path / "no-such-compiler")), "fx_graph_cache": False}):
        yield


_ASKS_FOR_THE_COMPILER = {"norm", "convolution", "image_as_rows"}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("no_compiler")
def test_no_compiler_is_started(name: str) -> None:
    if torch.__version__ >= (2, 14) and name in _ASKS_FOR_THE_COMPILER:
        pytest.skip("from PyTorch 2.14 on, the code of a reduction depends on which compiler there is")
    memory = describe_segment(segment_of(*FUNCTIONS[name]), "inductor", 1)
    assert any(step.op.startswith("cpp_fused") for step in memory.steps)
    with pytest.raises(Exception, match="No working C\\+\\+ compiler"):
        compile_segment(segment_of(*FUNCTIONS[name]), "inductor", 1)


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_is_missing_without_a_compiler_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask_in_vain() -> None:
        raise InvalidCxxCompiler

    monkeypatch.setattr(codegen, "pick_vec_isa", ask_in_vain)
    monkeypatch.setattr(codegen, "find_vector_isa", functools.cache(codegen.find_vector_isa.__wrapped__))
    for make in (describe_segment, compile_segment):
        with pytest.raises(UnsupportedError, match=r"g\+\+.*CXX.*eager"):
            make(segment_of(*FUNCTIONS["chain"]), "inductor", 1)
        make(segment_of(*FUNCTIONS["chain"]), "eager", 1)


# --- whole models -----------------------------------------------------------------------------------------------


def described_and_compiled(
    name: str, whole_graph: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, SegmentMemory], dict[str, SegmentMemory]]:
    """Memories of the distinct segments of a model, by canonical text: as explained, and as compiled for training.

    Of a graph that is compiled whole, the explanation describes the segments too, for its smallest budget.
    """
    described: dict[str, SegmentMemory] = {}
    compiled: dict[str, SegmentMemory] = {}

    def describe(segment: Segment, codegen: str, *args: Any, **kwargs: Any) -> SegmentMemory:
        memory = describe_segment(segment, codegen, *args, **kwargs)
        if codegen == "inductor":
            described[canonical_text(segment.module.graph)] = memory
        return memory

    def compile_(segment: Segment, codegen: str, *args: Any) -> CompiledSegment:
        text = canonical_text(segment.module.graph)
        result = compile_segment(segment, codegen, *args)
        if codegen == "inductor":
            compiled[text] = result.memory
        return result

    monkeypatch.setattr(build, "describe_segment", describe)
    monkeypatch.setattr(codegen, "compile_segment", compile_)
    case = CASES[name]
    explain(case.build(0), memory_budget=HUGE, codegen="inductor", whole_graph=whole_graph, **case.batch(0))
    _, model = compile_case(case, memory_budget=HUGE, codegen="inductor", whole_graph=whole_graph, place=False)
    model(**case.batch(0))
    return described, compiled


@pytest.mark.second_tier
@pytest.mark.parametrize(
    ("name", "whole_graph"),
    [
        ("frozen_mlp", "never"),
        pytest.param("byte_gpt", "auto", marks=SLOW),
        pytest.param("bert_dropout", "never", marks=SLOW),
        pytest.param("convnet", "auto", marks=SLOW),
    ],
)
def test_explained_segments_are_those_of_training(name: str, whole_graph: str, monkeypatch) -> None:
    described, compiled = described_and_compiled(name, whole_graph, monkeypatch)
    assert compiled
    assert {text: described[text] for text in compiled} == compiled
    assert any(step.op.startswith("cpp_fused") for memory in compiled.values() for step in memory.steps)


# ---------------------------------------------------------------- kernels compiled side by side

WAIT_S = 300


def named_segment(name: str, function: Callable[[torch.Tensor], torch.Tensor]) -> Segment:
    gm = make_fx(lambda x: (function(x),), tracing_mode="fake")(torch.empty(64))
    (piece,) = extract(gm, cut(gm.graph, groups={}, gradient_groups={}), SegmentTable())
    return Segment(name, piece.segment.module)


def segments() -> list[Segment]:
    functions = {"sine": torch.sin, "cosine": torch.cos, "exponential": torch.exp, "tangent": torch.tanh}
    functions |= {"root": torch.sqrt, "magnitude": torch.abs, "floor": torch.floor, "ceiling": torch.ceil}
    functions |= {"logarithm": torch.log, "negation": torch.neg}
    return [named_segment(name, function) for name, function in functions.items()]


def kernels_of(builder: CppBuilder) -> tuple[str, ...]:
    """Which of the segments a build is for."""
    with open(builder._sources_args.split()[0]) as source:
        text = source.read()
    names = ("sin", "cos", "exp", "tanh", "sqrt", "abs", "floor", "ceil", "log", "neg")
    return tuple(name for name in names if f".{name}()" in text)


class Builds:
    """Stands before the C++ compiler: notes what it is run for and by which thread, and may hold or fail it."""

    def __init__(self, before: Callable[[tuple[str, ...]], None]) -> None:
        self.files: list[tuple[str, ...]] = []
        self.in_main: list[str] = []
        build = CppBuilder.build

        def counted(builder: CppBuilder) -> None:
            names = kernels_of(builder)
            self.files.append(names)
            if threading.current_thread() is threading.main_thread():
                self.in_main.extend(names)
            before(names)
            build(builder)

        self.build = counted

    @property
    def kernels(self) -> list[str]:
        return sorted(itertools.chain(*self.files))


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
def builds(new_cache: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Builds]:
    def counting(before: Callable[[tuple[str, ...]], None] = lambda names: None) -> Builds:
        found = Builds(before)
        monkeypatch.setattr(CppBuilder, "build", found.build)
        return found

    return counting


def compiled(given: list[Segment], show: Show = lambda what, done, of: None) -> list[CompiledSegment]:
    with compiled_together(show) as compile_one:
        return [compile_one(segment, "inductor", 1) for segment in given]


def test_kernels_of_different_segments_are_compiled_four_in_a_file_and_files_at_the_same_time(
    builds: Callable[..., Builds],
) -> None:
    two = threading.Barrier(2)
    found = builds(lambda names: two.wait(WAIT_S))  # no file is compiled unless two are
    x = torch.rand(64)
    runs = compiled(segments()[:8])
    assert sorted(map(len, found.files)) == [4, 4]
    assert len(set(found.kernels)) == 8
    assert not found.in_main
    functions = (torch.sin, torch.cos, torch.exp, torch.tanh, torch.sqrt, torch.abs, torch.floor, torch.ceil)
    for run, function in zip(runs, functions, strict=True):
        torch.testing.assert_close(run.run([x])[0], function(x))


def test_inductor_finds_each_kernel_of_a_file_as_its_own(
    builds: Callable[..., Builds], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What overwrites one library in place leaves the others alone."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    prepare_compiler().join()
    found = builds()
    compiled(segments()[:3])
    codecache.CppPythonBindingsCodeCache.cache_clear()
    codecache.PyCodeCache.cache_clear()
    for segment, expected in zip(segments()[:3], (0.0, 1.0, 1.0), strict=True):
        assert compile_segment(segment, "inductor", 1).run([torch.zeros(64)])[0].eq(expected).all()
    assert found.files == [("sin", "cos", "exp")]
    assert len({path.stat().st_ino for path in tmp_path.rglob("*.main.so")}) == 3


@pytest.mark.parametrize(
    "line", ["#include <vector>", "  #define likely(x) (x)"], ids=["an include", "a macro that bindings define"]
)
def test_conditions_stay_around_what_they_are_of(line: str) -> None:
    """An include under a condition cannot move to the top of the file that several kernels share."""
    source = f"#ifdef _MSC_VER\n{line}\n#endif\nint kernel();"
    text = in_one_file({"a.so": source, "b.so": source})
    assert (text is None) == ("include" in line)
    assert text is None or text.count(source) == 2


def test_a_batch_that_cannot_begin_is_compiled_by_its_callers(
    builds: Callable[..., Builds], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt at that moment leaves no kernel that a later caller waits for."""
    reasons: list[BaseException] = [KeyboardInterrupt(), RuntimeError("no thread")]

    def fail() -> object:
        raise reasons.pop(0) if reasons else RuntimeError("no thread")

    found = builds()
    monkeypatch.setattr(AsyncCompile, "pool", fail)
    with pytest.raises(KeyboardInterrupt):
        compiled(segments()[:4])
    runs = compiled(segments()[:4])
    assert found.in_main == ["sin", "cos", "exp", "tanh"]
    assert runs[1].run([torch.zeros(64)])[0].eq(1).all()


def test_a_kernel_that_cannot_share_a_file_is_compiled_alone(
    builds: Callable[..., Builds], monkeypatch: pytest.MonkeyPatch
) -> None:
    template = codecache.CppPythonBindingsCodeCache.suffix_template
    monkeypatch.setattr(codecache.CppPythonBindingsCodeCache, "suffix_template", f"#define OTHER\n{template}")
    found = builds()
    (sine, _) = compiled(segments()[:2])
    assert sorted(found.files) == [("cos",), ("sin",)]
    assert sine.run([torch.zeros(64)])[0].eq(0).all()


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
    assert found.files == [("sin",), ("cos",)]
    assert found.in_main == ["sin", "cos"]


def test_each_segment_is_lowered_once_and_while_others_compile(
    builds: Callable[..., Builds], monkeypatch: pytest.MonkeyPatch
) -> None:
    lowered: list[str] = []
    all_lowered = threading.Event()
    found = builds(lambda names: all_lowered.wait(WAIT_S))  # no kernel is compiled before all segments are lowered

    def counted(lowering: GraphLowering) -> object:
        lowered.append(str(lowering))
        if len(lowered) == 5:
            all_lowered.set()
        return generate(lowering)

    generate = GraphLowering.codegen
    monkeypatch.setattr(GraphLowering, "codegen", counted)
    compiled(segments()[:5])
    assert len(lowered) == len(found.kernels) == 5


@pytest.mark.slow
def test_another_process_finds_what_was_compiled(builds: Callable[..., Builds]) -> None:
    found = builds()
    compiled(segments()[:2])
    codecache.CppPythonBindingsCodeCache.cache_clear()
    codecache.PyCodeCache.cache_clear()
    runs = compiled(segments()[:3])
    assert found.kernels == ["cos", "exp", "sin"]
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
    with without_waiting(WaitingKernels()) as modules:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert not modules
    assert torch.equal(found[0], torch.ones(64))


def test_a_compilers_failure_is_the_one_that_is_raised_without_it(builds: Callable[..., Builds]) -> None:
    def fail(names: tuple[str, ...]) -> None:
        if "cos" in names:
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

    def fail_ahead(names: tuple[str, ...]) -> None:
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
    found = builds(lambda names: may_go.wait(WAIT_S))

    def interrupt(what: str, done: int, of: int | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compiled(segments(), interrupt)
    may_go.set()
    AsyncCompile.pool().submit(int).result()
    assert not {"log", "neg"} & set(found.kernels)  # two files were under way at the interrupt, the third never begins
    runs = compiled(segments())
    assert found.kernels == ["abs", "ceil", "cos", "exp", "floor", "log", "neg", "sin", "sqrt", "tanh"]
    assert torch.equal(runs[-1].run([torch.zeros(64)])[0], torch.zeros(64))


def test_the_header_of_all_kernels_is_prepared_before_the_first(new_cache: None) -> None:
    before = codecache._precompile_header.cache_info().misses
    compile_segment(segments()[0], "inductor", 1)
    assert before > 0
    assert codecache._precompile_header.cache_info().misses == before
