"""Unroll the graph that AOTAutograd made of few blocks: repeat the operations of a block for all of them.

AOTAutograd goes through a graph operation by operation, forwards and then backwards, and what it makes of one depends
on that one's inputs alone. So from blocks that are alike it makes parts that are alike, but for the first and the last.
That is not taken on trust: three such parts are compared, as they follow each other, in the forward and in the
backward. The middle one is repeated, each time for the next block's parameters.

    before 1 2 3 after | backward of: after 3 2 1 before        as it was traced
    before 1 2 c c c 3 after | backward of: after 3 c c c 2 1 before        as it is returned

Names go on as they would have: `mul_7`, `mul_12` of two blocks are followed by `mul_17`. Passes may have changed the
traced graph, if they look at operations near each other only; names that they gave may be numbered otherwise.

The partitioner, too, makes alike parts of a forward and a backward of blocks that are alike. So `unroll_phases` repeats
those, and `unroll` a joint graph only where it has to be partitioned whole. A forward ends with what the joint graph
does for the backward, from the last block to the first (`LATE`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from chunkc.passes.graphs.graphs import output_node, placeholders, returned, storage_key, tensors_of
from chunkc.passes.rewrite.repeats import LAST, LAYER, NUM_KEPT, Repeats, collected, value_text, without_mark
from chunkc.torch_private.fake import FakeTensor, disable_current_modes, like

BEFORE, FORWARD, AFTER, BACKWARD, END, LATE, INPUT = range(7)
"""Regions of a joint graph in their order; the backward's region in a forward that was partitioned; the inputs."""

Spot = tuple[int, int, int]
"""Of a node of a part: in which region; at which offset there; of which part."""

_NAME = re.compile(r"^(.*?)(?:_(\d+))?$")


class NotAlike(Exception):
    """The parts are not alike, or are read by others: the graph is to be traced whole."""


@dataclass(frozen=True)
class _Section:
    """A run of nodes in a graph: of a part from 1 to 3, or of none.

    Attributes:
        which: 0: the joint graph, or the forward; 1: the backward.
        readable: of no part: the parts with values that its nodes may read.
    """

    which: int
    region: int
    part: int | None
    nodes: Sequence[fx.Node]
    readable: tuple[int, ...] = ()


@dataclass
class _Traced:
    """The parts of a joint graph that was traced, or of the forward and the backward that were made of it.

    Attributes:
        sections: in the order of the graphs.
        spot: of the nodes of parts, and of the parameters that one block alone reads.
        saved: the backward's placeholders -> the forward's nodes with their values.
    """

    graphs: tuple[fx.Graph, ...]
    sections: Sequence[_Section]
    spot: dict[fx.Node, Spot] = field(default_factory=dict)
    saved: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for section in self.sections:
            if section.part is not None:
                self.spot.update({n: (section.region, at, section.part) for at, n in enumerate(section.nodes)})

    @property
    def parts(self) -> dict[tuple[int, int], Sequence[fx.Node]]:
        """Map region and part to the nodes."""
        return {(each.region, each.part): each.nodes for each in self.sections if each.part is not None}

    @property
    def regions(self) -> list[int]:
        """Return the regions of parts, in order."""
        return list(dict.fromkeys(each.region for each in self.sections if each.part is not None))

    def sources(self, node: fx.Node) -> list[fx.Node]:
        """Return the nodes that a node reads; in place of the backward's placeholders, those of the forward."""
        return [self.saved.get(source, source) for source in collected(node)[1]]


@dataclass(frozen=True)
class JointNames:
    """Names in a joint graph of few blocks.

    Attributes:
        place: name of each node -> its region and part, 0 of none.
        steps: FORWARD and BACKWARD -> by how much the number behind each name grows from block to block.
    """

    place: Mapping[str, tuple[int, int]]
    steps: Mapping[int, Mapping[str, int]]


def unroll(graph: fx.Graph, repeats: Repeats, num_inputs: int, num_outputs: int) -> fx.Graph:
    """Return the graph with all blocks.

    Args:
        graph: AOTAutograd's graph of the shortened graph: forward and backward, or the forward alone.
        num_inputs, num_outputs: of Dynamo's graph.

    Raises:
        NotAlike: the parts made of the blocks differ, or the graph has other inputs or outputs than Dynamo's.
    """
    traced = _taken_apart(graph, num_inputs, num_outputs)
    _note_parameters(traced, repeats)
    _require_alike(traced)
    with disable_current_modes():
        (unrolled,) = _Unrolling(traced, _joint_names(traced), repeats).run(num_outputs)
    return unrolled


