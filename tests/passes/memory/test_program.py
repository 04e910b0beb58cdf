"""Pieces of a cut graph as a program: values, storages, parameters and gradients. Its non-model bytes, counted on one's
fingers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from chunkc.ir.errors import UnsupportedError
from chunkc.ir.hardware import CPU, Hardware
from chunkc.ir.layout import Chunk, ParamSpec
from chunkc.ir.links import host_links
from chunkc.ir.program import MemoryStep, PhaseProgram, SegmentCall, SegmentMemory
from chunkc.passes.graphs.graphs import is_compute, placeholders
from chunkc.passes.memory.profile import positions
from chunkc.passes.memory.program import backward_program, forward_program
from chunkc.passes.memory.segment_memory import eager_memory
from chunkc.passes.segments.cuts import clone_parameter_views, cut, home_views
from chunkc.passes.segments.segments import SegmentTable, extract


def trace(function, *args: torch.Tensor) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*args)


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
        gm.graph,
        pieces,
        memories,
        parameters=parameters,
        num_user_outputs=num_user_outputs,
        hardware=hardware,
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


def call(name: str, segment: str, inputs: str, outputs: str, storages: str, **more) -> SegmentCall:
    fields = {"parameters": (), "gradients": (), "module": "", "cost_s": 1.0} | more
    return SegmentCall(name, segment, tuple(inputs.split()), tuple(outputs.split()), tuple(storages.split()), **fields)


def program(
    storages: Mapping[str, int], outputs: str, *calls: SegmentCall, inputs: str = "x", held: str = "X"
) -> PhaseProgram:
    """Each input lies in the storage of its letter."""
    by_input = {name: name.upper() for name in inputs.split()}
    returned = tuple(None if name == "-" else name for name in outputs.split())
    return PhaseProgram("forward", by_input, storages, frozenset(held.split()), {}, calls, returned, 1)


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
        call("0", "s", "x", "a", "A"),
        call("1", "t", "a", "b", "B"),
        call("2", "u", "b a", "c", "C"),
    )
    memories = chain_memories(1) | {"u": memory(40, released=(1, 1), storages=(40,))}
    assert nbytes(subject, memories) == [110, 130, 170]


def test_aliases_given_together_are_released_by_the_later_one() -> None:
    subject = program(
        {"X": 100, "A": 10, "C": 40},
        "c",
        call("0", "s", "x", "a b", "A A"),
        call("1", "t", "a b", "c", "C"),
    )
    memories = {
        "s": memory(10, released=(1,), outputs=(0, 0)),
        "t": memory(0, 7, 3, released=(1, 2), storages=(40,)),
    }
    assert nbytes(subject, memories)[1] == 100 + 10 + 7


def test_chunks_that_calls_read_and_write() -> None:
    used = {"parameters": ((0, "w"), (2, "bias")), "gradients": (("a", "v"), ("a", "bias"))}
    one_call = call("0", "s", "p x q", "a", "A", **used)
    subject = program({"P": 0, "Q": 0, "X": 1, "A": 10}, "-", one_call, inputs="p q x")
    (position,) = positions(subject, {"s": memory(10, released=(1, 1, 1))}, group_of={"w": 3, "v": 4})
    assert position.reads == {Chunk("param", 3)}
    assert position.writes == {Chunk("grad", 4)}
    assert position.phase == "forward"
    assert position.cost_s == 1.0


def test_the_module_is_the_steps_own_or_the_calls() -> None:
    steps = (MemoryStep("op", "h.0.mlp", 5), MemoryStep("op", "", 9))
    subject = program({"X": 1, "A": 10}, "a", call("0", "s", "x", "a", "A", module="h.0"))
    found = positions(subject, {"s": SegmentMemory(steps, (2,), (0,), (10,))}, group_of={})
    assert found[0].module == "h.0"
    found = positions(subject, {"s": SegmentMemory(steps[:1], (1,), (0,), (10,))}, group_of={})
    assert found[0].module == "h.0.mlp"
