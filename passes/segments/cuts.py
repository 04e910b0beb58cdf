"""Cut a phase's graph into runs of operations, and prepare the graph for it.

A cut falls before an operation that needs a chunk the run so far does not have, and in a forward as far before it as
fewer bytes are passed on there: in front of a block, where Inductor fuses least. So cuts depend on the graph and on the
chunk layout alone, never on a budget. Each tile of a loss (see `loss_tiles`) begins a run, too: in one run with other
tiles, Inductor may compute the logits of them all first.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

import torch
from torch import fx

from chunkc.passes.graphs.collectives import is_collective, is_wait_for
from chunkc.passes.graphs.cost import is_product
from chunkc.passes.graphs.graphs import (
    CLONES_OF_WHOLE_STORAGES,
    copy_of,
    is_compute,
    is_constant,
    is_getitem,
    is_view_of,
    output_node,
    placeholders,
    storage_keys,
    tensors_of,
    tile_of,
    value_of,
)
from chunkc.passes.graphs.symbols import hint
from chunkc.passes.planning.recompute import is_repeatable
from chunkc.torch_private.aot import LazyGraphModule

RUN_BY_ATEN = frozenset({torch.ops.aten.embedding_dense_backward.default})
"""Operators that Inductor never sees: each is a segment of its own. Inductor turns an embedding's backward into atomic
additions, in an order, and so with a rounding, that varies from run to run; ATen's kernel always adds in one order."""

_OF_CHANGING = "copy_of_changing"
"""Mark of the copies that `with_copies_of_changing` makes: they are a segment of their own, which is not repeated."""


def runs_by_aten(node: fx.Node) -> bool:
    """Whether a node is a segment of its own, which ATen runs under every code generator."""
    return node.target in RUN_BY_ATEN or is_collective(node)


def clone_parameter_views(graph: fx.Graph, parameters: Sequence[fx.Node]) -> None:
    """Give every reader of a parameter's view its own copy of the view, right before it.

    Then no view of a slot ever crosses a cut. Views that the graph returns stay where they are: they are read from the
    parameter's home.
    """
    for parameter in parameters:
        keys = set(storage_keys(parameter))
        order, frontier = [], [parameter]
        while frontier:
            for user in list(frontier.pop().users):
                if user not in order and is_view_of(user, keys):
                    order.append(user)
                    frontier.append(user)
        for view in order:
            for user in [u for u in view.users if u not in order and u.op != "output"]:
                user.replace_input_with(view, _clone_chain(graph, view, order, user))
        for view in reversed(order):
            if not view.users:
                graph.erase_node(view)


def _clone_chain(graph: fx.Graph, view: fx.Node, views: Sequence[fx.Node], before: fx.Node) -> fx.Node:
    """Copy `view`, and those of `views` that it is made from; the parameter and sizes are read as they are."""
    copies: dict[fx.Node, fx.Node] = {}

    def copy(node: fx.Node) -> fx.Node:
        if node not in views:
            return node
        if node not in copies:
            sources = {source: copy(source) for source in node.all_input_nodes}
            with graph.inserting_before(before):
                copies[node] = graph.node_copy(node, lambda n: sources[n])
        return copies[node]

    return copy(view)


def copy_parameters_for_scatters(graph: fx.Graph, parameters: Sequence[fx.Node]) -> None:
    """Copy parameters for operators that copy their operand's whole storage, which for a parameter is a slot.

    Of views, the parameter itself is copied, so that the operator's result has the strides that were traced.
    """
    keys = {key for parameter in parameters for key in storage_keys(parameter)}
    for node in list(graph.nodes):
        if node.target not in CLONES_OF_WHOLE_STORAGES:
            continue
        views, source = [], node.args[0]
        while is_view_of(source, keys):
            views.append(source)
            source = source.args[0]
        if source not in parameters:
            continue
        with graph.inserting_before(node):
            copy = graph.call_function(torch.ops.aten.clone.default, (source,))
            copy.meta = node.meta | {"val": torch.empty_like(value_of(source))}
            for view in reversed(views):
                known = {value: value for value in view.all_input_nodes} | {view.args[0]: copy}
                copy = graph.node_copy(view, known.__getitem__)
                copy.meta["val"] = view.target(*fx.map_arg(copy.args, value_of), **fx.map_arg(copy.kwargs, value_of))
        node.update_arg(0, copy)


