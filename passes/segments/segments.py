"""Build the segments of a graph that was cut: each distinct one once, with the pieces of the graph that use it.

Repeated blocks give identical segments (see `cuts`), which are matched by their canonical text.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from chunkc.ir.program import Origin
from chunkc.passes.graphs.cost import is_product
from chunkc.passes.graphs.graphs import input_nodes_in_order, is_constant, op_name, placeholders, returned, storage_keys
from chunkc.passes.graphs.origins import origins
from chunkc.passes.graphs.symbols import free_symbols, plain_symbol
from chunkc.passes.planning.recompute import may_recompute
from chunkc.passes.segments.cuts import runs_by_aten
from chunkc.torch_private.aot import LazyGraphModule


@dataclass(frozen=True)
class Segment:
    """Run of operations that is compiled as one. `module` returns a tuple; inputs in order of first use."""

    name: str
    module: fx.GraphModule

    @property
    def example_inputs(self) -> list[Any]:
        return [node.meta["val"] for node in placeholders(self.module.graph)]

    @property
    def run_by_aten(self) -> bool:
        return any(map(runs_by_aten, self.module.graph.nodes))


@dataclass
class SegmentTable:
    """Distinct segments of a step, by their canonical text."""

    segments: dict[str, Segment] = field(default_factory=dict)

    def intern(self, root: torch.nn.Module, graph: fx.Graph) -> Segment:
        """Return the segment of this graph, with its constants as attributes of `root`."""
        key = canonical_text(graph)
        if graph.find_nodes(op="get_attr"):
            key += f"\nconstants of its own: {len(self.segments)}"
        if key not in self.segments:
            self.segments[key] = Segment(f"segment{len(self.segments)}", LazyGraphModule(root, graph))
        return self.segments[key]


@dataclass(frozen=True)
class Piece:
    """A use of a segment in a phase, with the phase's nodes that are its inputs and outputs.

    With `reads_home`, parameters among the inputs are read from their homes: the piece only makes views of them.
    `origins` are those of the segment's operations, in order, in this use.
    """

    segment: Segment
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    reads_home: bool
    origins: tuple[Origin, ...]


def extract(
    gm: fx.GraphModule, runs: Sequence[list[fx.Node]], table: SegmentTable, *, reads_home: bool = False
) -> list[Piece]:
    """Build (or find) the segment of every run. Each makes the constants that it reads itself."""
    return_values = {node for node in returned(gm.graph) if node is not None}
    pieces = []
    for run in map(_with_constants_read, runs):
        inside = set(run)
        outputs = [
            n for n in run if n in return_values or (any(u not in inside for u in n.users) and not is_constant(n))
        ]
        outputs = [n for n in outputs if not isinstance(n.meta.get("val"), (tuple, list))]
        if outputs:
            pieces.append(_piece(gm, run, outputs, table, reads_home=reads_home))
    return pieces


def _with_constants_read(run: Sequence[fx.Node]) -> list[fx.Node]:
    """Put each constant right before its first reader, from whichever run it was in, and leave out unread ones."""
    nodes: dict[fx.Node, None] = {}
    for node in run:
        if not is_constant(node):
            nodes |= dict.fromkeys(source for source in node.all_input_nodes if is_constant(source))
            nodes[node] = None
    return list(nodes)


def _piece(
    gm: fx.GraphModule,
    run: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    table: SegmentTable,
    *,
    reads_home: bool = False,
) -> Piece:
    inputs = list(input_nodes_in_order(list(run)))
    inputs += symbol_inputs(gm.graph, run, inputs)
    root, graph = _build(gm, run, inputs, outputs)
    segment = table.intern(root, graph)
    return Piece(segment, tuple(inputs), tuple(outputs), tuple(run), reads_home, origins(graph))


def recompute_pieces(
    gm: fx.GraphModule, pieces: Sequence[Piece], saved: Collection[fx.Node], table: SegmentTable
) -> dict[int, Piece]:
    """Return, by index, smaller pieces that recompute saved values without the values that later pieces read.

    A block's last product, say, computes the next block's input. PyTorch's checkpointing leaves it out as well, by
    stopping early.
    """
    saved_keys = {key for node in saved for key in storage_keys(node)}
    smaller = {}
    for index, piece in enumerate(pieces):
        if not may_recompute(piece.segment.module.graph):
            continue
        inside = set(piece.nodes)
        passed_on = [n for n in piece.outputs if any(u.op != "output" and u not in inside for u in n.users)]
        wanted = saved_keys.difference(key for node in (*piece.inputs, *passed_on) for key in storage_keys(node))
        outputs = [node for node in piece.outputs if not wanted.isdisjoint(storage_keys(node))]
        needed, waiting = set(outputs), list(outputs)
        while waiting:
            sources = [source for source in waiting.pop().all_input_nodes if source in inside - needed]
            needed.update(sources)
            waiting += sources
        run = [node for node in piece.nodes if node in needed]
        if run and any(map(is_product, inside - needed)):
            smaller[index] = _piece(gm, run, outputs, table)
    return smaller


def symbol_inputs(graph: fx.Graph, run: Sequence[fx.Node], inputs: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the nodes of the symbols in a run's sizes that are not among its inputs.

    Tensors' dimensions would tell Inductor most of them, but its cache keeps conditions only on symbols that are inputs
    (`get_pruned_guards` in `torch/_inductor/codecache.py`).
    """
    values = [node.meta.get("val") for node in (*inputs, *run)]
    present = {plain_symbol(node.meta.get("val")) for node in (*inputs, *run)}
    wanted = {symbol for symbol in free_symbols(values) if symbol not in present}
    inside, nodes = set(run), []
    for node in graph.nodes if wanted else ():
        symbol = plain_symbol(node.meta.get("val"))
        if symbol in wanted and node not in inside:
            nodes.append(node)
            wanted.remove(symbol)
    return nodes


