"""Regions that the user marked to be compiled once (`torch.compiler.nested_compile_region`), written out.

    %x = invoke_subgraph(%region, "name", %a, %b)  ->  the region's operations, on %a and %b

Segments that are equal are compiled once anyway, and operations of a region may then be cut like all others. Dynamo
traces a region at its first call. At later calls, which read other parameters, its operations are named after these.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from chunkc.passes.graphs.graphs import attribute_path, placeholders
from chunkc.torch_private.dynamo import source_name

_STACKS = ("nn_module_stack", "fwd_nn_module_stack")


def write_out_regions(gm: fx.GraphModule) -> None:
    """Put each region's operations in place of its calls, in the graph itself and in those that it calls."""
    for inner in gm.children():
        if isinstance(inner, fx.GraphModule):
            write_out_regions(inner)
    calls = gm.graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph)
    first: dict[str, list[str]] = {}
    if calls:
        for call in calls:
            paths = [_path_of(operand) for operand in call.args[2:]]
            traced = first.setdefault(_target_of(call), paths)
            _write_out(gm, call, renamed_modules(traced, paths))
        gm.recompile()


def renamed_modules(traced: Sequence[str], called: Sequence[str]) -> Mapping[str, str]:
    """Return the modules of a region as it was traced that are others in a later call -> those.

    Args:
        traced, called: attribute paths of the operands, aligned; empty for values. `blocks.0.up.weight` and
            `blocks.3.up.weight` tell that `blocks.0` is `blocks.3`.
    """
    found: dict[str, str] = {}
    for former, path in zip(traced, called, strict=True):
        before, after = former.split("."), path.split(".")
        while before and after and before[-1] == after[-1]:
            before.pop()
            after.pop()
        if before and after:
            found[".".join(before)] = ".".join(after)
    return found


def _target_of(call: fx.Node) -> str:
    (region, *_) = call.args
    assert isinstance(region, fx.Node)
    return str(region.target)


def _path_of(operand: object) -> str:
    is_input = isinstance(operand, fx.Node) and operand.op == "placeholder"
    return attribute_path(source_name(operand)) if is_input else ""  # type: ignore[arg-type]


def _rename(node: fx.Node, modules: Mapping[str, str]) -> None:
    """Name the modules that a node is called in as those of its call."""
    for key in _STACKS:
        stack = node.meta.get(key)
        if stack:
            node.meta[key] = {at: (_renamed(path, modules), *kind) for at, (path, *kind) in stack.items()}


def _renamed(path: str, modules: Mapping[str, str]) -> str:
    for former in sorted(modules, key=len, reverse=True):
        renamed, times = re.subn(rf"(?<![^.]){re.escape(former)}(?![^.])", modules[former], path, count=1)
        if times:
            return renamed
    return path


def _write_out(gm: fx.GraphModule, call: fx.Node, modules: Mapping[str, str]) -> None:
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
    for node in inner.graph.nodes if modules else ():
        if node in values and node.op not in ("placeholder", "get_attr"):
            _rename(values[node], modules)
    for item in list(call.users):
        assert item.target is operator.getitem
        position: Any = item.args[1]
        item.replace_all_uses_with(results[position])
        gm.graph.erase_node(item)
    gm.graph.erase_node(call)
    if not region.users:
        gm.graph.erase_node(region)
