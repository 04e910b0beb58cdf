"""Bytes of a segment on paper against the allocator's, when the segment really runs. Pieces of a cut graph as a
program: values, storages, parameters, gradients, and its non-model bytes, counted on one's fingers.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence

import pytest
import torch
from program_cases import phase_program, segment_call
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from chunkc.ir.errors import UnsupportedError
from chunkc.ir.hardware import CPU, Hardware
from chunkc.ir.layout import Chunk, ParamSpec
from chunkc.ir.links import host_links
from chunkc.ir.program import Estimate, MemoryStep, PhaseProgram, SegmentCall, SegmentMemory
from chunkc.passes.codegen import CompiledSegment, compile_segment
from chunkc.passes.graphs.graphs import is_compute, placeholders
from chunkc.passes.memory.inductor.memory import inductor_memory
from chunkc.passes.memory.inductor.wrapper_reader import UnreadableWrapper
from chunkc.passes.memory.profile import positions
from chunkc.passes.memory.program import backward_program, forward_program
from chunkc.passes.memory.segment_memory import bounded_memory, eager_memory
from chunkc.passes.memory.segment_storages import graph_storages
from chunkc.passes.segments.cuts import clone_parameter_views, cut, home_views
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


# ---------------------------------------------------------------- pieces of a cut graph as a program


def forward_of(
    gm: fx.GraphModule, parameters: Mapping[str, str], groups: Mapping[str, int], num_user_outputs: int = 1,
    hardware: Hardware = CPU, runs: Sequence[list[fx.Node]] | None = None,
) -> PhaseProgram:  # fmt: skip
    by_name = {node.name: node for node in placeholders(gm.graph)}
    nodes = {by_name[name]: group for name, group in groups.items()}
    clone_parameter_views(gm.graph, list(nodes))
    views = home_views(gm.graph, list(nodes))
    table = SegmentTable()
    pieces = extract(gm, runs or cut(gm.graph, groups=nodes, gradient_groups={}), table)
    pieces += extract(gm, [views], table, reads_home=True) if views else []
    memories = {s.name: eager_memory(s.module.graph, 1) for s in table.segments.values()}
    return forward_program(
        gm.graph, pieces, memories, parameters=parameters, num_user_outputs=num_user_outputs, hardware=hardware
    )


def two_layers(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    hidden = torch.relu(torch.mm(x, w))
    return torch.mm(hidden, v), hidden, hidden.view(-1), x


MATRICES = tuple(torch.ones(4, 4) for _ in range(3))
NAMES = {"w_1": "one.weight", "v_1": "two.weight"}


def test_a_forward_of_two_segments() -> None:
    program = forward_of(trace(two_layers, *MATRICES), NAMES, {"w_1": 0, "v_1": 1})
    assert program.phase == "forward"
    assert [call.name for call in program.calls] == ["forward.0", "forward.1"]
    first, second = program.calls
    assert first.parameters == ((1, "one.weight"),)
    assert second.parameters == ((program.calls[1].inputs.index("v_1"), "two.weight"),)
    assert program.inputs == {"x_1": "in:x_1", "w_1": "in:w_1", "v_1": "in:v_1"}
    assert program.storages["in:x_1"] == 64
    assert program.storages["in:w_1"] == 0, "chunks are counted as slots, not here"
    storage_of = program.value_storages
    logits, hidden, flat, x = (storage_of[value] for value in program.outputs if value is not None)
    assert hidden == flat == "forward.0:0"
    assert logits.startswith("forward.1:")
    assert x == "in:x_1"
    assert (program.storages[hidden], program.storages[logits]) == (64, 64)
    assert program.num_user_outputs == 1


def test_a_small_parameter_is_read_where_it_is() -> None:
    program = forward_of(trace(two_layers, *MATRICES), NAMES, {})
    (call,) = program.calls
    assert dict(call.parameters) == {1: "one.weight", 2: "two.weight"}
    assert program.parameters == NAMES


def test_a_call_is_called_after_its_module_unless_it_is_nearly_all_of_the_model() -> None:
    """Else all that a graph compiled whole makes would be said to be of one of its blocks."""

    def traced() -> fx.GraphModule:
        gm = trace(two_layers, *MATRICES)
        for block, node in enumerate(filter(is_compute, gm.graph.nodes)):
            node.meta["nn_module_stack"] = {"": (f"blocks.{block // 2}", object)}
        return gm

    whole = forward_of(traced(), {}, {})
    assert [call.module for call in whole.calls] == [""]
    cut_in_two = forward_of(traced(), NAMES, {"w_1": 0, "v_1": 1})
    assert [call.module for call in cut_in_two.calls] == ["blocks.0", "blocks.1"]


def test_arithmetic_costs_what_the_hardware_says() -> None:
    hardware = Hardware(flops_per_s=128.0, memory_bytes_per_s=64.0, links=host_links(1, 1))
    program = forward_of(trace(lambda x, w: (torch.mm(x, w),), *MATRICES[:2]), {}, {}, hardware=hardware)
    assert program.calls[0].cost_s == pytest.approx(2 * 4 * 4 * 4 / 128 + 64 / 64)


def test_a_view_of_a_parameter_that_crosses_a_cut_is_refused() -> None:
    gm = trace(lambda x, w: (torch.mm(x, w.t()),), *MATRICES[:2])
    nodes = [node for node in gm.graph.nodes if is_compute(node)]
    table = SegmentTable()
    pieces = extract(gm, [nodes[:1], nodes[1:]], table)
    memories = {s.name: eager_memory(s.module.graph, 1) for s in table.segments.values()}
    with pytest.raises(UnsupportedError, match=r"one\.weight.*outlives its chunk.*clone"):
        forward_program(gm.graph, pieces, memories, parameters=NAMES, num_user_outputs=1, hardware=CPU)


def test_a_returned_view_of_a_parameter_is_read_from_home() -> None:
    gm = trace(lambda x, w: (torch.mm(x, w), w.t()), *MATRICES[:2])
    program = forward_of(gm, NAMES, {"w_1": 0}, num_user_outputs=2)
    product, views = program.calls
    assert product.parameters == ((1, "one.weight"),)
    assert views.parameters == (), "it needs no chunk"
    assert views.output_storages == ("in:w_1",)


def test_an_output_lives_in_the_storage_of_its_own_input_though_other_uses_share_theirs() -> None:
    """One segment, used on two views of one tensor and then on two tensors."""

    def function(base: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, ...]:
        base, other, third = base + 1, other + 1, other + 2
        one, two = base.view(2, 2), base.view(2, 2)
        a, b = one + 3, two.view(-1)
        x, y = other + 3, third.view(-1)
        return a, b, x, y

    gm = trace(function, torch.ones(4), torch.ones(2, 2))
    nodes = [node for node in gm.graph.nodes if is_compute(node)]
    runs = [nodes[:5], nodes[5:7], nodes[7:]]
    program = forward_of(gm, {}, {}, num_user_outputs=4, runs=runs)
    storage_of = program.value_storages
    _, b, _, y = program.outputs
    assert storage_of[str(b)] == storage_of[program.calls[1].inputs[1]]
    assert storage_of[str(y)] == storage_of[program.calls[2].inputs[1]]


# --- backward ---


def backward_of(num_user_outputs: int = 1) -> tuple[PhaseProgram, PhaseProgram]:
    """loss-like output, then saved: the hidden layer, its flat view, and the input."""
    forward = forward_of(trace(two_layers, *MATRICES), NAMES, {"w_1": 0, "v_1": 1}, num_user_outputs)

    def function(hidden, flat, x, v, tangent):
        v_grad = torch.mm(hidden.t(), tangent)
        back = torch.mm(tangent, v.t()) * (flat.view(4, 4) > 0)
        return torch.mm(x.t(), back), v_grad, torch.mm(back, back), None

    gm = make_fx(function, tracing_mode="fake")(*MATRICES, torch.ones(4, 4), torch.ones(4, 4))
    # As after partitioning: saved values come first, in the order of the forward's outputs.
    saved = placeholders(gm.graph)
    parameters = {saved[3].name: "two.weight"}
    clone_parameter_views(gm.graph, [saved[3]])
    results = next(iter(reversed(gm.graph.nodes))).args[0]
    groups = {saved[3]: 1}
    table = SegmentTable()
    pieces = extract(gm, cut(gm.graph, groups=groups, gradient_groups={results[0]: 0, results[1]: 1}), table)
    memories = {s.name: eager_memory(s.module.graph, 1) for s in table.segments.values()}
    forward = PhaseProgram(
        forward.phase, forward.inputs, forward.storages, forward.held, forward.parameters, forward.calls,
        (*forward.outputs, "v_1"), forward.num_user_outputs,
    )  # fmt: skip
    backward = backward_program(
        gm.graph, pieces, memories, forward, parameters=parameters,
        gradients={0: "one.weight", 1: "two.weight", 3: "unused.weight"},
        specs={name: ParamSpec(name, (4, 4), (4, 1), torch.float32, True) for name in ("one.weight", "two.weight")},
        hardware=CPU,
    )  # fmt: skip
    return forward, backward


def test_saved_values_keep_their_storages_in_the_backward() -> None:
    forward, backward = backward_of()
    names = list(backward.inputs)
    assert [backward.inputs[name] for name in names[:3]] == ["forward.0:0", "forward.0:0", "in:x_1"]
    assert backward.storages["forward.0:0"] == 64
    assert "forward.0:0" not in backward.held, "the backward holds the only reference"
    assert backward.inputs[names[3]] == f"in:{names[3]}"
    assert backward.storages[backward.inputs[names[3]]] == 0
    assert len(set(backward.storages)) == len(backward.storages)
    assert forward.storages["in:x_1"] == backward.storages["in:x_1"] == 64


def test_gradients_are_sunk_and_not_returned() -> None:
    _, backward = backward_of()
    made = {parameter: value for call in backward.calls for value, parameter in call.gradients}
    assert made.keys() == {"one.weight", "two.weight"}
    assert all(value in call.outputs for call in backward.calls for value, _ in call.gradients)
    assert backward.outputs[0] is backward.outputs[1] is backward.outputs[3] is None
    assert backward.outputs[2] is not None
    assert backward.num_user_outputs == 4


def test_a_program_can_return_some_gradients_instead() -> None:
    _, backward = backward_of()
    assert backward.returning(frozenset()) is backward
    value = next(v for call in backward.calls for v, p in call.gradients if p == "one.weight")
    changed = backward.returning(frozenset({"one.weight"}))
    assert changed.outputs[:2] == (value, None)
    assert [p for call in changed.calls for _, p in call.gradients] == ["two.weight"]


def memory(*nbytes: int, released: tuple[int, ...] = (), outputs: tuple[int, ...] = (0,), storages=(10,)):
    return SegmentMemory(
        tuple(MemoryStep(f"op{i}", "", n) for i, n in enumerate(nbytes)), released, outputs, tuple(storages)
    )


def program(
    storages: Mapping[str, int], outputs: str, *calls: SegmentCall, inputs: str = "x", held: str = "X"
) -> PhaseProgram:
    """Each input lies in the storage of its letter."""
    returned = [None if name == "-" else name for name in outputs.split()]
    of_inputs = {name: name.upper() for name in inputs.split()}
    return phase_program("forward", of_inputs, storages, calls, returned, held=held.split())


def nbytes(subject: PhaseProgram, memories: Mapping[str, SegmentMemory]) -> list[int]:
    return [position.non_model_nbytes for position in positions(subject, memories, group_of={})]


def chain_memories(released: int) -> dict[str, SegmentMemory]:
    return {
        "s": memory(10, released=(1,), storages=(10,)),
        "t": memory(20, 20, released=(released,), storages=(20,)),
        "u": memory(40, released=(1,), storages=(40,)),
    }


def test_an_input_that_is_read_again_is_not_donated() -> None:
    subject = program(
        {"X": 100, "A": 10, "B": 20, "C": 40},
        "c",
        segment_call("0", "x", "a", "A", "s"),
        segment_call("1", "a", "b", "B", "t"),
        segment_call("2", "b a", "c", "C", "u"),
    )
    memories = chain_memories(1) | {"u": memory(40, released=(1, 1), storages=(40,))}
    assert nbytes(subject, memories) == [110, 130, 170]


def test_aliases_given_together_are_released_by_the_later_one() -> None:
    subject = program(
        {"X": 100, "A": 10, "C": 40},
        "c",
        segment_call("0", "x", "a b", "A A", "s"),
        segment_call("1", "a b", "c", "C", "t"),
    )
    memories = {"s": memory(10, released=(1,), outputs=(0, 0)), "t": memory(0, 7, 3, released=(1, 2), storages=(40,))}
    assert nbytes(subject, memories)[1] == 100 + 10 + 7


def test_chunks_that_calls_read_and_write() -> None:
    used = {"parameters": ((0, "w"), (2, "bias")), "gradients": (("a", "v"), ("a", "bias"))}
    one_call = segment_call("0", "p x q", "a", "A", "s", **used)
    subject = program({"P": 0, "Q": 0, "X": 1, "A": 10}, "-", one_call, inputs="p q x")
    (position,) = positions(subject, {"s": memory(10, released=(1, 1, 1))}, group_of={"w": 3, "v": 4})
    assert position.reads == {Chunk("param", 3)}
    assert position.writes == {Chunk("grad", 4)}
    assert position.phase == "forward"
    assert position.cost_s == 1.0


def test_the_module_is_the_steps_own_or_the_calls() -> None:
    steps = (MemoryStep("op", "h.0.mlp", 5), MemoryStep("op", "", 9))
    subject = program({"X": 1, "A": 10}, "a", segment_call("0", "x", "a", "A", "s", module="h.0"))
    found = positions(subject, {"s": SegmentMemory(steps, (2,), (0,), (10,))}, group_of={})
    assert found[0].module == "h.0"
    found = positions(subject, {"s": SegmentMemory(steps[:1], (1,), (0,), (10,))}, group_of={})
    assert found[0].module == "h.0.mlp"
