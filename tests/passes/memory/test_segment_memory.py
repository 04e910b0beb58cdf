"""Bytes of a segment on paper against the allocator's, when the segment really runs."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from chunkc.ir.program import Estimate, MemoryStep, SegmentMemory
from chunkc.passes.codegen import CompiledSegment, compile_segment
from chunkc.passes.graphs.graphs import placeholders
from chunkc.passes.memory.inductor.memory import inductor_memory
from chunkc.passes.memory.inductor.wrapper_reader import UnreadableWrapper
from chunkc.passes.memory.segment_memory import bounded_memory, eager_memory
from chunkc.passes.memory.segment_storages import graph_storages
from chunkc.passes.segments.cuts import cut
from chunkc.passes.segments.segments import SegmentTable, extract
from chunkc.runtime.device import cpu_allocator

pytestmark = pytest.mark.usefixtures("metered")
aten = torch.ops.aten


def trace(function, *args: torch.Tensor) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*args)


def compiled(function, args: list[torch.Tensor], codegen: str = "eager") -> CompiledSegment:
    gm = trace(function, *args)
    (piece,) = extract(gm, cut(gm.graph, groups={}, gradient_groups={}), SegmentTable())
    order = [placeholders(gm.graph).index(node) for node in piece.inputs]
    args[:] = [args[index] for index in order]
    return compile_segment(piece.segment, codegen, torch.get_num_threads())


def predicted_peak_nbytes(memory: SegmentMemory, input_nbytes: list[int]) -> int:
    return max(
        step.nbytes + sum(n for n, until in zip(input_nbytes, memory.input_released) if index < until)
        for index, step in enumerate(memory.steps)
    )


def check_peak(segment: CompiledSegment, args: list[torch.Tensor]) -> tuple:
    """Donate the arguments to the segment: its peak, and what is left, are as predicted, to the byte."""
    memory = segment.memory
    input_nbytes = [t.untyped_storage().nbytes() for t in args]
    gc.collect()
    around = cpu_allocator.current_nbytes() - sum(input_nbytes)
    cpu_allocator.reset_peak()
    outputs = tuple(segment.run(args))
    measured, left = cpu_allocator.peak_nbytes() - around, cpu_allocator.current_nbytes() - around
    assert measured == predicted_peak_nbytes(memory, input_nbytes)
    fresh = sum(memory.storage_nbytes)
    assert left == fresh + sum(input_nbytes[-1 - n] for n in set(memory.outputs) if n < 0)
    assert len(outputs) == len(memory.outputs)
    return outputs


def mlp(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    hidden = torch.relu(torch.mm(x, w))
    return (torch.mm(hidden, v) + 1,)


def softmax(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (torch.softmax(x * 2, -1), x.sum(0))


def norm(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    variance, mean = torch.var_mean(x, -1, keepdim=True)
    return (mean, (x - mean) * torch.rsqrt(variance + 1e-5) * w)


def views(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    one = (x + w).view(-1)
    return one[:8], one.view(32, 32).t(), x.t()


def chain(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    for _ in range(5):
        x = torch.exp(-x)
    return (x,)


CASES = {
    "mlp": (mlp, [(32, 64), (64, 128), (128, 16)]),
    "softmax": (softmax, [(64, 128)]),
    "norm": (norm, [(64, 128), (128,)]),
    "views": (views, [(32, 32), (32, 32)]),
    "chain": (chain, [(1000,)]),
}


def arguments(name: str) -> list[torch.Tensor]:
    return [torch.randn(shape) for shape in CASES[name][1]]


@pytest.mark.parametrize("name", CASES)
def test_eager_bytes_are_those_of_the_allocator(name: str) -> None:
    args = arguments(name)
    expected = CASES[name][0](*args)
    outputs = check_peak(compiled(CASES[name][0], args), args)
    for output, reference in zip(outputs, expected):
        torch.testing.assert_close(output, reference)


def test_a_donated_input_goes_inside_the_segment() -> None:
    memory = compiled(chain, [torch.randn(1000)]).memory
    assert memory.input_released == (1,)
    assert [step.nbytes for step in memory.steps] == [4000, *[8000] * 9]
    assert [step.op for step in memory.steps[:2]] == ["aten.neg", "aten.exp"]
    assert memory.outputs == (0,)
    assert memory.storage_nbytes == (4000,)


def test_storages_follow_the_graph_not_the_fake_tensors() -> None:
    """Where equal nodes were merged, a view's fake tensor belongs to the node that is gone."""
    gm = trace(lambda x: (torch.exp(x + 1).sum() + torch.cos((x + 1).view(-1)).sum(),), torch.randn(32, 32))
    adds = [node for node in gm.graph.nodes if node.target is aten.add.Tensor][:2]
    adds[1].replace_all_uses_with(adds[0])
    gm.graph.erase_node(adds[1])
    storages = graph_storages(gm.graph)
    (view,) = [node for node in gm.graph.nodes if node.target is aten.view.default]
    assert storages.of[view] == storages.of[adds[0]]


