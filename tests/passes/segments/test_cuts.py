"""Cuts, on graphs traced from a few lines each: where they fall, and what is made of a graph before."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from cut_cases import blocks_graph, mlp_graph, ops, run_pieces, trace
from torch import fx

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
from chunkc.passes.segments.segments import SegmentTable, extract

aten = torch.ops.aten


def cut_mlp(num_layers: int, groups: Sequence[int], *, whole: bool = False) -> tuple[list[list[str]], fx.GraphModule]:
    gm, _ = mlp_graph(num_layers)
    by_node = dict(zip(placeholders(gm.graph)[1:], groups))
    return [ops(run) for run in cut(gm.graph, groups=by_node, gradient_groups={}, whole=whole)], gm


def test_a_cut_falls_before_the_first_reader_of_a_new_chunk() -> None:
    runs, _ = cut_mlp(4, (0, 0, 1, 1))
    assert runs == [["t", "mm", "relu", "t", "mm", "relu"], ["t", "mm", "relu", "t", "mm", "relu"]]


def test_going_back_to_an_earlier_chunk_is_a_cut_too() -> None:
    runs, _ = cut_mlp(3, (0, 1, 0))
    assert runs == [["t", "mm", "relu"]] * 3


def test_nothing_is_cut_in_one_chunk_or_in_a_whole_graph() -> None:
    assert len(cut_mlp(4, (0, 0, 0, 0))[0]) == 1
    assert len(cut_mlp(4, (0, 1, 2, 3), whole=True)[0]) == 1


def test_parameters_outside_chunks_cut_nothing() -> None:
    gm, _ = mlp_graph(3)
    assert len(cut(gm.graph, groups={placeholders(gm.graph)[1]: 0}, gradient_groups={})) == 1


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


def test_a_dropout_that_drops_nothing_stays_as_it_is() -> None:
    gm = trace(lambda x: aten.native_dropout(x, 0.5, False)[:1], torch.randn(4))
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


def test_a_graph_without_returned_views_has_no_home_views() -> None:
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
    assert (first.meta["val"].shape, first.meta["val"].dtype) == (
        third.meta["val"].shape,
        third.meta["val"].dtype,
    )
    gm.recompile()
    gradient = torch.arange(3.0)
    result = gm(gradient, torch.ones(3))
    torch.testing.assert_close(result[0], gradient)
    assert result[0].data_ptr() != gradient.data_ptr()


def test_gradient_copies_have_the_strides_that_running_them_gives() -> None:
    gm = trace(lambda g: (g,), torch.ones(4, 3).t())
    materialise_returned_placeholders(gm.graph, [0])
    gm.recompile()
    (node,) = returned(gm.graph)
    assert gm(torch.ones(4, 3).t())[0].stride() == node.meta["val"].stride()
