"""Predict the bytes of one segment over its moments, before it ever runs.

Here for `codegen="eager"`, by liveness over the storages of the segment's graph; `inductor.memory` does so for compiled
segments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from chunkc.ir.errors import UnsupportedError
from chunkc.ir.program import Estimate, MemoryStep, SegmentMemory
from chunkc.passes.graphs.graphs import is_compute, module_path, op_name, output_node, placeholders, returned, value_of
from chunkc.passes.graphs.shapes import AS_TRACED, Shapes, is_number
from chunkc.passes.memory.scratch.cpu import is_known, is_measured, scratch_nbytes, takes_nothing
from chunkc.passes.memory.scratch.cuda import cuda_scratch_nbytes, is_known_on_cuda
from chunkc.passes.memory.segment_storages import graph_storages, number_storages

RNG_STATE_NBYTES = 5056
"""Bytes of the CPU generator's state."""


def eager_memory(graph: fx.Graph, num_threads: int, shapes: Shapes = AS_TRACED) -> SegmentMemory:
    """Predict the memory of a segment that runs node by node, every value dropped right after its last reader.

    Bytes are what `shapes` makes of sizes: with `SymbolicShapes`, expressions.

    Raises:
        UnsupportedError: a higher-order operator's memory is not known.
    """
    inputs = placeholders(graph)
    operations, position = _operations(graph)
    label = {node: index for index, node in enumerate(node for node in graph.nodes if is_compute(node))}
    storages = graph_storages(graph, shapes)
    last_hold: dict[int, int] = {}  # storage -> last step at which some value still holds it
    for node in [*inputs, *position]:
        born = position.get(node, -1)
        last_use = max((position[user] for user in node.users), default=born)
        for storage in storages.of.get(node, ()):
            last_hold[storage] = max(last_hold.get(storage, -1), last_use)
    given = [storages.of[node][0] if storages.of[node] else None for node in inputs]
    outside = {storage for storage in given if storage is not None} | storages.constants
    live: set[int] = set()
    steps = []
    for index, node in enumerate(operations):
        live.update(storage for storage in storages.of[node] if storage not in outside)
        scratch = _scratch(node, num_threads, shapes)
        nbytes = torch.sym_sum([*(storages.nbytes[storage] for storage in live), scratch.nbytes])
        step = MemoryStep(op_name(node), module_path(node), nbytes, label[node], scratch.estimate)
        steps.append(step.with_sizes(shapes.known))
        live = {storage for storage in live if last_hold[storage] > index}
    end = len(operations)
    released = tuple(end if storage is None else last_hold[storage] + 1 for storage in given)
    results = [next(iter(storages.of[node]), None) for node in returned(graph) if node is not None]
    sizes = {number: shapes.known(nbytes) for number, nbytes in enumerate(storages.nbytes)}
    outputs, nbytes_of = number_storages(results, given, sizes)
    return SegmentMemory(tuple(steps) or (MemoryStep("sizes", "", 0),), released, outputs, nbytes_of)


def bounded_memory(graph: fx.Graph, num_threads: int, unread: str, shapes: Shapes = AS_TRACED) -> SegmentMemory:
    """Bound the memory of a segment with compiled code that cannot be read.

    All values that the graph makes count at once, and inputs until the end. In whatever order the code computes, and
    whatever it fuses, it needs no more of the graph's values.

    Args:
        unread: what could not be read, from `estimates.unread_wrapper`: each moment is an estimate of that name.

    Raises:
        UnsupportedError: a higher-order operator's memory is not known.
    """
    memory = eager_memory(graph, num_threads, shapes)
    storages = graph_storages(graph, shapes)
    inputs = [storages.of[node][0] for node in placeholders(graph) if storages.of[node]]
    outside = {*inputs, *storages.constants}
    made = torch.sym_sum([nbytes for storage, nbytes in enumerate(storages.nbytes) if storage not in outside])
    steps = []
    for step, node in zip(memory.steps, _operations(graph)[0]):
        nbytes = shapes.known(torch.sym_sum([made, _scratch(node, num_threads, shapes).nbytes]))
        steps.append(replace(step, nbytes=nbytes, estimate=Estimate(unread, nbytes)))
    released = (len(steps),) * len(memory.input_released)
    return replace(memory, steps=tuple(steps) or memory.steps, input_released=released)


