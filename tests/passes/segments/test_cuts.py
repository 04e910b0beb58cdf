"""Cuts, on graphs traced from a few lines each: where they fall, and what is made of a graph before. Segments of what
was cut: equal ones are one, and the pieces make up the whole.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from chunkc.passes.codegen import EagerSegment, describe_segment
from chunkc.passes.graphs.graphs import (
    CLONES_OF_WHOLE_STORAGES,
    is_compute,
    op_name,
    placeholders,
    returned,
    storage_keys,
)
from chunkc.passes.segments.cuts import (
    clone_parameter_views,
    copy_parameters_for_scatters,
    cut,
    home_views,
    materialise_returned_placeholders,
    with_copies_of_changing,
    with_dropouts_from_masks,
)
from chunkc.passes.segments.segments import Piece, SegmentTable, canonical_text, extract, recompute_pieces

aten = torch.ops.aten


def trace(function, *args: torch.Tensor) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*args)


def ops(nodes: Sequence[fx.Node]) -> list[str]:
    return [op_name(node).removeprefix("aten.") for node in nodes]


def run_pieces(gm: fx.GraphModule, pieces: Sequence[Piece], args: Sequence[torch.Tensor]) -> list[object]:
    values: dict[fx.Node, object] = dict(zip(placeholders(gm.graph), args))
    for piece in pieces:
        results = EagerSegment(piece.segment.module)([values[node] for node in piece.inputs])
        values.update(zip(piece.outputs, results))
    return [values[node] for node in returned(gm.graph) if node is not None]


def mlp(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor]:
    for weight in weights:
        x = torch.relu(torch.mm(x, weight.t()))
    return (x,)


def mlp_graph(num_layers: int, width: int = 8) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    args = [torch.randn(4, width), *(torch.randn(width, width) for _ in range(num_layers))]
    gm = trace(mlp, *args)
    clone_parameter_views(gm.graph, placeholders(gm.graph)[1:])
    return gm, args


def blocks(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the last block's result, and what a backward would need."""
    saved = []
    for gain, up, down in zip(*[iter(weights)] * 3):
        scale = x.square().mean(-1, keepdim=True).rsqrt()
        hidden = torch.mm(x * scale * gain, up)
        wide = torch.relu(hidden)
        saved += [x, scale, hidden, wide]
        x = x + torch.mm(wide, down)
    return (x, *saved)


def blocks_graph(num_blocks: int) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    shapes = [(8,), (8, 32), (32, 8)] * num_blocks
    args = [torch.randn(4, 8), *(torch.randn(shape) for shape in shapes)]
    return trace(blocks, *args), args


LAYER = ["t", "mm", "relu"]


@pytest.mark.parametrize(
    ("groups", "whole", "lengths"),
    [
        ((0, 0, 1, 1), False, [2, 2]),  # before the first reader of a new chunk
        ((0, 1, 0), False, [1, 1, 1]),  # and before that of an earlier one again
        ((0, 0, 0, 0), False, [4]),
        ((0, 1, 2, 3), True, [4]),  # a whole graph
        ((0, None, None), False, [3]),  # parameters outside of chunks
    ],
)
def test_a_cut_falls_where_another_chunk_is_read(groups: Sequence[int | None], whole: bool, lengths: list[int]) -> None:
    gm, _ = mlp_graph(len(groups))
    by_node = {node: group for node, group in zip(placeholders(gm.graph)[1:], groups) if group is not None}
    runs = cut(gm.graph, groups=by_node, gradient_groups={}, whole=whole)
    assert [ops(run) for run in runs] == [LAYER * length for length in lengths]


