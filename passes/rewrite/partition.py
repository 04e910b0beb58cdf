"""Joint graph to forward and backward, such that no view or cast of a parameter is saved for the backward.

A saved view or cast would pin its chunk, or a second copy of it, from the forward to the backward. Saving the
parameter itself costs nothing: the backward reads it from its chunk again. So everything that is computed from
one parameter alone, without arithmetic, is marked to be recomputed, and the min-cut partitioner
(Chen et al., arXiv:1604.06174, as a cut; PyTorch's `min_cut_rematerialization_partition`) does the rest.

Of frozen parameters, arithmetic is repeated, too: weights of a quantized base (QLoRA, Dettmers et al.,
arXiv:2305.14314) would else be saved as a whole in the precision that they are computed with.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from chunkc.passes.graphs.collectives import is_collective
from chunkc.passes.graphs.graphs import (
    is_compute,
    is_view_of,
    placeholders,
    returned,
    storage_keys,
    tensors_of,
    value_of,
)
from chunkc.passes.graphs.symbols import size_of
from chunkc.passes.planning.recompute import draws
from chunkc.torch_private.aot import min_cut_rematerialization_partition, states_kept_for

aten = torch.ops.aten
_CASTS = {
    aten._to_copy.default,
    torch.ops.prims.convert_element_type.default,
    aten.clone.default,
}

_PRODUCTS = frozenset({aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution})


def mark_parameter_views(joint: fx.GraphModule, is_parameter: Sequence[bool]) -> None:
    """Mark views, casts and copies of single parameters to be recomputed in the backward.

    `is_parameter` is aligned with the joint graph's primals.
    """
    for primal, parameter in zip(placeholders(joint.graph), is_parameter):
        if not parameter:
            continue
        frontier = [primal]
        while frontier:
            source = frontier.pop()
            keys = set(storage_keys(source))
            for user in source.users:
                if is_compute(user) and (user.target in _CASTS or is_view_of(user, keys)):
                    user.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
                    # One that several activation checkpoints read is no boundary between them, which would be saved.
                    user.meta.pop("ac_graph_id", None)
                    frontier.append(user)


def mark_frozen_values(joint: fx.GraphModule, is_frozen: Sequence[bool]) -> None:
    """Mark values of frozen parameters and buffers alone to be recomputed in the backward, but for matrix products.

    `is_frozen` is aligned with the joint graph's primals.
    """
    known = {primal for primal, frozen in zip(placeholders(joint.graph), is_frozen) if frozen}
    for node in joint.graph.nodes if known else ():
        sources = node.all_input_nodes
        if not sources or not is_compute(node) or not known.issuperset(sources) or not _is_light(node):
            continue
        known.add(node)
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        node.meta.pop("ac_graph_id", None)


def _is_light(node: fx.Node) -> bool:
    """Whether an operator draws no random numbers and multiplies no matrices."""
    if node.target is operator.getitem:
        return True
    tags = getattr(node.target, "tags", ())
    return isinstance(node.target, torch._ops.OpOverload) and not (
        torch.Tag.nondeterministic_seeded in tags or node.target.overloadpacket in _PRODUCTS
    )


def drop_detaches(forward: fx.GraphModule, backward: fx.GraphModule, num_user_outputs: int) -> None:
    """Take out what only detaches a value from autograd, which is over, but for what the user gets.

    Attention's would hold each layer's output until the last layer, which reads them all to detach them once more. What
    is saved has one name in both graphs.
    """
    given = set(returned(forward.graph)[:num_user_outputs])
    names = {node.name for node in backward.graph.nodes}
    taken = {node.name: node for node in placeholders(backward.graph)}
    for node in forward.graph.find_nodes(op="call_function", target=aten.detach.default):
        source, placeholder = node.args[0], taken.get(node.name)
        if node in given or (placeholder is not None and source.name in names):
            continue
        node.replace_all_uses_with(source)
        forward.graph.erase_node(node)
        if placeholder is not None:
            with backward.graph.inserting_before(placeholder):
                renamed = backward.graph.placeholder(source.name)
            renamed.meta = placeholder.meta
            placeholder.replace_all_uses_with(renamed)
            backward.graph.erase_node(placeholder)
            names.add(renamed.name)
            taken[renamed.name] = renamed


def hoist_for_backward(graph: fx.Graph) -> None:
    """Move views and reductions of the forward's values that only the backward reads to where these values are made.

    In the order of tracing they come last, with the gradients that read them, and the last segment would hold the
    values of all layers. What may be larger than what it is made of stays where it is.
    """
    late: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if all(user.op == "output" or user in late for user in node.users) and _is_better_early(node):
            late.add(node)
    for node in [node for node in graph.nodes if node in late]:
        source = max(node.all_input_nodes)  # the last of them, where they now are
        if is_compute(source):
            source.append(node)


def _is_better_early(node: fx.Node) -> bool:
    sources = node.all_input_nodes
    if not sources or not _is_pure(node) or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    if is_view_of(node, {key for source in sources for key in storage_keys(source)}):
        return True
    made = [tensor for source in sources if is_compute(source) for tensor in tensors_of(source)]
    return any(_is_no_larger(node.meta["val"], tensor) for tensor in made)


def _is_pure(node: fx.Node) -> bool:
    """Whether an operator writes nothing, draws no random numbers, and no ranks meet in it."""
    if not isinstance(node.target, torch._ops.OpOverload) or is_collective(node):
        return False
    return not node.target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in node.target.tags


def _is_no_larger(result: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether each dimension is the source's, or 1; symbols are looked at and not guarded on."""
    alike = result.dim() == source.dim() and result.itemsize <= source.itemsize
    return alike and all(size_of(n) in (1, size_of(of)) for n, of in zip(result.shape, source.shape, strict=True))


def partition(
    joint: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Cut a joint graph into a forward and a backward, so that few bytes are saved and marked values are recomputed.

    For an attention without dropout in an activation checkpoint no state of the random generator is kept, as PyTorch
    does: it would be 5 KB per layer, on a GPU a wait, and a reason not to run a segment again.

    `kwargs` are the partitioner's own.
    """
    with states_kept_for(draws):
        forward, backward = min_cut_rematerialization_partition(joint, joint_inputs, **kwargs)
    _trace_plain_tangents(backward.graph)
    return forward, backward


def _trace_plain_tangents(backward: fx.Graph) -> None:
    """Let gradients of outputs that were traced with a conjugate bit be plain ones, as most that arrive are.

    Where an operator reads the conjugate of such a gradient, it is copied first; the copy counts as scratch.
    """
    conjugated = [
        node
        for node in placeholders(backward)
        if str(node.target).startswith("tangents") and any(tensor.is_conj() for tensor in tensors_of(node))
    ]
    keys = {key for node in conjugated for key in storage_keys(node)}
    for node in conjugated:
        value = node.meta["val"]
        node.meta["val"] = value.new_empty_strided(value.shape, value.stride())
    for node in backward.nodes if keys else ():
        if is_view_of(node, keys):
            args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
            node.meta["val"] = node.target(*args, **kwargs)