def joint_names(graph: fx.Graph, num_inputs: int, num_outputs: int) -> JointNames:
    """Return the names of a joint graph, which `unroll_phases` needs once it is partitioned.

    Raises:
        NotAlike: as `unroll`.
    """
    return _joint_names(_taken_apart(graph, num_inputs, num_outputs))


def unroll_phases(
    forward: fx.Graph, backward: fx.Graph, names: JointNames, repeats: Repeats, num_inputs: int, num_outputs: int
) -> tuple[fx.Graph, fx.Graph]:
    """Return the forward and the backward with all blocks.

    Args:
        forward, backward: as partitioned, of the shortened graph.
        names: those of the joint graph that they were made of.
        num_inputs, num_outputs: of Dynamo's graph.

    Raises:
        NotAlike: the parts made of the blocks differ, or the graphs have other inputs or outputs than Dynamo's.
    """
    _require_inputs(forward, num_inputs)
    if len(returned(backward)) != num_inputs:
        raise NotAlike("the backward returns other values than gradients")
    kept = {node.name: node for node in returned(forward)[num_outputs:] if node is not None}
    taken = [node for node in placeholders(backward) if not str(node.target).startswith("tangents")]
    if {node.name for node in taken} != kept.keys() or len(kept) != len(returned(forward)) - num_outputs:
        raise NotAlike("the backward takes other values than the forward saves")
    saved = {node: kept[node.name] for node in taken}
    sections = [*_forward_sections(forward, names), *_backward_sections(backward, names)]
    traced = _Traced((forward, backward), sections, saved=saved)
    _note_parameters(traced, repeats)
    _require_alike(traced)
    with disable_current_modes():
        unrolled, of_backward = _Unrolling(traced, names, repeats).run(num_outputs)
    return unrolled, of_backward


def _note_parameters(traced: _Traced, repeats: Repeats) -> None:
    inputs = placeholders(traced.graphs[0])
    for part, positions in ((1, repeats.own[0]), (2, repeats.own[1]), (3, repeats.own[-2])):
        traced.spot.update({inputs[position]: (INPUT, at, part) for at, position in enumerate(positions)})


def _require_inputs(graph: fx.Graph, num_inputs: int) -> None:
    names = [node.name for node in placeholders(graph)][:num_inputs]
    as_given = ([f"primals_{at + 1}" for at in range(num_inputs)], [f"arg{at}_1" for at in range(num_inputs)])
    if names not in as_given:
        raise NotAlike("AOTAutograd has other inputs than Dynamo's graph")


def _taken_apart(graph: fx.Graph, num_inputs: int, num_outputs: int) -> _Traced:
    _require_inputs(graph, num_inputs)
    num_results = len(returned(graph))
    is_joint = num_results == num_outputs + num_inputs and num_results != num_outputs
    if not is_joint and num_results != num_outputs:
        raise NotAlike("AOTAutograd returns other values than Dynamo's graph")
    nodes = _operations(graph)
    layers = [(node.meta.get("custom") or {}).get(LAYER) for node in nodes]
    wanted = [1, 2, 3, LAST, *(reversed(range(LAST)) if is_joint else ())]
    regions = [BEFORE, *[FORWARD] * 3, AFTER, *([*[BACKWARD] * 3, END] if is_joint else [])]
    parts = [None, 1, 2, 3, None, *([3, 2, 1, None] if is_joint else [])]
    readable = {AFTER: (3,), END: (1,)}
    return _Traced(
        (graph,),
        [
            _Section(0, region, part, of, readable.get(region, ()))
            for region, part, of in zip(regions, parts, _cut(nodes, layers, wanted), strict=True)
        ],
    )


def _operations(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op not in ("placeholder", "output")]


def _cut(nodes: Sequence[fx.Node], layers: Sequence[object], wanted: Sequence[int]) -> list[Sequence[fx.Node]]:
    """Cut nodes where each of the wanted layers begins, in their order."""
    begins = [0]
    for layer in wanted:
        try:
            begins.append(layers.index(layer, begins[-1]))
        except ValueError:
            raise NotAlike(f"no operation of part {layer}") from None
    if begins[1:] != sorted(set(begins[1:])):
        raise NotAlike("operations of several blocks are mixed")
    return [nodes[a:b] for a, b in pairwise([*begins, len(nodes)])]


