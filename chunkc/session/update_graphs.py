"""Graphs of a compiled training step that are no model's: what is done to gradients and parameters between calls.

Where a user compiles a whole step, Dynamo breaks it at `backward()` and hands over what follows as graphs of their own:
clipping, an optimizer's update, a moving average. Between calls parameters and gradients are ordinary tensors. So these
graphs run operator by operator, as the same code does outside of a compiled function.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from chunkc.passes.graphs.graphs import placeholders
from chunkc.session.session import readable_parameters


def is_between_calls(gm: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether a graph of Dynamo's, given these inputs, is code around a model's calls.

    It makes no gradients. And it takes gradients of parameters of a compiled model, or it only writes to what it is
    given: to parameters, or with none at all.
    """
    results = list(_results(gm))
    if any(value.requires_grad for value in results):
        return False
    parameters = list(_parameters(gm, inputs))
    if not results and (not parameters or any(_is_written(node) for node in parameters)):
        return True
    tensors = {id(value) for value in inputs if isinstance(value, torch.Tensor)}
    return any(id(parameter.grad) in tensors for parameter in readable_parameters() if parameter.grad is not None)


def _results(gm: fx.GraphModule) -> Iterator[torch.Tensor]:
    """Return the values that a graph makes and returns, as Dynamo traced it."""
    given = {id(node.meta.get("example_value")) for node in gm.graph.nodes if node.op in ("placeholder", "get_attr")}
    for node in pytree.tree_leaves(gm.graph.output_node().args):
        value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
        if isinstance(value, torch.Tensor) and id(value) not in given:
            yield value


def _parameters(gm: fx.GraphModule, inputs: Sequence[Any]) -> Iterator[fx.Node]:
    """Yield the parameters among the inputs, and those that the graph owns, as that of `torch.optim` does."""
    for node, value in zip(placeholders(gm.graph), inputs, strict=True):
        if isinstance(value, nn.Parameter):
            yield node
    owned = dict(gm.named_parameters())
    yield from (node for node in gm.graph.find_nodes(op="get_attr") if node.target in owned)


def _is_written(node: fx.Node) -> bool:
    """Whether Dynamo, which ran the graph on fake tensors, wrote to this one."""
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value._version > 0
