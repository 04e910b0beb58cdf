"""Parameters of which only a cast is used, as under `torch.autocast`: calls read the cast, from a chunk in 16 bits.

Such a chunk takes half the room of the parameters' own, and half the way: the cast is made where they are, on the way
into the slot. So it is always of what home holds at that moment. The optimizer's step reads and writes the parameters
themselves.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from chunkc.ir.layout import CASTS, ChunkLayout
from chunkc.passes.graphs.graphs import placeholders, returned, storage_key, storage_keys
from chunkc.passes.segments.cuts import clone_parameter_views
from chunkc.torch_private.aot import LazyGraphModule

_TO_COPY = torch.ops.aten._to_copy.default
_CONVERT = torch.ops.prims.convert_element_type.default


def read_as_casts(graphs: Sequence[fx.Graph], by_placeholder: Mapping[str, str], layout: ChunkLayout) -> dict[str, str]:
    """Parameter -> the kind of chunk that a step is to read it from, for those that it reads as casts.

    A group is read so if all of its parameters that the graphs read are read by casts to one 16-bit dtype, and by
    nothing else: else both chunks would be there. What is cut over ranks is exchanged as it is.

    Args:
        graphs: the step's phases.
        by_placeholder: their placeholders that are parameters -> the parameters' names.
    """
    wanted: dict[str, set[str | None]] = {}
    for graph in graphs:
        leaving = {key for node in returned(graph) if node is not None for key in storage_keys(node)}
        for node in placeholders(graph):
            if node.name in by_placeholder:
                kinds = {_cast(node, user, leaving) for user in node.users if user.op != "output"}
                wanted.setdefault(by_placeholder[node.name], set()).update(kinds)
    found: dict[str, str] = {}
    for group in layout.groups:
        read = {s.spec.name: wanted[s.spec.name] for s in group.slices if wanted.get(s.spec.name)}
        kinds = set[str | None]().union(*read.values())
        kind = kinds.pop() if len(kinds) == 1 else None
        if kind is not None and not group.is_cut:
            found |= dict.fromkeys(read, kind)
    return found


def _cast(parameter: fx.Node, user: fx.Node, leaving: Set[int]) -> str | None:
    """Return the kind of chunk that can hold a node's result in place of the parameter: its cast to 16 bits.

    None if `user` does anything else, or its result is in one of the storages that leave the graph (`leaving`).
    """
    if user.target is _TO_COPY:
        is_plain = len(user.args) == 1 and set(user.kwargs) == {"dtype"}
    else:
        is_plain = user.target is _CONVERT and user.args[0] is parameter
    given, made = parameter.meta["val"], user.meta["val"]
    if not is_plain or not given.dtype.is_floating_point or given.dtype.itemsize < 4:
        return None
    if made.stride() != given.stride() or not leaving.isdisjoint(storage_keys(user)):
        return None
    return next((kind for kind, dtype in CASTS.items() if made.dtype == dtype), None)


def with_casts_given(gm: fx.GraphModule, parameters: Iterable[str]) -> fx.GraphModule:
    """Return a copy of a phase that is given, for placeholders of these names, the casts that it makes of them."""
    given = set(parameters)
    graph = copy.deepcopy(gm.graph)
    for node in placeholders(graph):
        casts = [user for user in node.users if user.op != "output"] if node.name in given else []
        for cast in casts:
            node.meta["val"] = casts[0].meta["val"]
            cast.replace_all_uses_with(node)
            graph.erase_node(cast)
        if casts:
            _trace_views(node)
    clone_parameter_views(graph, [node for node in placeholders(graph) if node.name in given])
    return LazyGraphModule(gm, graph)


def _trace_views(given: fx.Node) -> None:
    """Trace a placeholder's views again: they may have been traced as views of a cast that was made a second time."""
    views, keys = [given], set(storage_keys(given))
    for view in views:
        for user in view.users:
            is_operator = isinstance(user.target, torch._ops.OpOverload) or user.target is operator.getitem
            if is_operator and user not in views:
                target: Any = user.target
                args, kwargs = fx.map_arg((user.args, user.kwargs), lambda n: n.meta["val"])
                with torch.no_grad():
                    made = target(*args, **kwargs)
                tensors = [leaf for leaf in pytree.tree_leaves(made) if isinstance(leaf, torch.Tensor)]
                if not keys.isdisjoint(map(storage_key, tensors)):
                    user.meta["val"] = made
                    views.append(user)