def _forward_sections(forward: fx.Graph, names: JointNames) -> list[_Section]:
    """Cut a forward, which keeps the order of the joint graph; last are operations that it does for the backward."""
    order = [(BEFORE, 0), *((FORWARD, part) for part in (1, 2, 3)), (AFTER, 0)]
    order += [*((BACKWARD, part) for part in (3, 2, 1)), (END, 0)]
    found: dict[tuple[int, int], list[fx.Node]] = {place: [] for place in order}
    last = 0
    for node in _operations(forward):
        at = order.index(_place(node, names))
        if at < last:
            raise NotAlike("operations of several blocks are mixed")
        last = at
        found[order[at]].append(node)
    readable = {AFTER: (3,), END: (1,)}
    return [
        _Section(0, LATE if region == BACKWARD else region, part or None, nodes, readable.get(region, ()))
        for (region, part), nodes in found.items()
    ]


def _backward_sections(backward: fx.Graph, names: JointNames) -> list[_Section]:
    """Cut a backward, with what it computes again where it is first read."""
    nodes = _operations(backward)
    layers = [part or (LAST if region == AFTER else 0) for region, part in (_place(node, names) for node in nodes)]
    after, third, second, first, end = _cut(nodes, layers, [3, 2, 1, 0])
    if any(_place(node, names)[1] for node in (*after, *end)) or not all(
        _place(node, names)[1] for node in (*third, *second, *first)
    ):
        raise NotAlike("operations of several blocks are mixed")
    return [
        _Section(1, AFTER, None, after, (3,)),
        *(_Section(1, BACKWARD, part, of) for part, of in ((3, third), (2, second), (1, first))),
        _Section(1, END, None, end, (1,)),
    ]


def _place(node: fx.Node, names: JointNames) -> tuple[int, int]:
    if node.name not in names.place:
        raise NotAlike(f"{node} was made by the partitioner")
    return names.place[node.name]


def _joint_names(traced: _Traced) -> JointNames:
    place = {node.name: (each.region, each.part or 0) for each in traced.sections for node in each.nodes}
    return JointNames(place, {region: _name_steps(traced, region) for region in traced.regions})


def _name_steps(traced: _Traced, region: int) -> dict[str, int]:
    steps: dict[str, int] = {}
    order = (1, 2) if region == FORWARD else (2, 1)
    for node, after in zip(*(traced.parts[region, part] for part in order), strict=False):
        (base, index), (other, grown) = _split(node.name), _split(after.name)
        if base == other:
            steps.setdefault(base, grown - index)
    return steps


def _require_alike(traced: _Traced) -> None:
    for region in traced.regions:
        first, middle, last = (traced.parts[region, part] for part in (1, 2, 3))
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
    for section in traced.sections:
        for node in section.nodes if section.part is None else ():
            for source in traced.sources(node):
                if source in traced.spot and traced.spot[source][2] not in section.readable:
                    raise NotAlike(f"{node} reads a value of a block")


def _text(node: fx.Node) -> object:
    return node.op, node.target, collected(node)[0], value_text(node.meta.get("val"))


def _relative(traced: _Traced, node: fx.Node) -> list[Spot | fx.Node]:
    """Return the inputs of a part's node: their spots relative to its own, or nodes outside of the parts."""
    part = traced.spot[node][2]

    def seen(source: fx.Node) -> Spot | fx.Node:
        if source not in traced.spot:
            return source
        region, offset, of = traced.spot[source]
        return region, offset, of - part

    return [seen(source) for source in traced.sources(node)]