def with_copies_of_changing(module: fx.GraphModule, places: Sequence[int]) -> fx.GraphModule:
    """Let operations read copies of inputs that the graph itself changes; all copies are made first.

    Then the readers of such an input, such as a batch norm of its running mean, may be repeated in the backward: they
    read the same values.
    """
    graph = copy_of(module.graph)
    inputs = placeholders(graph)
    read = [node for node in map(inputs.__getitem__, places) if any(map(is_compute, node.users))]
    with graph.inserting_after(inputs[-1]):
        for node in reversed(read):
            copy = graph.call_function(torch.ops.aten.clone.default, (node,))
            copy.meta |= {"val": torch.empty_like(node.meta["val"]), _OF_CHANGING: True}
            for user in [user for user in node.users if user is not copy and is_compute(user)]:
                user.replace_input_with(node, copy)
    return LazyGraphModule(module, graph)


def with_dropouts_from_masks(module: fx.GraphModule) -> fx.GraphModule:
    """Let readers of a dropout's result read a product with its mask: the same bits, and only the mask is drawn.

    On the CPU alone, where ATen's `native_dropout` multiplies with the mask in the input's dtype, divided by the kept
    fraction. On CUDA, where it is one kernel, the result itself is drawn.
    """
    graph = copy_of(module.graph)
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.native_dropout.default):
        source, p, train = node.args
        is_some = train and isinstance(p, float) and 0 < p < 1
        parts = {part.args[1]: part for part in node.users if is_getitem(part)}
        value = source.meta["val"]
        if not (is_some and 0 in parts and value.device.type == "cpu"):
            continue
        result, mask = parts[0], parts.get(1)
        with graph.inserting_before(result):
            if mask is None:
                mask = graph.call_function(operator.getitem, (node, 1))
                mask.meta["val"] = node.meta["val"][1]
            result.prepend(mask)
            scale = graph.call_function(torch.ops.aten._to_copy.default, (mask,), {"dtype": value.dtype})
            noise = graph.call_function(torch.ops.aten.div.Tensor, (scale, 1 - p))
        for product in (scale, noise, result):
            product.meta = result.meta | {"val": torch.empty_like(value)}
        result.target = torch.ops.aten.mul.Tensor  # its name is kept, since the backward may refer to it
        result.args = (source, noise)
    return LazyGraphModule(module, graph)


def materialise_returned_placeholders(graph: fx.Graph, positions: Sequence[int]) -> None:
    """Make outputs at `positions` (gradients) nodes of their own if they are bare placeholders."""
    output = output_node(graph)
    (results,) = output.args
    assert isinstance(results, tuple | list)
    values = list(results)
    for position in positions:
        value = values[position]
        if isinstance(value, fx.Node) and value.op == "placeholder":
            with graph.inserting_before(output):
                copy = graph.call_function(torch.ops.aten.clone.default, (value,))
            copy.meta["val"] = torch.empty_like(value.meta["val"])
            values[position] = copy
    output.args = (tuple(values),)


def cut(
    graph: fx.Graph,
    *,
    groups: Mapping[fx.Node, int],
    gradient_groups: Mapping[fx.Node, int],
    unchunked: Sequence[fx.Node] = (),
    whole: bool = False,
    apart: bool = False,
) -> list[list[fx.Node]]:
    """Split the compute nodes of `graph` into runs, in order.

    Between the last operation that needs a run's chunks and the first that needs another, a forward is cut where the
    fewest bytes are passed on: before a block's norm, say, and not after it. A repeated block then reads its input, and
    no more. Operations that may not be repeated do not move to the next run: an embedding's dropout in a block's run
    would keep all of it.

    Args:
        groups: parameter placeholder -> index of its chunk group.
        gradient_groups: returned gradient -> index of its chunk group.
        unchunked: placeholders of parameters that have no chunk.
        whole: cut only around the operators that run by themselves.
        apart: of a forward, operations that may not be repeated run by themselves, so that all others may be.
    """
    returned_views = set(home_views(graph, [*groups, *unchunked]))
    nodes = [node for node in graph.nodes if is_compute(node) and node not in returned_views]
    sources: dict[fx.Node, set[int]] = {}
    for gradient, group in gradient_groups.items():
        sources.setdefault(_producer(gradient), set()).add(group)
    base = {key: group for node, group in groups.items() for key in storage_keys(node)}
    needs_of: dict[fx.Node, set[int]] = {}
    tiles: dict[fx.Node, object] = {}
    for node in reversed(nodes if not whole else []):
        read = {base[key] for source in node.all_input_nodes for key in storage_keys(source) if key in base}
        needs_of[node] = read | sources.get(node, set())
        tiles[node] = tile_of(node)
        if is_view_of(node, base.keys()):  # right before its one reader, and in one segment with it
            needs_of[node] |= {group for user in node.users for group in needs_of.get(user, ())}
            tiles[node] = next((tiles[user] for user in node.users if user in tiles), None)
    runs: list[list[fx.Node]] = [[]]
    of_chunks: set[int] = set()  # runs that begin because they need other chunks
    held: set[int] = set()
    alone = False
    tile: object = None
    for node in nodes:
        needs = needs_of.get(node, set())
        new_chunk = bool(held and needs and not needs <= held)
        by_itself = runs_by_aten(node) or (apart and not is_constant(node) and not is_repeatable(node))
        after_copies = (
            not whole and _OF_CHANGING not in node.meta and bool(runs[-1]) and _OF_CHANGING in runs[-1][-1].meta
        )
        of_tile = tiles.get(node)
        new_tile = of_tile is not None and of_tile != tile
        is_one_with = is_getitem(node) or is_wait_for(node, runs[-1][-1] if runs[-1] else None)
        if (new_chunk or by_itself or alone or new_tile or after_copies) and not is_one_with:
            if not (by_itself or alone or new_tile or after_copies):
                of_chunks.add(len(runs))
            runs.append([])
            held = set()
        alone, tile = by_itself or (alone and is_one_with), of_tile or tile
        held |= needs
        runs[-1].append(node)
    if not gradient_groups:
        stay = {node for node in nodes if needs_of.get(node) or is_product(node) or tiles.get(node) is not None}
        stay |= {node for node in nodes if not is_constant(node) and not is_repeatable(node)}
        runs = _ending_lean(runs, of_chunks, stay, base.keys())
    return _keep_getitems_with_producer([run for run in runs if run])


