"""Regions that the user marked to be compiled once (`torch.compiler.nested_compile_region`), written out.

    %x = invoke_subgraph(%region, "name", %a, %b)  ->  the region's operations, on %a and %b

Segments that are equal are compiled once anyway, and operations of a region may then be cut like all others.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from chunkc.passes.graphs.graphs import placeholders


def write_out_regions(gm: fx.GraphModule) -> None:
    """Put each region's operations in place of its calls, in the graph itself and in those that it calls."""
    for inner in gm.children():
        if isinstance(inner, fx.GraphModule):
            write_out_regions(inner)
    calls = gm.graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph)
    if calls:
        for call in calls:
            _write_out(gm, call)
        gm.recompile()


def _write_out(gm: fx.GraphModule, call: fx.Node) -> None:
    given: list[Any] = list(call.args)
    region, _, *operands = given
    inner = gm.get_submodule(region.target)
    assert isinstance(inner, fx.GraphModule)
    values: dict[fx.Node, Any] = dict(zip(placeholders(inner.graph), operands, strict=True))
    with gm.graph.inserting_before(call):
        for node in inner.graph.find_nodes(op="get_attr"):
            name = f"{region.target}_{node.target}".replace(".", "_")
            setattr(gm, name, operator.attrgetter(node.target)(inner))
            values[node] = gm.graph.get_attr(name)
            values[node].meta.update(node.meta)
        results: Any = gm.graph.graph_copy(inner.graph, values)
    for item in list(call.users):
        assert item.target is operator.getitem
        position: Any = item.args[1]
        item.replace_all_uses_with(results[position])
        gm.graph.erase_node(item)
    gm.graph.erase_node(call)
    if not region.users:
        gm.graph.erase_node(region)
