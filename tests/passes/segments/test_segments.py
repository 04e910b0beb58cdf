"""Segments of a graph that was cut: equal ones are one, and the pieces make up the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from cut_cases import blocks_graph, mlp_graph, ops, run_pieces, trace
from torch import fx

from chunkc.passes.codegen import EagerSegment, describe_segment
from chunkc.passes.graphs.graphs import is_compute, op_name, placeholders, returned
from chunkc.passes.segments.cuts import cut
from chunkc.passes.segments.segments import SegmentTable, canonical_text, extract, recompute_pieces

aten = torch.ops.aten


def test_identical_blocks_are_one_segment() -> None:
    gm, args = mlp_graph(4)
    runs = cut(gm.graph, groups=dict(zip(placeholders(gm.graph)[1:], range(4))), gradient_groups={})
    table = SegmentTable()
    pieces = extract(gm, runs, table)
    assert len(pieces) == 4
    assert len(table.segments) == 1
    torch.testing.assert_close(run_pieces(gm, pieces, args)[0], gm(*args)[0], rtol=0, atol=0)


def slices(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor]:
    """As the backwards of blocks that read halves: each writes into the same zeros, which are made once."""
    zeros = torch.full((4, 16), 0.0)
    for weight in weights:
        wide = torch.slice_scatter(zeros, x, 1, 0, 8) + torch.slice_scatter(zeros, x, 1, 8, 16)
        x = torch.mm(wide, weight)
    return (x,)


def test_each_segment_makes_the_constants_that_it_reads() -> None:
    args = [torch.randn(4, 8), *(torch.randn(16, 8) for _ in range(3))]
    gm = trace(slices, *args)
    runs = cut(gm.graph, groups=dict(zip(placeholders(gm.graph)[1:], range(3))), gradient_groups={})
    table = SegmentTable()
    pieces = extract(gm, runs, table)
    assert [[n.op for n in piece.inputs] for piece in pieces[1:]] == [["call_function", "placeholder"]] * 2
    assert {piece.segment.name for piece in pieces} == {"segment0"}
    assert all(ops(piece.nodes).count("full") == 1 for piece in pieces)
    torch.testing.assert_close(run_pieces(gm, pieces, args)[0], gm(*args)[0], rtol=0, atol=0)


@torch.library.custom_op("chunkc_segments::add_to", mutates_args=("total",))
def add_to(total: torch.Tensor, x: torch.Tensor) -> None:
    total.add_(x)


@add_to.register_fake
def _(total: torch.Tensor, x: torch.Tensor) -> None:
    pass


def test_a_constant_that_is_changed_is_made_once() -> None:
    def function(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor]:
        sums = torch.full((4, 8), 0.0)
        for weight in weights:
            x = torch.mm(x + sums, weight)
            torch.ops.chunkc_segments.add_to(sums, x)
        return (x,)

    args = [torch.randn(4, 8), *(torch.randn(8, 8) for _ in range(3))]
    gm = trace(function, *args)
    groups = dict(zip(placeholders(gm.graph)[1:], range(3)))
    pieces = extract(gm, cut(gm.graph, groups=groups, gradient_groups={}), SegmentTable())
    assert sum(ops(piece.nodes).count("full") for piece in pieces) == 1


@pytest.mark.parametrize("kept", ["a view of it", "returned"])
def test_a_constant_that_others_see_is_made_once(kept: str) -> None:
    def function(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ones = torch.full((8,), 1.0)
        for weight in weights:
            x = torch.mm(x + (ones.expand(4, 8) if kept == "a view of it" else ones), weight)
        return (x, ones) if kept == "returned" else (x,)

    args = [torch.randn(4, 8), *(torch.randn(8, 8) for _ in range(2))]
    gm = trace(function, *args)
    pieces = extract(
        gm, cut(gm.graph, groups=dict(zip(placeholders(gm.graph)[1:], range(2))), gradient_groups={}), SegmentTable()
    )
    assert [ops(piece.nodes).count("full") for piece in pieces] == [1, 0]
    for found, expected in zip(run_pieces(gm, pieces, args), gm(*args), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_blocks_of_other_sizes_or_dtypes_are_segments_of_their_own() -> None:
    table = SegmentTable()
    found = set()
    for width, dtype in ((8, torch.float32), (16, torch.float32), (8, torch.float64)):
        gm = trace(lambda x: (torch.relu(x) + 1,), torch.ones(2, width, dtype=dtype))
        (piece,) = extract(gm, cut(gm.graph, groups={}, gradient_groups={}), table)
        found.add(piece.segment.name)
    assert len(found) == 3


def test_for_the_backward_a_block_is_made_without_its_last_product() -> None:
    gm, args = blocks_graph(3)
    groups = {node: place // 3 for place, node in enumerate(placeholders(gm.graph)[1:])}
    table = SegmentTable()
    pieces = extract(gm, cut(gm.graph, groups=groups, gradient_groups={}), table)
    saved = [node for node in returned(gm.graph)[1:] if node is not None]
    found = recompute_pieces(gm, pieces, saved, table)
    assert sorted(found) == [0, 1, 2]
    values = dict(zip(placeholders(gm.graph), args))
    for index, piece in enumerate(pieces):
        values.update(zip(piece.outputs, EagerSegment(piece.segment.module)([values[n] for n in piece.inputs])))
        if index in found:
            part = found[index]
            assert ops(part.nodes).count("mm") == 1
            assert len(part.inputs) == len(piece.inputs) - 1
            assert set(part.outputs) == {node for node in piece.outputs if op_name(node) != "aten.add"}
            for node, value in zip(part.outputs, EagerSegment(part.segment.module)([values[n] for n in part.inputs])):
                torch.testing.assert_close(value, values[node], rtol=0, atol=0)


def test_a_view_of_what_is_passed_on_is_not_made_alone() -> None:
    def function(x: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = torch.mm(x, v)
        return torch.mm(hidden, w), hidden.t()

    gm = trace(function, *(torch.randn(4, 4) for _ in range(3)))
    _, v, w = placeholders(gm.graph)
    table = SegmentTable()
    pieces = extract(gm, cut(gm.graph, groups={v: 0, w: 1}, gradient_groups={}), table)
    (saved,) = [node for node in returned(gm.graph)[1:] if node is not None]
    assert recompute_pieces(gm, pieces, [saved], table) == {}


def test_canonical_text_forgets_names_only() -> None:
    one = trace(lambda x, y: (x + y * 2,), torch.ones(3), torch.ones(3)).graph
    same = trace(lambda first, second: (first + second * 2,), torch.ones(3), torch.ones(3)).graph
    assert canonical_text(one) == canonical_text(same)


@pytest.mark.parametrize(
    "other",
    [
        lambda x, y: (x + y * 3,),
        lambda x, y: (y + x * 2,),
        lambda x, y: (x - y * 2,),
        lambda x, y: (x + y * 2, y),
        lambda x, y: (x.add(y * 2, alpha=2),),
    ],
)
def test_canonical_text_tells_other_code_apart(other) -> None:
    one = trace(lambda x, y: (x + y * 2,), torch.ones(3), torch.ones(3)).graph
    assert canonical_text(one) != canonical_text(trace(other, torch.ones(3), torch.ones(3)).graph)


def rows_of(num_rows: int) -> torch.Tensor:
    """Eight rows in the storage of more."""
    return torch.ones(num_rows, 8)[:8]


COMPLEX = torch.ones(8, 8, dtype=torch.complex64)


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (lambda x, y: (torch.slice_scatter(x, y[:2], 0, 0, 2),), (rows_of(8), rows_of(64))),
        (lambda x, y: (torch.mm(x, y),), (COMPLEX.clone(), COMPLEX.clone().conj())),
    ],
    ids=["bytes of a storage", "conjugated"],
)
def test_segments_of_other_bytes_share_no_prediction(function: Any, inputs: Sequence[torch.Tensor]) -> None:
    def peaks_nbytes(tables: Sequence[SegmentTable]) -> list[int]:
        found = []
        for x, table in zip(inputs, tables, strict=True):
            gm = trace(function, x, torch.ones_like(x))
            (piece,) = extract(gm, cut(gm.graph, groups={}, gradient_groups={}), table)
            found.append(max(step.nbytes for step in describe_segment(piece.segment, "eager", 2).steps))
        return found

    alone = peaks_nbytes([SegmentTable() for _ in inputs])
    assert len(set(alone)) == len(inputs)
    assert peaks_nbytes([SegmentTable()] * len(inputs)) == alone


def test_canonical_text_tells_negated_inputs_apart() -> None:
    negated = COMPLEX.conj().imag
    inputs = negated, torch._neg_view(negated)
    texts = {canonical_text(trace(lambda x: (x + 1,), x).graph) for x in inputs}
    assert [x.is_neg() for x in inputs] == [True, False]
    assert len(texts) == 2


def test_canonical_text_tells_strides_and_offsets_apart() -> None:
    texts = {
        canonical_text(trace(lambda x: (x + 1,), x).graph)
        for x in (torch.ones(4, 4), torch.ones(4, 4).t(), torch.ones(5, 4)[1:], torch.ones(4, 8)[:, ::2])
    }
    assert len(texts) == 4


def test_segments_with_constants_of_their_own_are_not_shared() -> None:
    def graph(value: float) -> fx.GraphModule:
        root = torch.nn.Module()
        root.register_buffer("constant", torch.full((2,), value))
        graph = fx.Graph()
        x, constant = graph.placeholder("x"), graph.get_attr("constant")
        add = graph.call_function(aten.add.Tensor, (x, constant))
        for node in (x, constant, add):
            node.meta["val"] = torch.empty(2)
        graph.output((add,))
        return fx.GraphModule(root, graph)

    table = SegmentTable()
    results = []
    for value in (1.0, 5.0):
        gm = graph(value)
        pieces = extract(gm, cut(gm.graph, groups={}, gradient_groups={}), table)
        results.append(run_pieces(gm, pieces, [torch.zeros(2)])[0])
    assert len(table.segments) == 2
    assert [float(result[0]) for result in results] == [1.0, 5.0]


def test_a_run_whose_results_nobody_reads_is_no_piece() -> None:
    gm = trace(lambda x: (x + 1,), torch.ones(2))
    with gm.graph.inserting_before(next(iter(reversed(gm.graph.nodes)))):
        dead = gm.graph.call_function(aten.neg.default, (placeholders(gm.graph)[0],))
    dead.meta["val"] = torch.ones(2)
    live = [node for node in gm.graph.nodes if is_compute(node) and node is not dead]
    pieces = extract(gm, [live, [dead]], SegmentTable())
    assert len(pieces) == 1