class _Unrolling:
    """Builds the graphs. Blocks are numbered from 1 to `_last`, without the last block, which is part of what follows.

    Attributes:
        _taken: values of the forward -> the placeholders of the backward that is being built.
    """

    def __init__(self, traced: _Traced, names: JointNames, repeats: Repeats) -> None:
        self._traced = traced
        self._names = names
        self._repeats = repeats
        self._last = len(repeats.blocks) - 1
        self._num_more = len(repeats.blocks) - NUM_KEPT
        self._graph = fx.Graph()
        self._values: dict[fx.Node, fx.Node] = {}
        self._made: dict[Spot, fx.Node] = {}
        self._taken: dict[fx.Node, fx.Node] = {}
        self._owner = self._owners()
        self._id_step, self._last_id = self._checkpoint_ids() if len(traced.graphs) == 1 else (0, 0)
        self._stacks: dict[int, dict[object, fx.Node]] = {}
        inputs = placeholders(traced.graphs[0])
        self._values.update({node: self._graph.node_copy(node) for node in inputs})
        for number, positions in enumerate(repeats.own, 1):
            for at, position in enumerate(positions):
                self._made[INPUT, at, number] = self._values[inputs[position]]

    def run(self, num_outputs: int) -> list[fx.Graph]:
        graphs = [self._graph]
        begun = set()
        for section in self._traced.sections:
            if section.which == len(graphs):
                graphs.append(self._begin_backward(num_outputs))
            if section.part is None:
                more = 0 if section.region == BEFORE else self._num_more
                self._values.update((node, self._emit(node, more, None)) for node in section.nodes)
            elif section.region not in begun:
                begun.add(section.region)
                blocks = range(1, self._last + 1)
                for number in blocks if section.region == FORWARD else reversed(blocks):
                    self._block(section.region, number)
        self._outputs(0 if len(graphs) > 1 else num_outputs)
        return graphs

    def _part(self, number: int) -> int:
        """Return the part that a block is copied from: 1 for the first, 3 for the last, 2 for all between."""
        return 3 if number == self._last else min(number, 2)

    def _block(self, region: int, number: int) -> None:
        part = self._part(number)
        for offset, node in enumerate(self._traced.parts[region, part]):
            made = self._made[region, offset, number] = self._emit(node, number - part, number)
            if part != 1:
                self._describe(node, made, (region, offset, part), number)

    def _emit(self, node: fx.Node, more: int, number: int | None) -> fx.Node:
        def value(source: fx.Node) -> fx.Node:
            return self._at(source, number, node)

        args, kwargs = fx.map_arg((node.args, node.kwargs), value)
        name = self._name(node, more)
        made = self._graph.create_node(node.op, node.target, name=name, type_expr=node.type)
        made.args, made.kwargs = args, kwargs  # given at once, FX would search them for symbolic sizes
        made.meta = dict(node.meta)
        without_mark(made)
        if "ac_graph_id" in made.meta and (number is not None or made.meta["ac_graph_id"] > self._last_id):
            made.meta["ac_graph_id"] += more * self._id_step
        return made

    def _at(self, source: fx.Node, number: int | None, reader: fx.Node | None) -> fx.Node:
        """Return the value that a node of a block, or of none, reads in place of a traced one."""
        source = self._traced.saved.get(source, source)
        if source not in self._traced.spot:
            return self._here(self._values[source])
        region, offset, part = self._traced.spot[source]
        if number is None or reader is None:
            at = self._last if part == 3 else part
        else:
            at = number + part - self._traced.spot[reader][2]
        return self._here(self._made[region, offset, at])

    def _here(self, value: fx.Node) -> fx.Node:
        """Return a value as the graph that is being built has it: the backward takes those of the forward."""
        if value.graph is self._graph:
            return value
        if value not in self._taken:
            raise NotAlike(f"{value} is saved of some blocks alone")
        return self._taken[value]

    def _begin_backward(self, num_outputs: int) -> fx.Graph:
        """End the forward with the caller's outputs and what it saves, and take that into a backward."""
        forward, of_backward = self._graph, fx.Graph()
        former = output_node(self._traced.graphs[0])
        results = returned(former.graph)[:num_outputs]
        if any(result in self._traced.spot for result in results):
            raise NotAlike("a value of a block is returned")
        outputs = [None if result is None else self._at(result, None, None) for result in results]
        numbers, tensors = self._saved()
        output = forward.output((*outputs, *tensors, *numbers))
        output.meta = _described_outputs(former.meta, num_outputs, output)
        for value in (*numbers, *tensors):
            placeholder = self._taken[value] = of_backward.placeholder(value.name)
            placeholder.meta = dict(value.meta)
        for node in placeholders(self._traced.graphs[1]):
            if node not in self._traced.saved:
                self._values[node] = of_backward.node_copy(node)
        self._graph = of_backward
        return of_backward

    def _saved(self) -> tuple[list[fx.Node], list[fx.Node]]:
        """Return the numbers and the tensors that the forward saves, these in its order, as the partitioner does."""
        numbers: list[fx.Node] = []
        tensors: set[fx.Node] = set()
        for source in self._traced.saved.values():
            region, offset, part = self._traced.spot.get(source, (BEFORE, 0, 0))
            if source.meta.get("saved_tensor_with_no_vc_check"):
                raise NotAlike(f"{source} is saved after the others")
            if isinstance(source.meta.get("val"), torch.Tensor):
                blocks = {0: [], 1: [1], 2: range(2, self._last), 3: [self._last]}[part]
                tensors.update([self._made[region, offset, at] for at in blocks] or [self._values[source]])
            elif part == 0 and isinstance(source.meta.get("val"), torch.SymInt):
                numbers.append(self._values[source])
            else:
                raise NotAlike(f"{source} is saved, and is neither a tensor nor a size")
        return numbers, [node for node in self._graph.nodes if node in tensors]

    def _outputs(self, num_outputs: int) -> None:
        """End the graph that is being built; `num_outputs` of its outputs are the caller's, the others gradients."""
        former = output_node(self._traced.graphs[-1])
        (given,) = former.args
        assert isinstance(given, (tuple, list))
        results = list(given)
        if any(not isinstance(result, fx.Node) and result is not None for result in results):
            raise NotAlike("a constant is returned")
        results = [self._traced.saved.get(result, result) for result in results]
        if any(result in self._traced.spot for result in results[:num_outputs]):
            raise NotAlike("a value of a block is returned")
        values = [None if result is None else self._at(result, None, None) for result in results]
        for own in zip(*self._repeats.own, strict=True) if BACKWARD in self._traced.regions else ():
            places = [num_outputs + position for position in own]
            gradients = self._gradients([results[places[number]] for number in (0, 1, -2)])
            for place, gradient in zip(places[:-1], gradients, strict=True):
                values[place] = gradient
        if any(not placeholder.users and placeholder not in values for placeholder in self._taken.values()):
            raise NotAlike("values are saved that no backward reads")
        output = self._graph.output(tuple(values) if isinstance(given, tuple) else values)
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
            region, offset, of = self._traced.spot[gradient]
            spots.add((region, offset, of - part))
        if len(spots) > 1:
            raise NotAlike("gradients come from different places")
        ((region, offset, step),) = spots
        return [self._here(self._made[region, offset, number + step]) for number in range(1, self._last + 1)]

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
            (region, at, part), which = owner
            if part == own_shard and not is_new:
                return leaf
            if (region, at, part) == spot:
                new[key] = like(leaf, new.get(key))
                return new[key]
            return like(leaf, tensors_of(self._made[region, at, number + part - own_shard])[which])

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
        nodes = (node for graph in self._traced.graphs for node in graph.nodes)
        for node in nodes:
            for which, tensor in enumerate(tensors_of(node) if node.op != "output" else ()):
                key = storage_key(tensor)
                if key not in found and key not in others:
                    if node in self._traced.spot:
                        found[key] = self._traced.spot[node], which
                    else:
                        others.add(key)
        return found

    def _name(self, node: fx.Node, more: int) -> str:
        """Return a node's name behind so many added blocks; `more`: those before its block.

        A pass that goes through a graph from its end gives numbers that grow by the blocks that come after.
        """
        added = self._num_more
        region = self._names.place[node.name][0]
        forwards = {BEFORE: 0, FORWARD: more}.get(region, added)
        backwards = {BACKWARD: added - more, END: added}.get(region, 0)
        base, index = _split(node.name)
        for phase, of in self._names.steps.items():
            step = of.get(base, 0)
            index += step * ((forwards if phase == FORWARD else backwards) - (added if step < 0 else 0))
        return f"{base}_{index}" if index else base

    def _checkpoint_ids(self) -> tuple[int, int]:
        """Return by how much the numbers of activation checkpoints grow from block to block, and the parts' largest."""
        steps = set()
        last = 0
        for region in self._traced.regions:
            for nodes in zip(*(self._traced.parts[region, part] for part in (1, 2, 3)), strict=True):
                ids = [node.meta["ac_graph_id"] for node in nodes if "ac_graph_id" in node.meta]
                if len(ids) not in (0, 3):
                    raise NotAlike("some blocks are checkpointed")
                steps |= {after - before for before, after in pairwise(ids)}
                last = max(last, *ids, 0)
        if len(steps) > 1:
            raise NotAlike("checkpoints are counted otherwise")
        return (steps or {0}).pop(), last


def _described_outputs(former: Mapping[str, Any], num_outputs: int, output: fx.Node) -> dict[str, Any]:
    """Return AOTAutograd's notes on the outputs of a forward, which saves more than it did."""
    meta = dict(former)
    num_saved = len(returned(output.graph)) - num_outputs
    if "desc" in meta:
        kinds = {type(of_saved) for of_saved in meta["desc"][num_outputs:]}
        if len(kinds) > 1:
            raise NotAlike("values are saved in several ways")
        described = [kind(at) for kind in kinds for at in range(num_saved)]
        meta["desc"] = type(meta["desc"])([*meta["desc"][:num_outputs], *described])
    if "output_stack_traces" in meta:
        meta["output_stack_traces"] = [node and node.meta.get("stack_trace") for node in returned(output.graph)]
    return meta


def _split(name: str) -> tuple[str, int]:
    found = _NAME.match(name)
    assert found is not None
    return found[1], int(found[2] or 0)


def _stack_key(value: object) -> object:
    return tuple(value.items()) if isinstance(value, dict) else value
