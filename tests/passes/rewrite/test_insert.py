"""The rewritten graph of hand-made programs: which nodes, in which order, reading what. Where a backward says that
groups are settled at home: after the last copy of each, none too early.
"""

from __future__ import annotations

import operator
from dataclasses import replace

import pytest
import torch
from program_cases import phase_program, segment_call
from torch import fx, nn
from verify_cases import LAYOUT, MODULES, NUM_LAYERS, backward_program, case, plan_step

from chunkc.ir import chunk_ops
from chunkc.ir.layout import Chunk, ParamSpec
from chunkc.ir.plan import EVICT, PREFETCH, WAIT, WRITE_BACK, Event, PhasePlan, Tile
from chunkc.ir.program import PhaseProgram, SegmentCall
from chunkc.passes.planning.layout import lay_out
from chunkc.passes.rewrite.insert import complete_after, insert_events, insert_update_events

GROUPS = {"w": 0, "v": 1}


def events(*pairs: tuple[str, str]) -> tuple[Event, ...]:
    return tuple(Event(kind, chunk, 4) for kind, chunk in pairs)


def program(*calls: SegmentCall, outputs: tuple[str | None, ...] = (), **inputs: tuple[str, int]) -> PhaseProgram:
    of_inputs = {value: storage for value, (storage, _) in inputs.items()}
    storages = {s: 4 for c in calls for s in c.output_storages} | dict(inputs.values())
    return phase_program(
        "backward", of_inputs, storages, calls, outputs, held={"X"}, parameters={"w_in": "w", "v_in": "v"},
        num_user_outputs=len(outputs), fitting=frozenset(value for one in calls for value, _ in one.gradients),
    )  # fmt: skip


def rewritten(subject: PhaseProgram, *stops: tuple[Event, ...], resident: frozenset[int] = frozenset()) -> fx.Graph:
    stops = stops or ((),) * (len(subject.calls) + 1)
    plan = PhasePlan("backward", stops, ())
    gm = insert_events(subject, plan, {"segment0": nn.Identity()}, group_of=GROUPS, resident=resident)
    gm.graph.lint()
    return gm.graph


def lines(graph: fx.Graph) -> list[str]:
    """Chunk nodes and calls, in order."""
    found = []
    for node in graph.nodes:
        if node.op == "call_module":
            found.append(f"{node.meta['call']}({', '.join(map(str, node.args))})")
        elif node.op == "call_function" and node.target is not operator.getitem:
            found.append(f"{node.target.__name__}({', '.join(map(str, node.args))})")
    return found


ONE_CALL = program(
    segment_call("backward.0", "x w_in", "a", "backward.0:0", parameters=((1, "w"),)),
    outputs=("a",),
    x=("X", 8),
    w_in=("W", 0),
)


def test_events_come_before_their_call_and_after_the_last_one() -> None:
    before, after = events((PREFETCH, Chunk("param", 0)), (WAIT, Chunk("param", 0))), events((EVICT, Chunk("param", 0)))
    assert lines(rewritten(ONE_CALL, before, after)) == [
        "prefetch(param:0)",
        "wait(param:0)",
        "parameter(param:0, w)",
        "backward.0(x, parameter)",
        "evict(param:0)",
    ]


def test_a_view_is_made_anew_for_every_call() -> None:
    subject = program(
        segment_call("backward.0", "x w_in", "a", "A", parameters=((1, "w"),)),
        segment_call("backward.1", "a w_in", "b", "B", parameters=((1, "w"),)),
        outputs=("b",),
        x=("X", 8),
        w_in=("W", 0),
    )
    found = lines(rewritten(subject))
    assert found == [
        "parameter(param:0, w)",
        "backward.0(x, parameter)",
        "parameter(param:0, w)",
        "backward.1(getitem, parameter_1)",
    ]
    assert len(rewritten(subject).find_nodes(op="call_module", target="segment0")) == 2, "one segment, called twice"


def test_residents_and_small_parameters_are_read_where_they_are() -> None:
    assert lines(rewritten(ONE_CALL, resident=frozenset({0}))) == ["backward.0(x, w_in)"]
    small = program(
        segment_call("backward.0", "x w_in", "a", "A", parameters=((1, "bias"),)),
        outputs=("a",),
        x=("X", 8),
        w_in=("W", 0),
    )
    assert lines(rewritten(small)) == ["backward.0(x, w_in)"]


def test_what_placeholders_say_for_the_verifier() -> None:
    graph = rewritten(ONE_CALL)
    x, w = graph.find_nodes(op="placeholder")
    assert x.meta["storage"] == ("X", 8, True)
    assert w.meta["storage"] == ("W", 0, False)
    assert (x.meta["parameter"], w.meta["parameter"]) == (None, "w")


def sinks(graph: fx.Graph) -> list[tuple]:
    return [(n.args[0], n.args[1], n.args[3]) for n in graph.nodes if n.target is chunk_ops.sink]


def test_gradients_are_sunk_right_after_their_call() -> None:
    subject = program(
        segment_call("backward.0", "x", "g h", "backward.0:0 backward.0:1", gradients=(("g", "w"), ("h", "bias"))),
        segment_call("backward.1", "x", "k", "backward.1:0", gradients=(("k", "v"),)),
        outputs=(None, None, None),
        x=("X", 8),
    )
    graph = rewritten(subject)
    assert [line.partition("(")[0] for line in lines(graph)] == ["backward.0", "sink", "sink", "backward.1", "sink"]
    assert sinks(graph) == [("w", Chunk("grad", 0), True), ("bias", None, True), ("v", Chunk("grad", 1), True)]
    assert sinks(rewritten(subject, resident=frozenset({1})))[2] == ("v", None, True)