def test_constants_are_not_allocated_by_the_segment() -> None:
    constant = torch.randn(1000)
    gm = make_fx(lambda x: (x * constant,), tracing_mode="fake", _allow_non_fake_inputs=True)(torch.randn(1000))
    (node,) = gm.graph.find_nodes(op="get_attr")
    node.meta.setdefault("val", constant)
    memory = eager_memory(gm.graph, 1)
    assert max(step.nbytes for step in memory.steps) == 4000


def test_what_an_unknown_operator_takes_is_said_to_be_a_guess() -> None:
    with torch.library._scoped_library("chunkc_segment_memory", "DEF") as library:
        library.define("unknown(Tensor x) -> Tensor")
        library.impl("unknown", torch.clone, "CompositeExplicitAutograd")
        gm = trace(lambda x: (torch.ops.chunkc_segment_memory.unknown(x),), torch.randn(8, 8))
        check_guess(gm)


def check_guess(gm: torch.fx.GraphModule) -> None:
    for node in gm.graph.nodes:
        node.meta["nn_module_stack"] = {"m": ("L['self']._modules['mix']", torch.nn.Module)}
    (step,) = eager_memory(gm.graph, 1).steps
    name = "chunkc_segment_memory::unknown"
    assert step == MemoryStep(name.replace("::", "."), "mix", 3 * 256, 0, Estimate(name, 2 * 256))


# --- Inductor ---


@pytest.fixture(scope="module")
def fused() -> tuple[list[torch.Tensor], CompiledSegment]:
    cpu_allocator.install()
    args = arguments("mlp")
    return args, compiled(mlp, args, "inductor")


def test_inductor_bytes_are_those_of_the_allocator(fused) -> None:
    shapes, segment = fused
    args = [torch.randn(t.shape) for t in shapes]
    expected = mlp(*args)
    segment.run([t.clone() for t in args])  # libraries set themselves up
    outputs = check_peak(segment, args)
    torch.testing.assert_close(outputs[0], expected[0], rtol=1e-4, atol=1e-4)


WRAPPER = """
cpp_fused_relu_0 = async_compile.cpp_pybinding(['float*'], 'code')

def call(args):
    arg0_1, arg1_1 = args
    args.clear()
    assert_size_stride(arg0_1, (8, 8), (8, 1))
    buf0 = empty_strided_cpu((8, 8), (8, 1), torch.float32)
    extern_kernels.mm(arg0_1, arg1_1, out=buf0)
    del arg1_1
    buf1 = buf0; del buf0  # reuse
    cpp_fused_relu_0(buf1)
    buf2 = empty_strided_cpu((8, 8), (8, 1), torch.float32)
    {line}
    return (buf2, reinterpret_tensor(buf2, (64, ), (1, ), 0), reinterpret_tensor(arg0_1, (8, 8), (1, 8), 0), )
"""


def replay(line: str = "del buf1", source: str = WRAPPER) -> SegmentMemory:
    with FakeTensorMode():
        inputs = [torch.empty(8, 8), torch.empty(8, 8)]
    return inductor_memory(source.format(line=line), inputs, 1)


