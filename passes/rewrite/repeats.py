"""Find blocks that repeat in Dynamo's graph, and leave most of them out of it.

A model of equal layers gives a graph in which one block of operations follows the other, each on parameters of its
own. What AOTAutograd makes of one, it makes of every other. So it traces a few, and `unrolling` repeats what it made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from chunkc.passes.graphs.graphs import placeholders
from chunkc.torch_private.aot import LazyGraphModule
from chunkc.torch_private.dynamo import is_of_a_module

LAYER = "chunkc_layer"
"""The key in a node's `meta["custom"]` of the part of the shortened graph that it belongs to. 0: what comes before; 1,
2 and 3: a block each; 4: the last block, and what comes after."""

LAST = 4
NUM_KEPT = 4
"""Blocks that are traced, of all that are alike: the first two and the last two."""

MIN_ALIKE = NUM_KEPT + 2
"""So many blocks that are alike are worth the search."""

MAX_PERIODS = 24
"""Distances between equal operations that are tried as the length of a block."""

WRITES = frozenset({"batch_norm", "instance_norm"})
"""Functions that change inputs, which AOTAutograd returns as outputs: these would be missing."""


@dataclass(frozen=True)
class Repeats:
    """Blocks that are alike, in order.

    Attributes:
        blocks: the nodes of each, aligned.
        own: the inputs that each block alone reads, by place, aligned.
    """

    blocks: tuple[tuple[fx.Node, ...], ...]
    own: tuple[tuple[int, ...], ...]

    def stacks(self, block: int) -> Iterator[fx.Node]:
        """Yield a block's nodes and those of the graphs that it calls, in an order that is the same for all blocks."""
        yield from _with_inner(self.blocks[block])


def find_repeats(graph: fx.Graph) -> Repeats | None:
    """Find the blocks that are alike; None if there are fewer than MIN_ALIKE, or something else reads their values.

    A block reads the one before it, itself, parameters of its own, and what comes before all of them.
    """
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    known: dict[object, int] = {}
    texts = [known.setdefault(_text(node), len(known)) for node in nodes]
    begin, period, num_blocks = _longest_period(texts)
    if num_blocks < MIN_ALIKE:
        return None
    blocks = [tuple(nodes[at : at + period]) for at in range(begin, begin + num_blocks * period, period)]
    place = {node: (number, offset) for number, block in enumerate(blocks) for offset, node in enumerate(block)}
    described = [_described(number, block, place) for number, block in enumerate(blocks)]
    first, end = _longest_run([text for text, _ in described])
    alike = range(first, end)
    if len(alike) < MIN_ALIKE or any(_writes(node) for node in _with_inner(blocks[first])):
        return None
    for number in alike[:-1]:
        if any(
            place.get(user, (-1, 0))[0] not in (number, number + 1) for node in blocks[number] for user in node.users
        ):
            return None
    position = {node: at for at, node in enumerate(placeholders(graph))}
    own = tuple(tuple(position[node] for node in described[number][1]) for number in alike)
    return Repeats(tuple(blocks[number] for number in alike), own)


@contextmanager
def shortened(gm: fx.GraphModule, repeats: Repeats) -> Iterator[fx.GraphModule]:
    """Yield a copy of the graph with NUM_KEPT of the blocks, all of its inputs, and nodes marked by LAYER."""
    kept = {1: repeats.blocks[0], 2: repeats.blocks[1], 3: repeats.blocks[-2]}
    layer = {node: number for number, block in kept.items() for node in block}
    left_out = {node for block in repeats.blocks[2:-2] for node in block}
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    number = 0
    inner: list[fx.Node] = []
    for node in gm.graph.nodes:
        if node in left_out:
            continue
        if node is repeats.blocks[-2][0]:
            values.update({out: values[of] for out, of in zip(repeats.blocks[-3], repeats.blocks[1], strict=True)})
        copy = values[node] = graph.node_copy(node, values.__getitem__)
        if node.op == "placeholder":
            continue
        number = layer.get(node, LAST if number == 3 else number)
        for each in (copy, *_inner(node)):
            each.meta["custom"] = {**(each.meta.get("custom") or {}), LAYER: number}
        inner += _inner(node)
    short = LazyGraphModule(gm, graph)
    short.meta = gm.meta
    try:
        yield short
    finally:
        for node in inner:
            without_mark(node)


def without_mark(node: fx.Node) -> None:
    custom = {key: value for key, value in (node.meta.get("custom") or {}).items() if key != LAYER}
    if custom:
        node.meta["custom"] = custom
    else:
        node.meta.pop("custom", None)


