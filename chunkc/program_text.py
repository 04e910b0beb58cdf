"""Write a captured graph as a text without sizes, for ranks to compare: their batches may have other shapes.

It has every operator that makes a tensor, of which tensors it makes it, and the model's parameters by name. Numbers are
left out: at one rank's sizes they are constants, at another's symbols.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import fx
from torch.utils import _pytree as pytree

from chunkc.passes.graphs.graphs import placeholders
from chunkc.tracing.capture import TracedGraphs


def text_of(capture: TracedGraphs) -> str:
    """Write both phases, line by line."""
    graphs = [graph.graph for graph in (capture.forward, capture.backward) if graph is not None]
    return "\n--\n".join("\n".join(_lines(graph, capture.by_placeholder)) for graph in graphs)


def num_numbers(capture: TracedGraphs) -> int:
    """Count the forward's inputs that are no tensors: sizes that are symbols."""
    assert capture.forward is not None
    return sum(not _is_tensor(node) for node in placeholders(capture.forward.graph))


def _lines(graph: fx.Graph, parameters: Mapping[str, str]) -> Iterator[str]:
    numbers: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.op == "output":
            yield f"return {[numbers[value] for value in node.all_input_nodes if value in numbers]}"
        elif _is_tensor(node):
            numbers[node] = len(numbers)
            name = parameters.get(node.name, "") if node.op == "placeholder" else str(node.target)
            yield f"{numbers[node]} = {name}({[numbers[value] for value in node.all_input_nodes if value in numbers]})"


def _is_tensor(node: fx.Node) -> bool:
    return any(isinstance(value, torch.Tensor) for value in pytree.tree_leaves(node.meta.get("val")))