def with_dropouts(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    first, mask = aten.native_dropout(torch.mm(x, w), 0.1, True)
    second, _ = aten.native_dropout(torch.relu(torch.mm(first, v)), 1 / 3, True)
    return second, first, mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_dropout_made_again_of_its_mask_has_the_same_bits(dtype: torch.dtype) -> None:
    args = [torch.randn(33, 33).to(dtype) for _ in range(3)]
    args[0][0] = -0.0
    gm = trace(with_dropouts, *args)
    again = with_dropouts_from_masks(gm)
    torch.manual_seed(0)
    expected = gm(*args)
    torch.manual_seed(0)
    found = again(*args)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    drawing = again.graph.find_nodes(op="call_function", target=aten.native_dropout.default)
    assert len(drawing) == 2
    assert all({user.args[1] for user in node.users} == {1} for node in drawing)
    assert [node.name for node in returned(again.graph)] == [node.name for node in returned(gm.graph)]
    gm = trace(lambda x: aten.native_dropout(x, 0.5, False)[:1], torch.randn(4))  # drops nothing
    assert [n.target for n in with_dropouts_from_masks(gm).graph.nodes] == [n.target for n in gm.graph.nodes]


def test_what_draws_is_apart_with_all_that_it_gives() -> None:
    gm = with_dropouts_from_masks(trace(with_dropouts, *(torch.randn(8, 8) for _ in range(3))))
    again = ["_to_copy", "div", "mul"]
    runs = [ops(run) for run in cut(gm.graph, groups={}, gradient_groups={}, apart=True)]
    drawn = ["native_dropout", "getitem"]
    assert runs == [["mm"], drawn, [*again, "mm", "relu"], drawn, again]
    assert len(cut(gm.graph, groups={}, gradient_groups={})) == 1


def test_an_operation_that_needs_two_chunks_gets_both() -> None:
    args = (torch.randn(4, 4), torch.randn(4, 4), torch.randn(4), torch.randn(4, 4))
    gm = trace(lambda x, w, b, v: (torch.mm(torch.addmm(b, x, w), v),), *args)
    _, w, b, v = placeholders(gm.graph)
    runs = cut(gm.graph, groups={w: 0, b: 1, v: 1}, gradient_groups={})
    assert [ops(run) for run in runs] == [["addmm", "mm"]]


def test_a_cut_falls_before_the_producer_of_a_gradient_of_a_new_chunk() -> None:
    args = (torch.randn(4, 4), torch.randn(4, 4), torch.randn(4, 4))
    gm = trace(lambda g, x, y: ((torch.mm(x.t(), g)).t(), torch.mm(y.t(), torch.relu(g))), *args)
    first, second = returned(gm.graph)
    runs = cut(gm.graph, groups={}, gradient_groups={first: 0, second: 1})
    assert [ops(run) for run in runs] == [["t", "mm", "t", "t", "relu"], ["mm"]]


def test_an_operator_run_by_aten_is_alone_even_in_a_whole_graph() -> None:
    def backward(g: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scaled = g * 2
        weight = aten.embedding_dense_backward.default(scaled, index, 10, -1, False)
        return weight + 1, torch.relu(g)

    gm = trace(backward, torch.randn(3, 4), torch.tensor([1, 2, 1]))
    table = SegmentTable()
    for whole in (False, True):
        runs = cut(gm.graph, groups={}, gradient_groups={}, whole=whole)
        assert [ops(run) for run in runs] == [["mul"], ["embedding_dense_backward"], ["add", "relu"]]
    pieces = extract(gm, runs, table)
    assert [piece.segment.run_by_aten for piece in pieces] == [False, True, False]


def test_results_of_one_operation_stay_with_it() -> None:
    def function(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        variance, mean = torch.var_mean(torch.mm(x, w), 0)
        return (torch.mm(mean.expand(4, 4), v), variance)

    gm = trace(function, *(torch.randn(4, 4) for _ in range(3)))
    _, w, v = placeholders(gm.graph)
    runs = cut(gm.graph, groups={w: 0, v: 1}, gradient_groups={})
    assert len(runs) == 2
    for run in runs:
        for node in run:
            if op_name(node) == "getitem":
                assert node.all_input_nodes[0] in run


def test_a_forward_is_cut_where_it_passes_on_the_fewest_bytes() -> None:
    """Before the norm, whose gain is the next block's, and not between norm and gain: there are two values."""
    gm, args = blocks_graph(3)
    groups = {node: place // 3 for place, node in enumerate(placeholders(gm.graph)[1:])}
    runs = cut(gm.graph, groups=groups, gradient_groups={})
    assert [ops(run)[0] for run in runs] == ["pow"] * 3
    assert [ops(run)[-1] for run in runs] == ["add"] * 3
    table = SegmentTable()
    pieces = extract(gm, runs, table)
    assert len(table.segments) == 1
    assert len(pieces[1].outputs) == 4
    for found, expected in zip(run_pieces(gm, pieces, args), gm(*args), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("seed", range(20))
def test_wherever_chunks_end_every_operation_is_in_one_run_in_order(seed: int) -> None:
    gm, args = blocks_graph(4)
    weights, rng = placeholders(gm.graph)[1:], random.Random(seed)
    ends = sorted(rng.sample(range(1, len(weights)), rng.randint(0, 5)))
    groups = {node: sum(end <= place for end in ends) for place, node in enumerate(weights)}
    runs = cut(gm.graph, groups=groups, gradient_groups={})
    assert [node for run in runs for node in run] == [node for node in gm.graph.nodes if is_compute(node)]
    assert len(runs) == len(ends) + 1
    for run in runs:
        assert len({groups[source] for node in run for source in node.all_input_nodes if source in groups}) == 1
    for found, expected in zip(run_pieces(gm, extract(gm, runs, SegmentTable()), args), gm(*args), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_views_of_parameters_never_cross_a_cut() -> None:
    args = (torch.randn(4, 4), torch.randn(16), torch.randn(4, 4))

    def function(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        view = w.view(4, 4).t()
        hidden = torch.mm(torch.mm(x, view), v)
        return (torch.mm(hidden, view),)

    gm = trace(function, *args)
    expected = gm(*args)[0]
    _, w, v = placeholders(gm.graph)
    clone_parameter_views(gm.graph, [w, v])
    gm.recompile()
    keys = set(storage_keys(w))
    pieces = extract(gm, cut(gm.graph, groups={w: 0, v: 1}, gradient_groups={}), SegmentTable())
    assert len(pieces) == 3
    for piece in pieces:
        for node in (*piece.outputs, *(i for i in piece.inputs if i is not w)):
            assert not set(storage_keys(node)) & keys, f"{node} is a view of a parameter"
    torch.testing.assert_close(run_pieces(gm, pieces, args)[0], expected, rtol=0, atol=0)


def test_scatters_read_copies_of_parameters_whose_storage_is_a_slot() -> None:
    args = (torch.randn(3), torch.randn(16))

    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        view = w.view(4, 4)[1:, 1:]
        return torch.diagonal_scatter(view, x).contiguous(), torch.select_scatter(w, x[0], 0, 2), w.view(4, 4)[0]

    gm = trace(function, *args)
    expected = gm(*args)
    w = placeholders(gm.graph)[1]
    keys = set(storage_keys(w))
    assert sum(node.target in CLONES_OF_WHOLE_STORAGES for node in gm.graph.nodes) == 2
    copy_parameters_for_scatters(gm.graph, [w])
    gm.recompile()
    for node in gm.graph.nodes:
        assert node.target not in CLONES_OF_WHOLE_STORAGES or not set(storage_keys(node.args[0])) & keys
    for found, value in zip(gm(*args), expected, strict=True):
        assert found.stride() == value.stride()
        torch.testing.assert_close(found, value, rtol=0, atol=0)


@pytest.mark.parametrize("whole", [False, True])
def test_inputs_that_change_are_read_from_copies_made_first_in_a_segment_of_their_own(whole: bool) -> None:
    args = (torch.randn(4, 4), torch.randn(4), torch.randn(4), torch.randn(4))

    def function(x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor, idle: torch.Tensor) -> tuple[object, ...]:
        y = (x - mean) / variance.view(1, 4)
        return mean + 1, variance.view(4) + y.sum(), idle, y

    gm = trace(function, *args)
    expected = gm(*args)
    gm = with_copies_of_changing(gm, [1, 2, 3])
    _, mean, variance, idle = placeholders(gm.graph)
    assert returned(gm.graph)[2] is idle
    assert {op_name(user) for user in (*mean.users, *variance.users)} == {"aten.clone"}
    runs = cut(gm.graph, groups={}, gradient_groups={}, whole=whole)
    assert len(runs) == (1 if whole else 2)
    assert ops(runs[0])[:3] == (["clone", "clone", "sub"] if whole else ["clone", "clone"])
    pieces = extract(gm, runs, SegmentTable())
    for found, value in zip(run_pieces(gm, pieces, args), expected, strict=True):
        torch.testing.assert_close(found, value, rtol=0, atol=0)


def test_views_that_nobody_reads_go() -> None:
    gm = trace(lambda x, w: (x + w.view(4, 4).t()[0],), torch.ones(4), torch.ones(16))
    w = placeholders(gm.graph)[1]
    clone_parameter_views(gm.graph, [w])
    assert all(node.users for node in gm.graph.nodes if is_compute(node))
    torch.testing.assert_close(fx.GraphModule(gm, gm.graph)(torch.ones(4), torch.ones(16))[0], torch.full((4,), 2.0))


def test_views_that_the_graph_returns_are_home_views() -> None:
    args = (torch.randn(4, 4), torch.randn(16))

    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        view = w.view(4, 4)
        return torch.mm(x, view.t()), view.t()

    gm = trace(function, *args)
    w = placeholders(gm.graph)[1]
    clone_parameter_views(gm.graph, [w])
    views = home_views(gm.graph, [w])
    assert ops(views) == ["view", "t"]
    assert returned(gm.graph)[1] is views[-1]
    runs = cut(gm.graph, groups={w: 0}, gradient_groups={})
    assert not set(views) & {node for run in runs for node in run}
    table = SegmentTable()
    pieces = [*extract(gm, runs, table), *extract(gm, [views], table, reads_home=True)]
    assert [piece.reads_home for piece in pieces] == [False, True]
    product, view = run_pieces(gm, pieces, args)
    torch.testing.assert_close(product, args[0] @ args[1].view(4, 4).t())
    assert view.data_ptr() == args[1].data_ptr()
    gm, _ = mlp_graph(2)
    assert home_views(gm.graph, placeholders(gm.graph)[1:]) == []


def test_gradients_that_are_bare_inputs_become_results() -> None:
    gm = trace(lambda g, x: (g, x * g, g), torch.ones(3), torch.ones(3))
    materialise_returned_placeholders(gm.graph, [0])
    first, second, third = returned(gm.graph)
    assert op_name(first) == "aten.clone"
    assert op_name(second) == "aten.mul"
    assert third is placeholders(gm.graph)[0], "only what was asked for"
    assert not set(storage_keys(first)) & set(storage_keys(third))
    assert (first.meta["val"].shape, first.meta["val"].dtype) == (third.meta["val"].shape, third.meta["val"].dtype)
    gm.recompile()
    gradient = torch.arange(3.0)
    result = gm(gradient, torch.ones(3))
    torch.testing.assert_close(result[0], gradient)
    assert result[0].data_ptr() != gradient.data_ptr()
    gm = trace(lambda g: (g,), torch.ones(4, 3).t())
    materialise_returned_placeholders(gm.graph, [0])
    gm.recompile()
    (node,) = returned(gm.graph)
    assert gm(torch.ones(4, 3).t())[0].stride() == node.meta["val"].stride()


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


NEGATED = torch.ones(8, 8, dtype=torch.complex64).conj().imag
SQUARE = torch.ones(4, 4)


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (lambda x, y: (x + y * 3,), ()),
        (lambda x, y: (y + x * 2,), ()),
        (lambda x, y: (x - y * 2,), ()),
        (lambda x, y: (x + y * 2, y), ()),
        (lambda x, y: (x.add(y * 2, alpha=2),), ()),
        (lambda x, y: (x + y * 2,), (torch.ones(5), torch.ones(5))),
        (lambda x, y: (x + y * 2,), (torch.ones(3).double(), torch.ones(3).double())),
    ],
)
def test_canonical_text_forgets_names_and_tells_other_code_apart(
    function: Any, inputs: tuple[torch.Tensor, ...]
) -> None:
    def text(function: Any, *args: torch.Tensor) -> str:
        return canonical_text(trace(function, *(args or (torch.ones(3), torch.ones(3)))).graph)

    one = text(lambda x, y: (x + y * 2,))
    assert text(lambda first, second: (first + second * 2,)) == one
    assert text(function, *inputs) != one


@pytest.mark.parametrize(
    "inputs",
    [(NEGATED, torch._neg_view(NEGATED)), (SQUARE, SQUARE.t(), torch.ones(5, 4)[1:], torch.ones(4, 8)[:, ::2])],
    ids=["negated", "strides and offsets"],
)
def test_canonical_text_tells_inputs_apart(inputs: Sequence[torch.Tensor]) -> None:
    assert len({canonical_text(trace(lambda x: (x + 1,), x).graph) for x in inputs}) == len(inputs)


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
