"""Unroll the graph that AOTAutograd made of few blocks: repeat the operations of a block for all of them.

AOTAutograd goes through a graph operation by operation, forwards and then backwards, and what it makes of one depends
on that one's inputs alone. So from blocks that are alike it makes parts that are alike, but for the first and the last.
That is not taken on trust: three such parts are compared, as they follow each other, in the forward and in the
backward. The middle one is repeated, each time for the next block's parameters.

    before 1 2 3 after | backward of: after 3 2 1 before        as it was traced
    before 1 2 c c c 3 after | backward of: after 3 c c c 2 1 before        as it is returned

Names go on as they would have: `mul_7`, `mul_12` of two blocks are followed by `mul_17`. Passes may have changed the
traced graph, if they look at operations near each other only; names that they gave may be numbered otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from torch import fx
from torch.utils import _pytree as pytree

from chunkc.passes.graphs.graphs import placeholders, returned, storage_key, tensors_of
from chunkc.passes.rewrite.repeats import LAST, LAYER, NUM_KEPT, Repeats, collected, value_text, without_mark
from chunkc.torch_private.fake import FakeTensor, disable_current_modes, like

FORWARD, BACKWARD, INPUT = range(3)

Spot = tuple[int, int, int]
"""Of a node: in the forward, in the backward, or an input; at which offset there; of which part."""

_NAME = re.compile(r"^(.*?)(?:_(\d+))?$")


class NotAlike(Exception):
    """The parts are not alike, or are read by others: the graph is to be traced whole."""


@dataclass
class _Traced:
    """The parts of a graph that was traced.

    Attributes:
        around: what is between the parts: before them, after the forward's, after the backward's.
        parts: (FORWARD or BACKWARD, 1 to 3) -> its nodes.
        spot: of the nodes of parts, and of the parameters that one block alone reads.
    """

    graph: fx.Graph
    around: list[list[fx.Node]]
    parts: dict[tuple[int, int], list[fx.Node]]
    spot: dict[fx.Node, Spot] = field(default_factory=dict)

    @property
    def phases(self) -> tuple[int, ...]:
        return (FORWARD, BACKWARD) if (BACKWARD, 1) in self.parts else (FORWARD,)


def unroll(graph: fx.Graph, repeats: Repeats, num_inputs: int, num_outputs: int) -> fx.Graph:
    """Return the graph with all blocks.

    Args:
        graph: AOTAutograd's graph of the shortened graph: forward and backward, or the forward alone.
        num_inputs, num_outputs: of Dynamo's graph.

    Raises:
        NotAlike: the parts made of the blocks differ, or the graph has other inputs or outputs than Dynamo's.
    """
    _require_inputs(graph, num_inputs)
    num_results = len(returned(graph))
    is_joint = num_results == num_outputs + num_inputs and num_results != num_outputs
    if not is_joint and num_results != num_outputs:
        raise NotAlike("AOTAutograd returns other values than Dynamo's graph")
    traced = _take_apart(graph, is_joint)
    inputs = placeholders(graph)
    for part, positions in ((1, repeats.own[0]), (2, repeats.own[1]), (3, repeats.own[-2])):
        traced.spot.update({inputs[position]: (INPUT, at, part) for at, position in enumerate(positions)})
    _require_alike(traced)
    with disable_current_modes():
        return _Unrolling(traced, repeats).run(num_outputs)


def _require_inputs(graph: fx.Graph, num_inputs: int) -> None:
    names = [node.name for node in placeholders(graph)][:num_inputs]
    as_given = ([f"primals_{at + 1}" for at in range(num_inputs)], [f"arg{at}_1" for at in range(num_inputs)])
    if names not in as_given:
        raise NotAlike("AOTAutograd has other inputs than Dynamo's graph")


def _take_apart(graph: fx.Graph, is_joint: bool) -> _Traced:
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    layers = [(node.meta.get("custom") or {}).get(LAYER) for node in nodes]

    def begin_of(layer: int, after: int) -> int:
        try:
            return layers.index(layer, after)
        except ValueError:
            raise NotAlike(f"no operation of part {layer}") from None

    begins = [begin_of(layer, 0) for layer in range(1, LAST + 1)]
    if is_joint:
        begins += [begin_of(layer, begins[-1]) for layer in reversed(range(LAST))]
    if begins != sorted(set(begins)):
        raise NotAlike("operations of several blocks are mixed")
    pieces = [nodes[a:b] for a, b in pairwise([0, *begins, len(nodes)])]
    parts = {(FORWARD, part): pieces[part] for part in (1, 2, 3)}
    if is_joint:
        parts |= {(BACKWARD, part): pieces[LAST + LAST - part] for part in (1, 2, 3)}
    traced = _Traced(graph, [pieces[0], pieces[LAST], pieces[-1] if is_joint else []], parts)
    for (phase, part), of in parts.items():
        traced.spot.update({node: (phase, at, part) for at, node in enumerate(of)})
    return traced


def _require_alike(traced: _Traced) -> None:
    for phase in traced.phases:
        first, middle, last = (traced.parts[phase, part] for part in (1, 2, 3))
        if not len(first) == len(middle) == len(last):
            raise NotAlike("blocks have different numbers of operations")
        for a, b, c in zip(first, middle, last, strict=True):
            if not _text(a) == _text(b) == _text(c):
                raise NotAlike(f"{a}, {b} and {c} differ")
            reads = [_relative(traced, node) for node in (a, b, c)]
            for x, y, z in zip(*reads, strict=True):
                step = y[2] if isinstance(y, tuple) else 0
                if abs(step) > 1 or not (
                    (x == y or (step == -1 and isinstance(x, fx.Node)))
                    and (z == y or (step == 1 and isinstance(z, fx.Node)))
                ):
                    raise NotAlike(f"{a}, {b} and {c} read other values")
    for nodes, readable in zip(traced.around, ((), (3,), (1,)), strict=True):
        for node in nodes:
            for source in node.all_input_nodes:
                if source in traced.spot and traced.spot[source][2] not in readable:
                    raise NotAlike(f"{node} reads a value of a block")


def _text(node: fx.Node) -> object:
    return node.op, node.target, collected(node)[0], value_text(node.meta.get("val"))


def _relative(traced: _Traced, node: fx.Node) -> list[Spot | fx.Node]:
    """Return the inputs of a part's node: their spots relative to its own, or nodes outside of the parts."""
    part = traced.spot[node][2]

    def seen(source: fx.Node) -> Spot | fx.Node:
        if source not in traced.spot:
            return source
        kind, offset, of = traced.spot[source]
        return kind, offset, of - part

    return [seen(source) for source in collected(node)[1]]