def collected(node: fx.Node) -> tuple[Any, list[fx.Node]]:
    """Split a node's arguments: their structure without nodes, and the nodes in order."""
    found: list[fx.Node] = []

    def collect(source: fx.Node) -> None:
        found.append(source)

    return fx.map_arg((node.args, node.kwargs), collect), found


def value_text(value: object) -> str:
    """Describe fake values as far as operators can tell them apart; symbols by name, so that no guard is made."""
    return repr([_leaf_text(leaf) for leaf in pytree.tree_leaves(value)])


def _leaf_text(leaf: object) -> object:
    if not isinstance(leaf, torch.Tensor):
        return type(leaf).__name__, str(leaf)
    if leaf.is_nested:
        return id(leaf)  # none is like another: what has no strides has no form to compare
    layout = (tuple(leaf.stride()), leaf.storage_offset()) if leaf.layout is torch.strided else ()
    # Parameters are told from other tensors, and a subclass from its base.
    return type(leaf).__name__, str(leaf.device), leaf.dtype, leaf.requires_grad, tuple(leaf.shape), layout


def _text(node: fx.Node) -> object:
    constants, sources = collected(node)
    kinds = tuple(source.op == "placeholder" for source in sources)
    inner = _graph_of(node)
    target = node.target if inner is None else _graph_text(inner)
    return node.op, target, repr(constants), kinds, value_text(node.meta.get("example_value"))


def _graph_text(graph: fx.Graph) -> object:
    number = {node: at for at, node in enumerate(graph.nodes)}
    return tuple(
        (_text(node) if node.op != "placeholder" else "", tuple(number[source] for source in collected(node)[1]))
        for node in graph.nodes
    )


def _graph_of(node: fx.Node) -> fx.Graph | None:
    """Return the graph that a `get_attr` node reads, such as a checkpoint's body; None for any other node."""
    module = node.graph.owning_module
    if node.op != "get_attr" or module is None:
        return None
    found = getattr(module, str(node.target), None)
    return found.graph if isinstance(found, fx.GraphModule) else None


def _inner(node: fx.Node) -> Iterator[fx.Node]:
    graph = _graph_of(node)
    yield from _with_inner(graph.nodes) if graph is not None else ()


def _with_inner(nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
    for node in nodes:
        yield node
        yield from _inner(node)


def _writes(node: fx.Node) -> bool:
    name = str(getattr(node.target, "__name__", node.target))
    of_input = any(source.op == "placeholder" for source in node.all_input_nodes)
    return name in WRITES or (of_input and name.endswith("_") and not name.endswith("__"))


def _described(
    number: int, block: tuple[fx.Node, ...], place: dict[fx.Node, tuple[int, int]]
) -> tuple[object, tuple[fx.Node, ...]]:
    """Describe the inputs of a block, so that equal blocks have equal texts.

    Returns the text, and the placeholders that this block alone reads.
    """
    inside = set(block)
    own: dict[fx.Node, int] = {}

    def described(source: fx.Node) -> object:
        if source in place:
            of, offset = place[source]
            return number - of, offset
        if source.op == "placeholder" and inside.issuperset(source.users):
            at = own.setdefault(source, len(own))
            kind = is_of_a_module(source)
            return "own", at, kind, value_text(source.meta.get("example_value"))
        return source

    text = tuple(tuple(described(source) for source in collected(node)[1]) for node in block)
    return text, tuple(own)


def _longest_period(texts: Sequence[int]) -> tuple[int, int, int]:
    """Return the longest run of operations that repeats itself: its begin, its period, and the number of periods."""
    best, covered = (0, 1, 0), 0
    for period in _likely_periods(texts):
        begin, length = 0, 0
        first = 0
        for at in range(len(texts) - period + 1):
            if at + period == len(texts) or texts[at] != texts[at + period]:
                if at - first > length:
                    begin, length = first, at - first
                first = at + 1
        if length + period > covered and length + period >= MIN_ALIKE * period:
            best, covered = (begin, period, (length + period) // period), length + period
    return best


def _likely_periods(texts: Sequence[int]) -> list[int]:
    """Return the distances at which texts most often recur, the shortest first."""
    found: dict[int, list[int]] = {}
    for at, text in enumerate(texts):
        found.setdefault(text, []).append(at)
    distances = Counter(
        b - a for places in found.values() for more in (1, 2, 3) for a, b in zip(places, places[more:], strict=False)
    )
    return sorted(distance for distance, times in distances.most_common(MAX_PERIODS) if times >= MIN_ALIKE - 1)


def _longest_run(texts: Sequence[object]) -> tuple[int, int]:
    """Return the longest run of equal texts, as (first, end)."""
    best, first = (0, 0), 0
    for at in range(1, len(texts) + 1):
        if at == len(texts) or texts[at] != texts[first]:
            if at - first > best[1] - best[0]:
                best = (first, at)
            first = at
    return best
