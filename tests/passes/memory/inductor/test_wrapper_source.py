"""Inductor's code generation alone: the same wrapper and the same bytes as its compiler's, and no compiler started."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import HUGE, compile_case
from torch._guards import detect_fake_mode
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.exc import InvalidCxxCompiler
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx
from zoo import CASES

from chunkc.explaining.explain import explain
from chunkc.ir.errors import UnsupportedError
from chunkc.ir.program import SegmentMemory
from chunkc.passes import codegen
from chunkc.passes.codegen import CompiledSegment, compile_segment, describe_segment, find_vector_isa
from chunkc.passes.graphs.graphs import placeholders
from chunkc.passes.memory.inductor.wrapper_source import wrapper_of
from chunkc.passes.segments.cuts import cut
from chunkc.passes.segments.segments import Segment, SegmentTable, canonical_text, extract
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


def softmax(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.softmax(x * 2, -1), x.sum(0)


def norm(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    variance, mean = torch.var_mean(x, -1, keepdim=True)
    return mean, (x - mean) * torch.rsqrt(variance + 1e-5) * w


def views(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    one = (x + w).view(-1)
    return one[:8], one.view(32, 32).t(), x.t()


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
    "softmax": (softmax, (64, 128)),
    "norm": (norm, (64, 128), (128,)),
    "views": (views, (32, 32), (32, 32)),
    "convolution": (convolution, (2, 3, 16, 16), (8, 3, 3, 3)),
    "image_as_rows": (image_as_rows, (2, 16, 32, 32), (16, 16, 3, 3)),
    "bias": (bias, (64, 32), (32, 2050), (2050,)),
    "chain": (chain, (1000,)),
}
SLOW, SECOND = pytest.mark.slow, pytest.mark.second_tier
MARKS = {"mlp": (), "norm": (), "convolution": SECOND, "bias": SECOND}
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


_ASKS_FOR_THE_COMPILER = {"softmax", "norm", "convolution", "image_as_rows"}


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
        pytest.param("byte_gpt", "never", marks=SLOW),
        pytest.param("byte_gpt", "auto", marks=SLOW),
        pytest.param("bert", "never", marks=SLOW),
        pytest.param("bert_dropout", "never", marks=SLOW),
        pytest.param("convnet", "never", marks=SLOW),
        pytest.param("convnet", "auto", marks=SLOW),
    ],
)
def test_explained_segments_are_those_of_training(name: str, whole_graph: str, monkeypatch) -> None:
    described, compiled = described_and_compiled(name, whole_graph, monkeypatch)
    assert compiled
    assert {text: described[text] for text in compiled} == compiled
    assert any(step.op.startswith("cpp_fused") for memory in compiled.values() for step in memory.steps)