def _ending_lean(
    runs: Sequence[list[fx.Node]], of_chunks: Collection[int], stay: Collection[fx.Node], parameters: Collection[int]
) -> list[list[fx.Node]]:
    """Move the last operations of runs to the next run if fewer bytes are passed on before them.

    Args:
        of_chunks: the runs that may begin earlier.
        stay: operations that do not move.
        parameters: storages that do not count.
    """
    passed = _passed_nbytes([node for run in runs for node in run], parameters)
    moved, end = [list(run) for run in runs], 0
    for index, run in enumerate(runs):
        end += len(run)
        if index + 1 not in of_chunks:
            continue
        first = 1 + max((at for at, node in enumerate(run) if node in stay), default=-1)
        places = [at for at in range(max(first, 1), len(run)) if not is_getitem(run[at])]
        best = min(reversed(places), key=lambda at: passed[end - len(run) + at], default=len(run))
        if best < len(run) and passed[end - len(run) + best] < passed[end]:
            del moved[index][best - len(run) :]
            moved[index + 1] = [*run[best:], *moved[index + 1]]
    return moved


def _passed_nbytes(nodes: Sequence[fx.Node], parameters: Collection[int]) -> list[int]:
    """Return the bytes that are alive before each node, and after the last, without constants.

    They are computed before the node and read at or after it.
    """
    place = {node: at for at, node in enumerate(nodes)}
    computed: dict[int, tuple[int, int]] = {}  # storage -> (node, bytes)
    read: dict[int, int] = {}  # storage -> its last reader
    for at, node in enumerate(nodes):
        if is_constant(node):
            continue
        for key, tensor in zip(storage_keys(node), tensors_of(node), strict=True):
            if key not in parameters:
                computed.setdefault(key, (at, hint(tensor.untyped_storage().nbytes())))
                read[key] = max([read.get(key, -1), *(place[user] for user in node.users if user in place)])
    more = [0] * (len(nodes) + 2)
    for key, (at, nbytes) in computed.items():
        if read[key] > at:
            more[at + 1] += nbytes
            more[read[key] + 1] -= nbytes
    return list(accumulate(more[: len(nodes) + 1]))


def home_views(graph: fx.Graph, parameters: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the views of parameters that are left after `clone_parameter_views`: those that the graph returns."""
    keys = {key for parameter in parameters for key in storage_keys(parameter)}
    views: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if is_view_of(node, keys) and all(user.op == "output" or user in views for user in node.users):
            views.add(node)
    return [node for node in graph.nodes if node in views]


def _producer(gradient: fx.Node) -> fx.Node:
    """Return the node that computes a gradient, behind the views that shape it."""
    keys, node = set(storage_keys(gradient)), gradient
    while True:
        before = [s for s in node.all_input_nodes if s.op != "placeholder" and set(storage_keys(s)) & keys]
        if not before:
            return node
        node = before[0]


def _keep_getitems_with_producer(runs: list[list[fx.Node]]) -> list[list[fx.Node]]:
    run_of = {node: index for index, run in enumerate(runs) for node in run}
    for index, run in enumerate(runs):
        for node in list(run):
            if is_getitem(node):
                owner = run_of[node.all_input_nodes[0]]
                if owner != index:
                    run.remove(node)
                    runs[owner].append(node)
                    run_of[node] = owner
    return [run for run in runs if run]
