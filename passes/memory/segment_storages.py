"""Assign the values of a segment's graph to storages, with the bytes of each when the segment runs.

Follows the graph, not the fake tensors' own storages: where two equal nodes were merged (common subexpressions), a
node's fake tensor may be a view of the other one's storage, and a copied node shares its fake tensor with the original.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from chunkc.passes.graphs.collectives import WAIT
from chunkc.passes.graphs.graphs import CLONES_OF_WHOLE_STORAGES, storage_key, value_of
from chunkc.passes.graphs.shapes import AS_TRACED, Shapes
from chunkc.passes.graphs.symbols import Size
from chunkc.passes.memory.scratch.cpu import corrects_outputs, output_nbytes
from chunkc.passes.memory.scratch.cuda import corrects_cuda_outputs, cuda_output_nbytes

aten = torch.ops.aten
_VIEWS_NOT_DECLARED = frozenset({aten._unsafe_view.default, aten._reshape_alias.default, aten.lift_fresh.default, WAIT})
"""Operators with a result that shares the first argument's storage although their schema does not say so."""


@dataclass
class GraphStorages:
    """Storages of a graph, numbered from 0.

    Attributes:
        of: node -> the storages that its value holds, without repetition.
        nbytes: bytes of each storage.
        constants: storages of the graph's constants, which exist whether or not it runs.
    """

    of: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)
    nbytes: list[int] = field(default_factory=list)
    constants: set[int] = field(default_factory=set)

    def new(self, nbytes: int) -> int:
        self.nbytes.append(nbytes)
        return len(self.nbytes) - 1


def graph_storages(graph: fx.Graph, shapes: Shapes = AS_TRACED) -> GraphStorages:
    """Number the storages of all nodes of `graph`; their bytes are those of `shapes`."""
    found = GraphStorages()
    trees: dict[fx.Node, Any] = {}  # as the node's value, with a storage's number in place of each tensor
    by_key: dict[int, int] = {}  # of placeholders
    for node in graph.nodes:
        if node.op == "output":
            continue
        if node.op == "placeholder":
            trees[node] = pytree.tree_map_only(
                torch.Tensor, lambda t: _shared(found, by_key, t, shapes), value_of(node)
            )
        elif node.op == "get_attr":
            trees[node] = pytree.tree_map_only(torch.Tensor, lambda t: found.new(shapes.nbytes(t)), value_of(node))
            found.constants.update(_numbers(trees[node]))
        elif node.target is operator.getitem and isinstance(trees[node.args[0]], tuple | list):
            trees[node] = trees[node.args[0]][node.args[1]]
        else:
            trees[node] = _results(found, node, trees, shapes)
        found.of[node] = tuple(dict.fromkeys(_numbers(trees[node])))
    return found


def _numbers(tree: Any) -> Iterator[int]:
    return (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, int) and not isinstance(leaf, bool))


def _shared(found: GraphStorages, by_key: dict[int, int], tensor: torch.Tensor, shapes: Shapes) -> int:
    key = storage_key(tensor)
    if key not in by_key:
        by_key[key] = found.new(shapes.nbytes(tensor))
    return by_key[key]


def _results(found: GraphStorages, node: fx.Node, trees: dict[fx.Node, Any], shapes: Shapes) -> Any:
    """Return the storage of each of an operator's results: an argument's for a view or an argument itself, else new."""
    value = value_of(node)
    leaves, spec = pytree.tree_flatten(value)
    inputs = {
        storage_key(tensor): number
        for source in node.all_input_nodes
        for tensor, number in zip(pytree.tree_leaves(value_of(source)), pytree.tree_leaves(trees[source]), strict=True)
        if isinstance(tensor, torch.Tensor)
    }
    declared = _declared(node, trees)
    real = _output_nbytes(node, value, shapes)
    fresh: dict[int, int] = {}
    numbers: list[int | None] = []
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            numbers.append(None)
            continue
        key = storage_key(leaf)
        if index in declared:
            numbers.append(declared[index])
        elif key in inputs:
            numbers.append(inputs[key])
        else:
            if node.target in CLONES_OF_WHOLE_STORAGES:
                real = {index: found.nbytes[next(_numbers(trees[node.all_input_nodes[0]]))]}
            if key not in fresh:
                fresh[key] = found.new(real[index] if index in real else shapes.nbytes(leaf))
            numbers.append(fresh[key])
    return pytree.tree_unflatten(numbers, spec)


def _declared(node: fx.Node, trees: dict[fx.Node, Any]) -> dict[int, int]:
    """Position among the returned tensors -> storage, for those that the schema says share an argument's storage."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return {}
    if target in _VIEWS_NOT_DECLARED:
        return {0: next(_numbers(trees[node.all_input_nodes[0]]))}
    of_set: dict[str, int] = {}
    for position, argument in enumerate(target._schema.arguments):
        given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        if argument.alias_info is not None and isinstance(given, fx.Node):
            number = next(_numbers(trees[given]), None)
            of_set.update({name: number for name in argument.alias_info.before_set if number is not None})
    returns = target._schema.returns
    found: dict[int, int] = {}
    for position, result in enumerate(returns):
        names = result.alias_info.before_set if result.alias_info is not None else set()
        number = next((of_set[name] for name in names if name in of_set), None)
        if number is None:
            continue
        if len(returns) == 1:  # one tensor, or a list of views
            found |= dict.fromkeys(range(len(pytree.tree_leaves(value_of(node)))), number)
        else:
            found[position] = number
    return found


def _output_nbytes(node: fx.Node, value: Any, shapes: Shapes) -> dict[int, int]:
    """Position among the returned tensors -> bytes, where the operator's storage is not as its fake tensor says.

    Around an operator of selective checkpointing, a generator's state may come first, which is on the CPU.
    """
    args: tuple[Any, ...] = node.args
    target, states = node.target, 0
    if isinstance(target, torch._ops.HigherOrderOperator):
        if target.name() == "run_and_save_rng_state":
            target, args, states, value = args[0], args[1:], 1, value[1]
        elif target.name() == "run_with_rng_state":
            target, args = args[1], args[2:]
    if not isinstance(target, torch._ops.OpOverload):
        return {}
    on_cuda = any(leaf.device.type == "cuda" for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))
    found = dict.fromkeys(range(states), 0) if on_cuda else {}
    if not (corrects_cuda_outputs if on_cuda else corrects_outputs)(target):
        return found
    given, kwargs, value = shapes.of((*fx.map_arg((args, dict(node.kwargs)), value_of), value))
    corrected = (cuda_output_nbytes if on_cuda else output_nbytes)(target, given, dict(kwargs), value)
    return found | {states + position: nbytes for position, nbytes in corrected.items()}


def number_storages(
    keys: Sequence[int | None], input_keys: Sequence[int | None], size: Mapping[int, Size]
) -> tuple[tuple[int, ...], tuple[Size, ...]]:
    """Number the outputs' storages as `SegmentMemory.outputs` does, and return the new ones' bytes, too.

    Args:
        keys: per output; None for a number, which counts as a storage of its own of no bytes.
        input_keys: per input; None for one that is no tensor, or that is let go.
    """
    nbytes: list[Size] = []
    fresh: dict[int, int] = {}
    outputs = []
    for key in keys:
        if key is not None and key in input_keys:
            outputs.append(-1 - input_keys.index(key))
        elif key is not None and key in fresh:
            outputs.append(fresh[key])
        else:
            outputs.append(len(nbytes))
            nbytes.append(0 if key is None else size[key])
            if key is not None:
                fresh[key] = outputs[-1]
    return tuple(outputs), tuple(nbytes)