def test_a_wrapper_is_replayed_line_by_line() -> None:
    memory = replay()
    ops = [step.op for step in memory.steps]
    assert "aten.mm" in ops
    assert "cpp_fused_relu_0" in ops
    assert max(step.nbytes for step in memory.steps) == 2 * 256
    assert memory.outputs == (0, 0, -1)
    assert memory.storage_nbytes == (256,)
    kept, given = memory.input_released
    assert kept == len(memory.steps), "it is returned"
    assert ops.index("aten.mm") < given < len(memory.steps)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("unknown_helper(buf1)", "unknown_helper"),
        ("buf3 = empty_strided_xpu((8, 8), (8, 1), torch.float32)", "empty_strided_xpu"),
        ("extern_kernels.no_such_operator(buf1)", "no_such_operator"),
        ("workspace_pool.take(buf1)", "workspace_pool"),
    ],
)
def test_what_is_not_known_is_not_read(line: str, name: str) -> None:
    with pytest.raises(UnreadableWrapper, match=name):
        replay(line)


def test_what_is_called_in_a_new_way_is_not_read() -> None:
    with pytest.raises(UnreadableWrapper, match=r"new way.*TypeError.*layout"):
        replay("buf3 = empty_strided_cpu((8, 8), (8, 1), torch.float32, layout=torch.strided)")


@pytest.mark.parametrize("line", ["assert_size_stride_grouped((buf1, buf1), ((8, 8), (8, 8)), ((8, 1), (8, 1)), 'x')"])
def test_what_only_looks_takes_nothing(line: str) -> None:
    assert replay(line) == replay()


def test_a_wrapper_without_a_call_is_not_read() -> None:
    for source in ("x = 1", ""):
        with pytest.raises(UnreadableWrapper, match="no function `call`"):
            inductor_memory(source, [], 1)


def test_the_bound_of_an_unread_wrapper_holds_all_values_at_once() -> None:
    """A chain of four: read off, one or two values are alive at a time."""
    args = [torch.randn(8, 8)]
    gm = trace(lambda x: (x.sin().mm(x).cos().mm(x),), *args)
    eager, bound = eager_memory(gm.graph, 1), bounded_memory(gm.graph, 1, "Inductor's code, which uses x")
    assert [step.op for step in bound.steps] == [step.op for step in eager.steps]
    assert {step.nbytes for step in bound.steps} == {4 * 256}
    assert max(step.nbytes for step in eager.steps) == 2 * 256
    assert all(step.estimate == Estimate("Inductor's code, which uses x", 4 * 256) for step in bound.steps)
    assert bound.input_released == (4,)
    assert (bound.outputs, bound.storage_nbytes) == (eager.outputs, eager.storage_nbytes)


def test_a_method_is_read_like_a_function() -> None:
    body = "\n".join("    " + line for line in WRAPPER.split("\n\n", 1)[1].splitlines())
    source = f"class Runner:\n{body}".replace("def call(args)", "def call(self, args)").replace("{line}", "del buf1")
    kernel = WRAPPER.split("\n\n", 1)[0]
    assert replay(source=f"{kernel}\n{source}") == replay()


def test_the_operator_run_by_aten_is_not_given_to_inductor() -> None:
    args = [torch.randn(32, 16), torch.randint(10, (32,))]
    segment = compiled(lambda g, i: (aten.embedding_dense_backward.default(g, i, 10, -1, False),), args, "inductor")
    assert [step.op for step in segment.memory.steps] == ["aten.embedding_dense_backward"]
    check_peak(segment, args)


def test_what_checkpointing_keeps_of_a_gpu_s_generator_is_on_the_cpu() -> None:
    """Its state, and the seeds of memory-efficient attention."""
    attention = torch.ops.aten._scaled_dot_product_efficient_attention.default
    for saves in (True, False):
        graph = fx.Graph()
        with FakeTensorMode():
            state = torch.empty(16, dtype=torch.uint8)
            query = torch.empty(2, 4, 32, 32, device="cuda")
            results = attention(query, query, query, None, True)
        given = graph.placeholder("query")
        given.meta["val"] = query
        arguments = (attention, given, given, given, None, True)
        if saves:
            node = graph.call_function(torch.ops.higher_order.run_and_save_rng_state, arguments)
            node.meta["val"] = state, results
        else:
            kept = graph.placeholder("state")
            kept.meta["val"] = state
            node = graph.call_function(torch.ops.higher_order.run_with_rng_state, (kept, *arguments))
            node.meta["val"] = results
        storages = graph_storages(graph)
        taken = [storages.nbytes[storage] for storage in storages.of[node]]
        assert taken == [*([0] if saves else []), query.nbytes, 4 * 2 * 4 * 32, 0, 0]
