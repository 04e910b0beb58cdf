"""Bytes over the moments of one segment, known before it ever runs: for `codegen="eager"`, by liveness over the
storages of the segment's graph. `inductor_memory` is the other one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from chunkc.ir.errors import UnsupportedError
from chunkc.ir.program import MemoryStep, SegmentMemory
from chunkc.passes.graphs import (
    is_compute,
    module_path,
    op_name,
    output_node,
    placeholders,
    returned,
)
from chunkc.passes.scratch import scratch_nbytes
from chunkc.passes.scratch_cuda import cuda_scratch_nbytes
from chunkc.passes.segment_storages import graph_storages, number_storages, value_of

RNG_STATE_NBYTES = 5056
"""Bytes of the CPU generator's state."""


def eager_memory(graph: fx.Graph, num_threads: int) -> SegmentMemory:
    """Memory of a segment that runs node by node, every value dropped right after its last reader.

    Raises:
        UnsupportedError: an operator's memory is not known.
    """
    nodes = [node for node in graph.nodes if is_compute(node)]
    inputs = placeholders(graph)
    storages = graph_storages(graph)
    position = {node: index for index, node in enumerate(nodes)} | {output_node(graph): len(nodes)}
    last_hold: dict[int, int] = {}  # storage -> last step at which some value still holds it
    for node in [*inputs, *nodes]:
        born = position.get(node, -1)
        last_use = max((position[user] for user in node.users), default=born)
        for storage in storages.of[node]:
            last_hold[storage] = max(last_hold.get(storage, -1), last_use)
    given = [storages.of[node][0] if storages.of[node] else None for node in inputs]
    outside = {storage for storage in given if storage is not None} | storages.constants
    live: set[int] = set()
    steps = []
    for index, node in enumerate(nodes):
        live.update(storage for storage in storages.of[node] if storage not in outside)
        nbytes = sum(storages.nbytes[storage] for storage in live) + _scratch(node, num_threads)
        steps.append(MemoryStep(op_name(node), module_path(node), nbytes))
        live = {storage for storage in live if last_hold[storage] > index}
    released = tuple(len(nodes) if storage is None else last_hold[storage] + 1 for storage in given)
    results = [storages.of[node][0] for node in returned(graph) if node is not None]
    outputs, nbytes_of = number_storages(results, given, dict(enumerate(storages.nbytes)))
    return SegmentMemory(tuple(steps), released, outputs, nbytes_of)


def _scratch(node: fx.Node, num_threads: int) -> int:
    """Scratch bytes of a node.

    Raises:
        UnsupportedError: they are not known.
    """
    args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
    value = value_of(node)
    on_cuda = any(leaf.device.type == "cuda" for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))
    module = module_path(node)
    return call_scratch_nbytes(node.target, args, dict(kwargs), value, num_threads, module, on_cuda=on_cuda)


def call_scratch_nbytes(
    target: object,
    args: tuple,
    kwargs: dict,
    value: Any,
    num_threads: int,
    module: str = "",
    *,
    on_cuda: bool = False,
) -> int:
    """Scratch bytes of a call; of a higher-order operator's, those of the operator that it runs.

    Raises:
        UnsupportedError: they are not known.
    """
    if isinstance(target, torch._ops.OpOverload):
        if on_cuda:
            return cuda_scratch_nbytes(target, args, kwargs, value)
        return scratch_nbytes(target, args, kwargs, value, num_threads, module)
    if not isinstance(target, torch._ops.HigherOrderOperator):
        return 0
    # Those of selective checkpointing keep or restore the random generator's state around an operator.
    name = target.name()
    if name == "run_and_save_rng_state":
        inner = value[1] if isinstance(value, tuple) and len(value) > 1 else value
        return call_scratch_nbytes(args[0], args[1:], kwargs, inner, num_threads, module, on_cuda=on_cuda)
    if name == "run_with_rng_state":
        inner_nbytes = call_scratch_nbytes(args[1], args[2:], kwargs, value, num_threads, module, on_cuda=on_cuda)
        return max(inner_nbytes, 0) + RNG_STATE_NBYTES
    where = f" in {module}" if module else ""
    raise UnsupportedError(
        f"chunkc does not know how much memory the higher-order operator {name}{where} takes; write that part of the "
        "model without it"
    )