def _build(
    gm: fx.GraphModule, run: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> tuple[torch.nn.Module, fx.Graph]:
    graph, copies = fx.Graph(), {}
    for index, node in enumerate(inputs):
        copies[node] = graph.placeholder(f"arg{index}_1")
        copies[node].meta["val"] = node.meta["val"]
    root = torch.nn.Module()
    for node in run:
        copies[node] = graph.node_copy(node, lambda n: copies[n])
        if node.op == "get_attr":
            setattr(root, str(node.target), operator.attrgetter(str(node.target))(gm))
    result = graph.output(tuple(copies[node] for node in outputs))
    result.meta["user_visible_output_idxs"] = list(range(len(outputs)))
    graph.eliminate_dead_code()
    return root, graph


def canonical_text(graph: fx.Graph) -> str:
    """Return a text that is equal for two segments exactly if the same code and the same predicted bytes serve both.

    Bytes depend on more than code does: an operator may copy the whole storage of an input, or resolve its conjugate.
    """
    names: dict[fx.Node, str] = {}
    shared: dict[int, str] = {}  # storage of an input -> the first input in it
    lines = []
    for node in graph.nodes:
        names[node] = f"%{len(names)}"
        args = fx.map_arg((node.args, node.kwargs), lambda n: fx.immutable_collections.immutable_list([names[n]]))
        value = _describe(node.meta.get("val")) if node.op in ("placeholder", "call_function") else ""
        target = "" if node.op == "placeholder" else op_name(node)
        if node.op == "call_function":
            target = str(node.target)
        elif node.op == "placeholder":
            target = " ".join(shared.setdefault(key, names[node]) for key in storage_keys(node))
        lines.append(f"{names[node]} = {node.op} {target} {args} {value}")
    return "\n".join(lines)


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        lies = f"{tuple(value.shape)}{tuple(value.stride())}{value.storage_offset()}"
        bits = f"{value.is_conj():d}{value.is_neg():d}"
        return f"{value.dtype}{lies} {value.untyped_storage().nbytes()} {bits}{value.device}"
    if isinstance(value, (tuple, list)):
        return ",".join(_describe(item) for item in value)
    return repr(value)