OF_W = (("g", "w"),)
NOT_OWN = {
    "in an input's storage": [segment_call("backward.0", "x", "g", "X", gradients=OF_W)],
    "of two parameters": [segment_call("backward.0", "x", "g", "backward.0:0", gradients=(*OF_W, ("g", "v")))],
    "beside an alias": [segment_call("backward.0", "x", "g h", "backward.0:0 backward.0:0", gradients=OF_W)],
    "that is returned too": [segment_call("backward.0", "x", "g", "backward.0:0", gradients=OF_W)],
    "of an earlier call": [
        segment_call("backward.0", "x", "a", "backward.0:0"),
        segment_call("backward.1", "a", "g", "backward.0:0", gradients=OF_W),
    ],
}


@pytest.mark.parametrize("name", NOT_OWN)
def test_a_gradient_is_not_its_sinks_own(name: str) -> None:
    outputs = ("g",) if name == "that is returned too" else (None,)
    found = sinks(rewritten(program(*NOT_OWN[name], outputs=outputs, x=("X", 8))))
    assert found
    assert not any(owned for _, _, owned in found)


def test_a_gradient_laid_out_otherwise_is_not_its_sinks_own() -> None:
    call = segment_call("backward.0", "x", "g", "backward.0:0", gradients=OF_W)
    subject = program(call, outputs=(None,), x=("X", 8))
    assert [owned for _, _, owned in sinks(rewritten(subject))] == [True]
    assert [owned for _, _, owned in sinks(rewritten(replace(subject, fitting=frozenset())))] == [False]


def test_outputs_keep_their_places() -> None:
    subject = program(segment_call("backward.0", "x", "a", "backward.0:0"), outputs=(None, "a", "x"), x=("X", 8))
    (values,) = next(iter(reversed(rewritten(subject).nodes))).args
    assert [str(value) for value in values] == ["None", "getitem", "x"]


def test_an_update_is_one_node_per_tile() -> None:
    tiles = [Tile(0, 0, 64), Tile(0, 64, 100), Tile(2, 0, 8)]
    chunk = Chunk("grad", 0, (0, 64))
    stops = (events((PREFETCH, chunk), (WAIT, chunk)), (), (), events((WRITE_BACK, chunk), (EVICT, chunk)))
    graph = insert_update_events(PhasePlan("update", stops, ()), tiles)
    assert lines(graph) == [
        f"prefetch({chunk})",
        f"wait({chunk})",
        "update(0, 0, 64)",
        "update(0, 64, 100)",
        "update(2, 0, 8)",
        f"write_back({chunk})",
        f"evict({chunk})",
    ]


def test_chunk_nodes_are_never_called() -> None:
    layout = lay_out([ParamSpec("w", (1024,), (1,), torch.float32, True)], 4096)
    assert layout.groups
    for target in chunk_ops.EVENT_TARGETS.values():
        with pytest.raises(AssertionError, match="never called"):
            target(*[Chunk("param", 0), "to_device", 512][: target.__code__.co_argcount])
    with pytest.raises(AssertionError, match="never called"):
        chunk_ops.update(0, 0, 1)


def test_every_group_is_settled_once_after_its_gradients_left() -> None:
    nodes = list(case("settling").graph.nodes)
    for group in range(NUM_LAYERS):
        (at,) = [i for i, n in enumerate(nodes) if n.target is chunk_ops.settle and n.args == (group,)]
        copies = [
            i
            for i, n in enumerate(nodes)
            if n.target in (chunk_ops.prefetch, chunk_ops.write_back) and n.args[0].group == group
        ]
        assert at == max(copies) + 1


def test_a_plan_that_nobody_listens_to_says_nothing() -> None:
    assert not case("backward").all("settle")


def test_the_last_fetch_counts_too() -> None:
    """Gradients gone home, the parameter fetched once more: settled only then."""
    stops = (
        (Event(WRITE_BACK, Chunk("grad", 2), 1), Event(EVICT, Chunk("grad", 2), 1)),
        (Event(PREFETCH, Chunk("param", 2), 1), Event(WAIT, Chunk("param", 2), 1)),
        (Event(EVICT, Chunk("param", 2), 1),),
    )
    assert complete_after(backward_program(), PhasePlan("backward", stops, ()), LAYOUT) == {(1, 0): 2}


def test_a_group_counts_only_with_all_its_gradients() -> None:
    program = backward_program().returning(frozenset({"h.1.w"}))
    plan = plan_step(None, 0).phases[1]
    graph = insert_events(
        program, plan, MODULES, group_of=LAYOUT.group_of(), resident=frozenset(), layout=LAYOUT
    )  # fmt: skip
    settled = {n.args[0] for n in graph.graph.nodes if n.target is chunk_ops.settle}
    assert settled == set(range(NUM_LAYERS)) - {1}


def test_a_group_that_stays_is_not_settled_when_its_cast_is_made() -> None:
    stops = ((Event(PREFETCH, Chunk("param_bf16", 2), 0), Event(WAIT, Chunk("param_bf16", 2), 0)), ())
    plan = PhasePlan("backward", stops, ())
    assert complete_after(backward_program(), plan, LAYOUT, resident=frozenset({2})) == {}