def _operations(graph: fx.Graph) -> tuple[list[fx.Node], dict[fx.Node, int]]:
    """Return the nodes that run, in order, and the step of each.

    Numbers computed from sizes have no step of their own: the values that they read live to the step before.
    """
    operations: list[fx.Node] = []
    position: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if is_compute(node):
            if not is_number(node):
                operations.append(node)
            position[node] = len(operations) - 1
    return operations, position | {output_node(graph): len(operations)}


@dataclass(frozen=True)
class Scratch:
    """Scratch bytes of a call; `guessed`: the operator ("aten::name") if its bytes are a guess, else empty."""

    nbytes: int
    guessed: str = ""

    @property
    def estimate(self) -> Estimate | None:
        return Estimate(self.guessed, self.nbytes) if self.guessed else None


NO_SCRATCH = Scratch(0)


def _scratch(node: fx.Node, num_threads: int, shapes: Shapes) -> Scratch:
    """Scratch of a node.

    Raises:
        UnsupportedError: it is a higher-order operator with unknown memory.
    """
    value = value_of(node)
    on_cuda = any(leaf.device.type == "cuda" for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))
    module = module_path(node)
    args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
    if not (isinstance(node.target, torch._ops.OpOverload) and takes_nothing(node.target)) or on_cuda:
        args, kwargs, value = shapes.of((args, dict(kwargs), value))
    return call_scratch(node.target, args, dict(kwargs), value, num_threads, module, on_cuda=on_cuda)


def call_scratch(
    target: object,
    args: tuple,
    kwargs: dict,
    value: Any,
    num_threads: int,
    module: str = "",
    *,
    on_cuda: bool = False,
) -> Scratch:
    """Scratch of a call; of a higher-order operator's, that of the operator that it runs.

    Args:
        module: the user's module it belongs to, for the error.

    Raises:
        UnsupportedError: it is a higher-order operator with unknown memory.
    """
    if isinstance(target, torch._ops.OpOverload):
        if on_cuda:
            known = is_known_on_cuda(target)
            nbytes = cuda_scratch_nbytes(target, args, kwargs, value, num_threads)
        else:
            known = is_known(target) or is_measured(target, args, kwargs, num_threads)
            nbytes = scratch_nbytes(target, args, kwargs, value, num_threads)
        return Scratch(nbytes, "" if known else target._schema.name)
    if not isinstance(target, torch._ops.HigherOrderOperator):
        return NO_SCRATCH
    # Those of selective checkpointing keep or restore the random generator's state around an operator.
    name = target.name()
    if name == "run_and_save_rng_state":
        inner = value[1] if isinstance(value, tuple) and len(value) > 1 else value
        return call_scratch(args[0], args[1:], kwargs, inner, num_threads, module, on_cuda=on_cuda)
    if name == "run_with_rng_state":
        found = call_scratch(args[1], args[2:], kwargs, value, num_threads, module, on_cuda=on_cuda)
        return replace(found, nbytes=max(found.nbytes, 0) + RNG_STATE_NBYTES)
    if name == "auto_functionalized_v2":
        operands, changes, inner = _of_changing_operator(args[0], kwargs, value)
        return call_scratch(args[0], operands, changes, inner, num_threads, module, on_cuda=on_cuda)
    where = f" in {module}" if module else ""
    raise UnsupportedError(
        f"chunkc does not know how much memory the higher-order operator {name}{where} takes; write that part of the "
        "model without it"
    )


def _of_changing_operator(
    target: torch._ops.OpOverload, given: Mapping[str, Any], value: Sequence[Any]
) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Return arguments and results of an operator that changes arguments, given its functionalized call.

    That call copies the arguments first, and returns the copies behind the operator's own results. In place of a view
    that is changed, the whole tensor that is copied is returned.
    """
    bases = given["_all_bases"]
    operands, keywords = [], {}
    for argument in target._schema.arguments:
        if f"_{argument.name}_length" in given:
            places = [given[f"_{argument.name}_{i}_base_index"] for i in range(given[f"_{argument.name}_length"])]
            found: Any = [bases[place] for place in places]
        elif f"_{argument.name}_base_index" in given:
            place = given[f"_{argument.name}_base_index"]
            found = None if place is None else bases[place]
        else:
            found = given.get(argument.name, argument.default_value)
        if argument.kwarg_only:
            keywords[argument.name] = found
        else:
            operands.append(found)
    results = tuple(value[: len(target._schema.returns)])
    return tuple(operands), keywords, results[0] if len(results) == 1 else results