class _Unrolling:
    """Builds the graph. Blocks are numbered from 1 to `_last`, without the last block, which is part of `after`."""

    def __init__(self, traced: _Traced, repeats: Repeats) -> None:
        self._traced = traced
        self._repeats = repeats
        self._last = len(repeats.blocks) - 1
        self._num_more = len(repeats.blocks) - NUM_KEPT
        self._graph = fx.Graph()
        self._values: dict[fx.Node, fx.Node] = {}
        self._made: dict[Spot, fx.Node] = {}
        self._owner = self._owners()
        self._steps = {phase: self._name_steps(phase) for phase in traced.phases}
        self._id_step, self._last_id = self._checkpoint_ids()
        self._stacks: dict[int, dict[object, fx.Node]] = {}
        inputs = placeholders(traced.graph)
        self._values.update({node: self._graph.node_copy(node) for node in inputs})
        for number, positions in enumerate(repeats.own, 1):
            for at, position in enumerate(positions):
                self._made[INPUT, at, number] = self._values[inputs[position]]

    def run(self, num_outputs: int) -> fx.Graph:
        before, after, end = self._traced.around
        blocks = [1, 2, *range(3, self._last), self._last]
        self._copy(before, self._shift(0, 0), 0)
        for number in blocks:
            self._block(FORWARD, number)
        self._copy(after, self._shift(self._num_more, 0), self._num_more)
        if BACKWARD in self._traced.phases:
            for number in reversed(blocks):
                self._block(BACKWARD, number)
            self._copy(end, self._shift(self._num_more, self._num_more), self._num_more)
        self._outputs(num_outputs)
        return self._graph

    def _part(self, number: int) -> int:
        """Return the part that a block is copied from: 1 for the first, 3 for the last, 2 for all between."""
        return 3 if number == self._last else min(number, 2)

    def _block(self, phase: int, number: int) -> None:
        part = self._part(number)
        more = number - part
        shift = self._shift(more, 0) if phase == FORWARD else self._shift(self._num_more, self._num_more - more)
        for offset, node in enumerate(self._traced.parts[phase, part]):
            made = self._made[phase, offset, number] = self._emit(node, shift, more, number)
            if part != 1:
                self._describe(node, made, (phase, offset, part), number)

    def _copy(self, nodes: Sequence[fx.Node], shift: Callable[[str], int], more: int) -> None:
        for node in nodes:
            self._values[node] = self._emit(node, shift, more, None)

    def _emit(self, node: fx.Node, shift: Callable[[str], int], more: int, number: int | None) -> fx.Node:
        def value(source: fx.Node) -> fx.Node:
            return self._at(source, number, node)

        args, kwargs = fx.map_arg((node.args, node.kwargs), value)
        base, index = _split(node.name)
        index += shift(base)
        name = f"{base}_{index}" if index else base
        made = self._graph.create_node(node.op, node.target, name=name, type_expr=node.type)
        made.args, made.kwargs = args, kwargs  # given at once, FX would search them for symbolic sizes
        made.meta = dict(node.meta)
        without_mark(made)
        if "ac_graph_id" in made.meta and (number is not None or made.meta["ac_graph_id"] > self._last_id):
            made.meta["ac_graph_id"] += more * self._id_step
        return made

    def _at(self, source: fx.Node, number: int | None, reader: fx.Node | None) -> fx.Node:
        """Return the value that a node of a block, or of none, reads in place of a traced one."""
        if source not in self._traced.spot:
            return self._values[source]
        kind, offset, part = self._traced.spot[source]
        if number is None or reader is None:
            at = self._last if part == 3 else part
        else:
            at = number + part - self._traced.spot[reader][2]
        return self._made[kind, offset, at]

    def _outputs(self, num_outputs: int) -> None:
        (former,) = self._traced.graph.find_nodes(op="output")
        results = list(former.args[0])
        if any(not isinstance(result, fx.Node) and result is not None for result in results):
            raise NotAlike("a constant is returned")
        if any(result in self._traced.spot for result in results[:num_outputs]):
            raise NotAlike("a value of a block is returned")
        values = [None if result is None else self._at(result, None, None) for result in results]
        for own in zip(*self._repeats.own, strict=True) if BACKWARD in self._traced.phases else ():
            places = [num_outputs + position for position in own]
            gradients = self._gradients([results[places[number]] for number in (0, 1, -2)])
            for place, gradient in zip(places[:-1], gradients, strict=True):
                values[place] = gradient
        output = self._graph.output(tuple(values) if isinstance(former.args[0], tuple) else values)
        output.meta = dict(former.meta)

    def _gradients(self, of_parts: Sequence[fx.Node | None]) -> list[fx.Node | None]:
        """Return the gradients, block by block, of the parameters at one place in each block.

        Args:
            of_parts: those of the parts 1 to 3.
        """
        if all(gradient is None for gradient in of_parts):
            return [None] * self._last
        spots = set()
        for part, gradient in enumerate(of_parts, 1):
            if gradient is None or gradient not in self._traced.spot:
                raise NotAlike("gradients come from elsewhere")
            kind, offset, of = self._traced.spot[gradient]
            spots.add((kind, offset, of - part))
        if len(spots) > 1:
            raise NotAlike("gradients come from different places")
        ((kind, offset, step),) = spots
        return [self._made[kind, offset, number + step] for number in range(1, self._last + 1)]

    def _describe(self, node: fx.Node, made: fx.Node, spot: Spot, number: int) -> None:
        """Give a block's node values in its own block's storages, and that block's modules and source lines."""
        own_shard = spot[2]
        is_new = 2 < number < self._last
        new: dict[int, FakeTensor] = {}

        def value(leaf: object) -> object:
            if not isinstance(leaf, FakeTensor):
                return leaf
            key = storage_key(leaf)
            owner = self._owner.get(key)
            if owner is None:
                return leaf  # in a storage that all blocks read
            (kind, at, part), which = owner
            if part == own_shard and not is_new:
                return leaf
            if (kind, at, part) == spot:
                new[key] = like(leaf, new.get(key))
                return new[key]
            return like(leaf, tensors_of(self._made[kind, at, number + part - own_shard])[which])

        made.meta["val"] = pytree.tree_map(value, node.meta.get("val"))
        if not is_new:
            return
        stacks = self._stacks_of(number)
        for key in ("nn_module_stack", "fwd_nn_module_stack", "stack_trace"):
            source = stacks.get(_stack_key(node.meta.get(key)))
            if source is not None and (stack := source.meta.get(key.removeprefix("fwd_"))):
                made.meta[key] = stack

    def _stacks_of(self, number: int) -> dict[object, fx.Node]:
        """Map the origins of the second block's nodes to those of this block's nodes."""
        if number not in self._stacks:
            found: dict[object, fx.Node] = {}
            for node, other in zip(self._repeats.stacks(1), self._repeats.stacks(number - 1), strict=True):
                for key in ("nn_module_stack", "stack_trace"):
                    if node.meta.get(key):
                        found.setdefault(_stack_key(node.meta[key]), other)
            self._stacks = {number: found}
        return self._stacks[number]

    def _owners(self) -> dict[int, tuple[Spot, int]]:
        """Map storages of parts to the first node with a tensor in each, and that tensor's index among the node's."""
        found: dict[int, tuple[Spot, int]] = {}
        others: set[int] = set()
        for node in self._traced.graph.nodes:
            for which, tensor in enumerate(tensors_of(node) if node.op != "output" else ()):
                key = storage_key(tensor)
                if key not in found and key not in others:
                    if node in self._traced.spot:
                        found[key] = self._traced.spot[node], which
                    else:
                        others.add(key)
        return found

    def _name_steps(self, phase: int) -> dict[str, int]:
        """Return by how much the number behind each name grows from block to block."""
        steps: dict[str, int] = {}
        order = (1, 2) if phase == FORWARD else (2, 1)
        for node, after in zip(*(self._traced.parts[phase, part] for part in order), strict=True):
            (base, index), (other, grown) = _split(node.name), _split(after.name)
            if base == other:
                steps.setdefault(base, grown - index)
        return steps

    def _shift(self, forwards: int, backwards: int) -> Callable[[str], int]:
        """Return a function from a name to the growth of its number behind so many added blocks in each phase.

        A pass that goes through a graph from its end gives numbers that grow by the blocks that come after.
        """
        before = {FORWARD: forwards, BACKWARD: backwards}

        def shift(base: str) -> int:
            steps = [(phase, of[base]) for phase, of in self._steps.items() if base in of]
            return sum(step * (before[phase] - (self._num_more if step < 0 else 0)) for phase, step in steps)

        return shift

    def _checkpoint_ids(self) -> tuple[int, int]:
        """Return by how much the numbers of activation checkpoints grow from block to block, and the parts' largest."""
        steps = set()
        last = 0
        for phase in self._traced.phases:
            for nodes in zip(*(self._traced.parts[phase, part] for part in (1, 2, 3)), strict=True):
                ids = [node.meta["ac_graph_id"] for node in nodes if "ac_graph_id" in node.meta]
                if len(ids) not in (0, 3):
                    raise NotAlike("some blocks are checkpointed")
                steps |= {after - before for before, after in pairwise(ids)}
                last = max(last, *ids, 0)
        if len(steps) > 1:
            raise NotAlike("checkpoints are counted otherwise")
        return (steps or {0}).pop(), last


def _split(name: str) -> tuple[str, int]:
    found = _NAME.match(name)
    assert found is not None
    return found[1], int(found[2] or 0)


def _stack_key(value: object) -> object:
    return tuple(value.items()) if isinstance(value, dict) else value
